"""Find the added tokens of a vocabulary, such as <|im_end|>, where they are written in a text.

Vocabularies have thousands of them, so candidates are found by first character and looked up
by length: time is linear in the text. Knows only the tokens it was given.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tokenizers import AddedToken


class Mark(NamedTuple):
    """One occurrence: text[start:end] is the token with the white space it takes along."""

    start: int
    end: int
    token_id: int


class Marks:
    """The longest token at each place, from left to right, without overlaps."""

    def __init__(self, token_by_id: Mapping[int, AddedToken]):
        self._token_by_id = token_by_id
        self._id_by_text = {token.content: i for i, token in token_by_id.items() if token.content}
        lengths: dict[str, set[int]] = {}
        for content in self._id_by_text:
            lengths.setdefault(content[0], set()).add(len(content))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._first = re.compile(f"[{re.escape(''.join(lengths))}]") if lengths else None

    def find(self, text: str) -> Iterator[Mark]:
        """Yield every occurrence in a text."""
        position = 0
        while (mark := self._next(text, position)) is not None:
            yield mark
            position = mark.end

    def occurs_in(self, text: str) -> bool:
        """Whether any token is written in the text."""
        return self._next(text, 0) is not None

    def starts(self, text: str) -> bool:
        """Whether a text begins with a token."""
        return bool(text) and self._at(text, 0) is not None

    def _next(self, text: str, begin: int) -> Mark | None:
        if self._first is None:
            return None
        for candidate in self._first.finditer(text, begin):
            start = candidate.start()
            token_id = self._at(text, start)
            if token_id is not None:
                return self._with_space(text, begin, start, token_id)
        return None

    def _at(self, text: str, start: int) -> int | None:
        for length in self._lengths.get(text[start], ()):
            token_id = self._id_by_text.get(text[start : start + length])
            if token_id is None:
                continue
            if self._token_by_id[token_id].single_word and _is_in_word(text, start, start + length):
                continue
            return token_id
        return None

    def _with_space(self, text: str, begin: int, start: int, token_id: int) -> Mark:
        token = self._token_by_id[token_id]
        end = start + len(token.content)
        while token.lstrip and start > begin and text[start - 1].isspace():
            start -= 1
        while token.rstrip and end < len(text) and text[end].isspace():
            end += 1
        return Mark(start, end, token_id)


def _is_in_word(text: str, start: int, end: int) -> bool:
    around = (text[start - 1] if start else "", text[end] if end < len(text) else "")
    return any(character.isalnum() or character == "_" for character in around)
