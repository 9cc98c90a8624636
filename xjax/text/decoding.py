"""The bytes that each token adds to a text, read from a tokenizer's decoder.

Two spellings: byte-level (a character stands for a byte) and pieces (plain text with a mark
for the space, and tokens such as <0x0A> for single bytes). Knows no ids and no stream.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

from xjax.errors import LoadError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_by_character() -> dict[str, int]:
    """Map the characters of byte-level vocabularies to bytes: printable ones are themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_by_character()


@dataclass(frozen=True)
class Decoding:
    """How token strings spell bytes.

    replaced       what to write for which part of a token
    byte_fallback  tokens of the form <0x0A> are single bytes
    strip_left     spaces to drop at the start of a whole text
    first_mark     a mark to drop wherever the first token of a text has it, or ""
    """

    byte_level: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_left: int = 0
    first_mark: str = ""

    def token_bytes(self, token: str, *, is_added: bool = False) -> bytes:
        """Spell out one token."""
        if self.byte_level:
            if not is_added and all(character in _BYTES for character in token):
                return bytes(_BYTES[character] for character in token)
            return token.encode("utf-8")
        match = _BYTE.match(token) if self.byte_fallback else None
        if match:
            return bytes([int(match.group(1), 16)])
        for old, new in self.replaced:
            token = token.replace(old, new)
        return token.encode("utf-8")


def read_decoding(inner: tokenizers.Tokenizer) -> Decoding:
    """Read a tokenizer's decoder; LoadError names a part that is not known."""
    decoder = inner.decoder
    if decoder is None:
        raise LoadError("the tokenizer has no decoder; its tokens cannot be turned into text")
    steps: list[dict[str, Any]] = []
    _flatten(json.loads(decoder.__getstate__()), steps)
    fields: dict[str, Any] = {"replaced": ()}
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            fields["byte_level"] = True
        elif kind == "ByteFallback":
            fields["byte_fallback"] = True
        elif kind == "Replace" and "String" in step["pattern"]:
            fields["replaced"] += ((step["pattern"]["String"], step["content"]),)
        elif kind == "Metaspace":
            fields["replaced"] += ((step["replacement"], " "),)
            if step.get("prepend_scheme", "always") != "never":
                fields["first_mark"] = step["replacement"]
        elif kind == "Strip" and step["content"] == " " and not step["stop"]:
            fields["strip_left"] = step["start"]
        elif kind != "Fuse":
            raise LoadError(f"the tokenizer's decoder has a step {kind!r} that is not supported")
    return Decoding(**fields)


def _flatten(state: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    if state.get("type") == "Sequence":
        for step in state["decoders"]:
            _flatten(step, steps)
    else:
        steps.append(state)


class TextBytes:
    """The bytes of one text, token by token; a text that starts anew needs a new one."""

    def __init__(self, decoding: Decoding):
        self._decoding = decoding
        self._to_strip = decoding.strip_left
        self._is_first = True

    @property
    def needs_token(self) -> bool:
        """Whether the next token's spelling matters, not only its bytes."""
        return self._is_first and bool(self._decoding.first_mark)

    def push(self, token: str, data: bytes) -> bytes:
        """Return what a token, spelled `data` by itself, adds here."""
        if self._is_first:
            self._is_first = False
            if self._decoding.first_mark:
                return self._decoding.token_bytes(token.replace(self._decoding.first_mark, ""))
        if self._to_strip and data:
            spaces = len(data) - len(data.lstrip(b" "))
            cut = min(spaces, self._to_strip)
            self._to_strip = self._to_strip - cut if cut == len(data) else 0
            return data[cut:]
        return data
