"""What the offline benchmark measures: its plan, the cases that follow from it, prompts. Knows no engine."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

DECODE_ROOM = 300  # tokens after a prompt: rows that start early go on until the last one has begun
PAGE = 16


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    rows       of the decode cases            steps     timed in each repetition of one
    context    tokens before a decode         starts    warm starts; 0: none, cold ones neither
    prefill    tokens of the prefill cases    peers     paths by name; empty: none, or found by itself
    kernels    of our engine; each further one is measured beside the first
    """

    rows: tuple[int, ...] = (1, 8, 16)
    prefill: tuple[int, ...] = (512,)
    context: int = 64
    steps: int = 24
    threads: int = 2
    repeats: int = 5
    starts: int = 3
    kernels: tuple[str, ...] = ("auto",)
    peers: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest sequence of any case."""
        return max(1, *(tokens + 1 for tokens in self.prefill), *([self._decode_tokens] if self.rows else []))

    @property
    def num_pages(self) -> int:
        """Pages, of 16 tokens, that the largest case needs, and one that none may use."""
        decode = max(self.rows, default=0) * -(-self._decode_tokens // PAGE)
        return max(decode, -(-self.most_tokens // PAGE)) + 1

    @property
    def _decode_tokens(self) -> int:
        return self.context + DECODE_ROOM


@dataclass(frozen=True)
class Case:
    """One thing to time: `rows` sequences; prefill of `tokens`, or decode where that is None."""

    name: str
    rows: int
    tokens: int | None = None


def cases_of(plan: Plan) -> list[Case]:
    """Prefill at each length, then decode at each number of rows."""
    prefill = [Case(f"prefill {tokens}", 1, tokens) for tokens in plan.prefill]
    return [*prefill, *[Case(f"decode {rows}", rows) for rows in plan.rows]]


def new_prompt(length: int, vocab_size: int, source: random.Random) -> list[int]:
    """Token ids that no cache has seen; the first few ids, often special tokens, are left out."""
    low = min(300, vocab_size // 2)
    return [source.randrange(low, vocab_size) for _ in range(length)]
