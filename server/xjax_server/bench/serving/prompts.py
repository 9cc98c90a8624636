"""What is sent: prompts of an exact length that no cache has seen, with a common beginning if wanted.

Token ids need no tokenizer and are exact anywhere. Text is made of words that are one token each in
the usual vocabularies; how many of them fill a prompt, with a chat template around it, is found by
asking the server, whose own count decides. Everything follows from a seed, a nonce and the number of
the repetition: equal ones give equal prompts, and a new nonce gives prompts that nothing has seen.
"""

import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from xjax.errors import RequestError

FIRST_ID = 300  # below are special tokens and single bytes in many vocabularies
WORDS = (
    "time people way water day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home room mother area money story fact month lot right study book eye job word business issue side "
    "kind head house service friend father power hour game line end member law car city community name"
).split()
_ROUNDS = 6
Count = Callable[[Mapping[str, Any]], Awaitable[int]]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Lengths in tokens: of the prompt, of the answer, and of what all prompts begin with."""

    input_len: int = 128
    output_len: int = 64
    shared_prefix: int = 0

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 1:
            raise RequestError("input_len and output_len must be at least 1", param="input_len")
        if not 0 <= self.shared_prefix < self.input_len:
            raise RequestError(
                f"shared_prefix is part of the prompt: from 0 to input_len - 1 = {self.input_len - 1}, "
                f"got {self.shared_prefix}",
                param="shared_prefix",
            )


class Prompts(Protocol):
    """A source of requests."""

    def fields(self, nonce: str, index: int) -> dict[str, Any]:
        """Fields of request number `index`, max_tokens among them."""
        ...

    async def fit(self, count: Count) -> None:
        """Find the lengths that need a server's word; `count` gives its number of prompt tokens."""
        ...


class IdPrompts:
    """Random token ids below `vocab_size`."""

    def __init__(self, shape: Shape, *, seed: int, vocab_size: int) -> None:
        self.shape, self.vocab_size, self._seed = shape, vocab_size, seed
        self._range = min(FIRST_ID, vocab_size // 2), vocab_size

    def ids(self, nonce: str, index: int) -> list[int]:
        """Token ids of one prompt."""
        shared = random.Random(f"{self._seed} {nonce}")
        own = random.Random(f"{self._seed} {nonce} {index}")
        num_own = self.shape.input_len - self.shape.shared_prefix
        return [shared.randrange(*self._range) for _ in range(self.shape.shared_prefix)] + [
            own.randrange(*self._range) for _ in range(num_own)
        ]

    def fields(self, nonce: str, index: int) -> dict[str, Any]:
        """Fields of /v1/completions."""
        return {"prompt": self.ids(nonce, index), "max_tokens": self.shape.output_len}

    async def fit(self, count: Count) -> None:
        """Nothing to find."""


class TextPrompts:
    """Random words, as a chat message or as a plain prompt."""

    def __init__(self, shape: Shape, *, seed: int, is_chat: bool) -> None:
        self.shape, self._seed, self._is_chat = shape, seed, is_chat
        self.num_words = shape.input_len

    def _text(self, nonce: str, index: int) -> str:
        # What surrounds the words is counted as part of the shared beginning, as caches see it.
        num_shared = max(0, self.num_words - (self.shape.input_len - self.shape.shared_prefix))
        num_shared = num_shared if self.shape.shared_prefix else 0
        shared = random.Random(f"{self._seed} {nonce}")
        own = random.Random(f"{self._seed} {nonce} {index}")
        words = shared.choices(WORDS, k=num_shared) + own.choices(WORDS, k=self.num_words - num_shared)
        return " ".join(words)

    def fields(self, nonce: str, index: int) -> dict[str, Any]:
        """Fields of either endpoint."""
        text = self._text(nonce, index)
        what = {"messages": [{"role": "user", "content": text}]} if self._is_chat else {"prompt": text}
        return {**what, "max_tokens": self.shape.output_len}

    async def fit(self, count: Count) -> None:
        """Choose the number of words; raises RequestError where none gives the length."""
        for number in range(_ROUNDS):
            found = await count(self.fields(f"fit {number}", 0))
            if found == self.shape.input_len:
                return
            wanted = self.num_words + self.shape.input_len - found
            if wanted < 1:
                raise RequestError(
                    f"prompts of {self.shape.input_len} tokens are too short (--input-len): "
                    f"what the server puts around a message takes about {found - self.num_words}",
                    param="input_len",
                )
            self.num_words = wanted


class FilePrompts:
    """Requests of a JSONL file, again from its first line when they run out.

    A line has "prompt" or "messages", and "max_tokens" where the answer is not to have the usual length.
    """

    def __init__(self, path: Path, shape: Shape, *, is_chat: bool) -> None:
        self._output_len, self._is_chat = shape.output_len, is_chat
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{path} cannot be read: {error}") from error
        self._items = [_item(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
        if not self._items:
            raise RequestError(f"{path} has no requests; expected one JSON object a line")

    def fields(self, nonce: str, index: int) -> dict[str, Any]:
        """Fields of either endpoint; the nonce comes first, or a second repetition would be warm."""
        item, mark = self._items[index % len(self._items)], f"[{nonce} {index}] "
        messages = item.get("messages") or [{"role": "user", "content": item["prompt"]}]
        first, *others = messages
        found: dict[str, Any] = {"max_tokens": item.get("max_tokens", self._output_len)}
        if self._is_chat:
            return {"messages": [{**first, "content": mark + str(first["content"])}, *others], **found}
        return {"prompt": mark + "\n".join(str(message["content"]) for message in messages), **found}

    async def fit(self, count: Count) -> None:
        """Nothing to find: lengths are those of the file."""


def _item(line: str, place: str) -> dict[str, Any]:
    try:
        item: Any = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{place}: not JSON: {error}") from error
    if not isinstance(item, dict):
        raise RequestError(f"{place}: expected a JSON object")
    found = cast("dict[str, Any]", item)
    messages = cast("list[Any]", found.get("messages") or [])
    is_whole = all(isinstance(message, dict) and "content" in message for message in messages)
    if not is_whole or not (messages or isinstance(found.get("prompt"), str)):
        raise RequestError(f'{place}: expected "prompt" with text, or "messages" that have "content"')
    return found
