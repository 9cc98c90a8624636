"""Text to token ids and back, whatever file the vocabulary came in.

    tokenizer.json ─┐
    tokenizer.model ┼─ tokenizers.Tokenizer ─ Tokenizer: encode, decode, the bytes of a token
    GGUF metadata  ─┘

Special tokens written in text are text unless the caller asks otherwise. Decoding is a sum of
the tokens' bytes, so that text decoded piece by piece equals text decoded at once.
Knows no chat, no prompt and no stream.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from xjax.checkpoints.checkpoint import Checkpoint
from xjax.text.decoding import TextBytes, read_decoding
from xjax.text.folder import load_folder
from xjax.text.marks import Marks
from xjax.text.messages import check_unicode
from xjax.text.vocabulary.gguf import Specials, build_vocabulary

_SPACES = (" ", "▁")


def load_tokenizer(checkpoint: Checkpoint, *, cache_dir: Path | None = None) -> "Tokenizer":
    """Load the tokenizer of a checkpoint; what is slow to derive is kept in `cache_dir`.

    Raises LoadError when there is none or its kind is not known.
    """
    if checkpoint.kind == "gguf":
        return Tokenizer(*build_vocabulary(checkpoint.config, cache_dir))
    return Tokenizer(*load_folder(checkpoint.path, cache_dir))


class Tokenizer:
    """Encode and decode; threads may share one.

    bos_id           id of the beginning-of-sequence token, or None
    eos_ids          ids that end an answer, as far as the vocabulary knows
    prefix, suffix   ids that `add_special_tokens` puts around a text
    """

    def __init__(self, inner: tokenizers.Tokenizer, specials: Specials):
        inner.encode_special_tokens = True  # special tokens in text are text; `split_special` finds them
        inner.no_truncation()
        inner.no_padding()
        self._first_space = _take_over_first_space(inner)
        self._inner = inner
        self._decoding = read_decoding(inner)
        self._added: dict[int, AddedToken] = inner.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self._specials = Marks({i: token for i, token in self._added.items() if token.special})
        self._words = Marks({i: token for i, token in self._added.items() if not token.special})
        self._bytes_by_id: dict[int, bytes] = {}
        self.bos_id = specials.bos_id
        self.eos_ids = specials.eos_ids
        self.prefix = specials.prefix
        self.suffix = specials.suffix

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._inner.get_vocab_size(with_added_tokens=False), max(self._added, default=-1) + 1)

    # ---- text to ids ------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Encode a text; `parse_special` turns special tokens written in it into control tokens."""
        ids = self.encode_segments(self.split_special(text) if parse_special else [text])
        return [*self.prefix, *ids, *self.suffix] if add_special_tokens else ids

    def split_special(self, text: str) -> list[str | int]:
        """Cut a text at the special tokens written in it; those come back as ids."""
        segments: list[str | int] = []
        end = 0
        for mark in self._specials.find(text):
            segments += (text[end : mark.start], mark.token_id)
            end = mark.end
        segments.append(text[end:])
        return segments

    def has_special(self, text: str) -> bool:
        """Whether a special token is written in a text."""
        return self._specials.occurs_in(text)

    def replace_special(self, text: str, replacement: Callable[[str], str]) -> str:
        """Exchange the special tokens written in a text; the spaces around them stay."""
        parts: list[str] = []
        end = 0
        for mark in self._specials.find(text):
            content = self._added[mark.token_id].content
            start = text.index(content, mark.start)
            parts += (text[end:start], replacement(content))
            end = start + len(content)
        return "".join(parts) + text[end:]

    def encode_segments(self, segments: Iterable[str | int]) -> list[int]:
        """Encode one text given as ordinary stretches and the ids of special tokens between them."""
        ids: list[int] = []
        is_first = True
        for segment in segments:
            if isinstance(segment, int):
                ids.append(segment)
            elif segment:
                ids += self._encode_ordinary(segment, is_first=is_first)
            if segment != "":
                is_first = False
        return ids

    def _encode_ordinary(self, text: str, *, is_first: bool) -> list[int]:
        if self._first_space and is_first and not text.startswith(_SPACES) and not self._words.starts(text):
            text = " " + text
        try:
            # A batch of one: it alone lets other threads run meanwhile, and a long text takes its time.
            ids: list[int] = self._inner.encode_batch([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError):  # how tokenizers meets a lone surrogate
            check_unicode(text)
            raise
        if self._special_ids.isdisjoint(ids):
            return ids
        # A vocabulary may spell a special token out of ordinary pieces; cut it so that it cannot.
        mark = next(self._specials.find(text), None)
        if mark is None or mark.end - mark.start < 2:
            return ids
        cut = mark.start + 1
        return self._encode_ordinary(text[:cut], is_first=False) + self._encode_ordinary(
            text[cut:], is_first=False
        )

    # ---- ids to text ------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids; bytes that are not UTF-8 become U+FFFD and unknown ids add nothing."""
        stream = self.byte_stream(skip_special_tokens=skip_special_tokens)
        return b"".join(map(stream.push, ids)).decode("utf-8", "replace")

    def byte_stream(self, *, skip_special_tokens: bool = True) -> "ByteStream":
        """Start a text that is decoded token by token."""
        return ByteStream(self, TextBytes(self._decoding), skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token adds in the middle of a text; none for an unknown id."""
        data = self._bytes_by_id.get(token_id)
        if data is None:
            token = self.token_string(token_id)
            data = self._decoding.token_bytes(token, is_added=token_id in self._added)
            self._bytes_by_id[token_id] = data
        return data

    def token_string(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it; "" for an unknown id."""
        return (self._inner.id_to_token(token_id) or "") if 0 <= token_id < 2**32 else ""

    def is_special(self, token_id: int) -> bool:
        """Whether an id is a control token."""
        return token_id in self._special_ids


class ByteStream:
    """The bytes of one text, token by token, with what the start of a text loses left out."""

    def __init__(self, tokenizer: Tokenizer, text_bytes: TextBytes, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._text_bytes = text_bytes
        self._skip = skip_special_tokens

    def push(self, token_id: int) -> bytes:
        """Return what the next token adds."""
        if self._skip and self._tokenizer.is_special(token_id):
            return b""
        token = self._tokenizer.token_string(token_id) if self._text_bytes.needs_token else ""
        return self._text_bytes.push(token, self._tokenizer.token_bytes(token_id))


def _take_over_first_space(inner: tokenizers.Tokenizer) -> bool:
    """Switch off a space put before the very first stretch only; returns whether there was one.

    A text is encoded stretch by stretch, so the tokenizer cannot know which one is the first.
    """
    if inner.pre_tokenizer is None:
        return False
    state: dict[str, Any] = json.loads(inner.pre_tokenizer.__getstate__())
    steps: list[dict[str, Any]] = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    found = [step for step in steps if step["type"] == "Metaspace" and step.get("prepend_scheme") == "first"]
    for step in found:
        step["prepend_scheme"] = "never"
    if found:
        replacement = (
            pre_tokenizers.Sequence([]) if state["type"] == "Sequence" else pre_tokenizers.Metaspace()
        )
        replacement.__setstate__(json.dumps(state).encode())
        inner.pre_tokenizer = replacement
    return bool(found)
