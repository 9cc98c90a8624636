"""Output tokens to text that is safe to show, one stream a sample.

    ids ─ bytes of each token ─ whole characters ─ stop strings ─ text
          (start of text)       (broken ones wait)  (possible beginnings wait)

    1. push(ids)   any number of times; what it returns may be shown at once
    2. stopped     set when a stop string was completed; nothing is returned after that
    3. flush()     at the end of the sample; what still waited

All that is returned, put together, is the decoded answer, cut at the stop string.
Knows no request and no API; posting the stop to the engine is the caller's part.
"""

import codecs
import functools
from collections.abc import Iterable, Sequence

from xjax.text.tokenizer import Tokenizer


class StopMatcher:
    """All stop strings in one automaton: a step a character, however many there are.

    A node stands for the longest beginning of a stop string that the text read so far ends
    with; node 0 for none. depths [nodes]: its length. found [nodes]: the longest stop string
    that ends there, or None.
    """

    def __init__(self, stop: Iterable[str]):
        self._edges: list[dict[str, int]] = [{}]
        self.depths: list[int] = [0]
        self.found: list[str | None] = [None]
        for text in stop:
            self._insert(text)
        self._fallbacks = [0] * len(self._edges)
        queue = list(self._edges[0].values())
        for node in queue:
            for character, child in self._edges[node].items():
                self._fallbacks[child] = self.step(self._fallbacks[node], character)
                queue.append(child)
            if self.found[node] is None:
                self.found[node] = self.found[self._fallbacks[node]]

    def _insert(self, text: str) -> None:
        node = 0
        for character in text:
            child = self._edges[node].get(character)
            if child is None:
                child = len(self._edges)
                self._edges[node][character] = child
                self._edges.append({})
                self.depths.append(self.depths[node] + 1)
                self.found.append(None)
            node = child
        if node:
            self.found[node] = text

    def step(self, node: int, character: str) -> int:
        """Return the node after one more character."""
        while True:
            child = self._edges[node].get(character)
            if child is not None:
                return child
            if not node:
                return 0
            node = self._fallbacks[node]


# Samples of one request, and requests of one client, share their stop strings.
_matcher = functools.lru_cache(maxsize=16)(StopMatcher)


class OutputStream:
    """The text of one sample as it grows.

    min_tokens         a stop string that one of the first so many tokens completes is text like any other
    stopped            the stop string that ended the text, or None
    stop_token_count   output tokens up to and including the one that completed it
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ):
        self._bytes = tokenizer.byte_stream(skip_special_tokens=skip_special_tokens)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = _matcher(tuple(stop)) if stop else None
        self._node = 0
        self._held = ""
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.stopped: str | None = None
        self.stop_token_count = 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that can be shown now."""
        shown: list[str] = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self._num_tokens += 1
            text = self._characters.decode(self._bytes.push(token_id))
            if text:
                shown.append(self._release(text))
        return "".join(shown)

    def flush(self) -> str:
        """Return what still waits; the sample has ended."""
        if self.stopped is not None:
            return ""
        shown = self._release(self._characters.decode(b"", final=True))
        if self.stopped is None:
            shown += self._held
        self._held = ""
        return shown

    def _release(self, text: str) -> str:
        """Pass text through the stop strings, keeping back what may be the beginning of one."""
        if self._matcher is None:
            return text
        matcher, node = self._matcher, self._node
        for position, character in enumerate(text):
            node = matcher.step(node, character)
            found = matcher.found[node]
            if found is not None and self._num_tokens > self._min_tokens:
                self.stopped = found
                self.stop_token_count = self._num_tokens
                whole = self._held + text[: position + 1]
                self._held = ""
                return whole if self._include_stop else whole[: -len(found)]
        self._node = node
        whole = self._held + text
        cut = len(whole) - matcher.depths[node]
        self._held = whole[cut:]
        return whole[:cut]
