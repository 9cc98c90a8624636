"""Log-probabilities as JSON text, in the shapes of both APIs.

    chat          {"content": [{"token", "logprob", "bytes", "top_logprobs"}, ...]}
    completions   {"tokens", "token_logprobs", "top_logprobs", "text_offset"}, arrays side by side
    prompt        [null, {"id": {"logprob", "rank", "decoded_token"}}, ...]

A token's text is its exact bytes. Where they are no UTF-8 by themselves they are written as \\xe2, in
completions behind "bytes:", as OpenAI does. It knows neither events nor samples.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from xjax.request import TokenLogprobs
from xjax.text.tokenizer import ByteStream, Tokenizer
from xjax_server.openai.frames import quote

_LOWEST = -9999.0  # JSON has no minus infinity


def _number(logprob: float) -> str:
    return repr(max(float(logprob), _LOWEST))


def spell(data: bytes, mark: str = "") -> str:
    """A token's bytes as text."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return mark + "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in data)


class TokenBytes:
    """The bytes of the tokens of one text in order, and of what could have stood in their place."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream: ByteStream = tokenizer.byte_stream(skip_special_tokens=False)
        self._is_first = True

    def push(self, token_id: int, others: Iterable[int]) -> tuple[bytes, list[bytes]]:
        """Return the bytes of the next token, and those of others at its place."""
        if not self._is_first:
            token_bytes = self._tokenizer.token_bytes
            return self._stream.push(token_id), [token_bytes(other) for other in others]
        # The start of a text loses a space in some vocabularies, whichever token begins it.
        self._is_first = False
        first = [self._tokenizer.byte_stream(skip_special_tokens=False).push(other) for other in others]
        return self._stream.push(token_id), first


class ChatLogprobs:
    """Writes the entries of one chat sample, in order."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._bytes = TokenBytes(tokenizer)
        self._num_top = num_top

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> str:
        """The `logprobs` object of these tokens."""
        entries = [self._entry(*pair) for pair in zip(token_ids, logprobs, strict=True)]
        return '{"content":[' + ",".join(entries) + '],"refusal":null}'

    def _entry(self, token_id: int, item: TokenLogprobs) -> str:
        top = item.top[: self._num_top]
        data, others = self._bytes.push(token_id, [other for other, _ in top])
        best = ["{" + _fields(other, value) + "}" for other, (_, value) in zip(others, top, strict=True)]
        return "{" + _fields(data, item.logprob) + ',"top_logprobs":[' + ",".join(best) + "]}"


def _fields(data: bytes, logprob: float) -> str:
    listed = ",".join(map(str, data))
    return f'"token":{quote(spell(data))},"logprob":{_number(logprob)},"bytes":[{listed}]'


@dataclass
class Columns:
    """The four arrays of a completion's log-probabilities as JSON fragments."""

    tokens: list[str] = field(default_factory=list[str])
    token_logprobs: list[str] = field(default_factory=list[str])
    top_logprobs: list[str] = field(default_factory=list[str])
    text_offset: list[str] = field(default_factory=list[str])

    def __add__(self, other: "Columns") -> "Columns":
        return Columns(
            self.tokens + other.tokens,
            self.token_logprobs + other.token_logprobs,
            self.top_logprobs + other.top_logprobs,
            self.text_offset + other.text_offset,
        )

    def json(self) -> str:
        """The `logprobs` object."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return "{" + ",".join(f'"{name}":[{",".join(getattr(self, name))}]' for name in names) + "}"


class TextLogprobs:
    """Writes the columns of one text, in order.

    offset           characters of the text that come before its first token
    silent           tokens at its beginning that are in no text, such as one that was put before a prompt
    shows_specials   whether special tokens are in the text
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_top: int,
        *,
        offset: int = 0,
        silent: int = 0,
        shows_specials: bool = True,
    ) -> None:
        self._bytes = TokenBytes(tokenizer)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = offset
        self._silent = silent
        self._shows_specials = shows_specials

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Columns:
        """The columns of these tokens; one without log-probabilities has null."""
        columns = Columns()
        for token_id, item in zip(token_ids, logprobs, strict=True):
            top = () if item is None else item.top[: self._num_top]
            columns.text_offset.append(str(self._offset))
            data, others = self._push(token_id, [other for other, _ in top])
            label = quote(spell(data, "bytes:"))
            columns.tokens.append(label)
            columns.token_logprobs.append("null" if item is None else _number(item.logprob))
            if item is None:
                columns.top_logprobs.append("null")
                continue
            best = {label: _number(item.logprob)}
            for other, (_, value) in zip(others, top, strict=True):
                best.setdefault(quote(spell(other, "bytes:")), _number(value))
            columns.top_logprobs.append("{" + ",".join(f"{name}:{best[name]}" for name in best) + "}")
        return columns

    def _push(self, token_id: int, others: list[int]) -> tuple[bytes, list[bytes]]:
        if self._silent:
            self._silent -= 1
            token_bytes = self._tokenizer.token_bytes
            return token_bytes(token_id), [token_bytes(other) for other in others]
        data, other_bytes = self._bytes.push(token_id, others)
        if self._shows_specials or not self._tokenizer.is_special(token_id):
            self._offset += len(self._characters.decode(data))
        return data, other_bytes


def prompt_logprobs(
    token_ids: Sequence[int], items: Sequence[TokenLogprobs | None], num_top: int, tokenizer: Tokenizer
) -> str:
    """The `prompt_logprobs` array: for each token its own and the best, by id."""
    stream = TokenBytes(tokenizer)
    positions: list[str] = []
    for token_id, item in zip(token_ids, items, strict=True):
        top = () if item is None else item.top[:num_top]
        data, others = stream.push(token_id, [other for other, _ in top])
        if item is None:
            positions.append("null")
            continue
        own = (item.rank, item.logprob, data)
        entries = {token_id: own}
        for i, (other, value) in enumerate(top):
            entries.setdefault(other, (i + 1, value, others[i]))
        positions.append("{" + ",".join(_ranked(*pair) for pair in entries.items()) + "}")
    return "[" + ",".join(positions) + "]"


def _ranked(token_id: int, entry: tuple[int, float, bytes]) -> str:
    rank, logprob, data = entry
    decoded = quote(data.decode("utf-8", "replace"))
    return f'"{token_id}":{{"logprob":{_number(logprob)},"rank":{rank},"decoded_token":{decoded}}}'
