"""What both APIs' answers are made of: heads, usage, and deltas put together.

A reply that is not streamed is the stream's deltas, merged: `merge` gives one delta a sample, written by
the same code. JSON is put together by hand from parts that are made once a request; a token costs a quoted
string and a join. It knows neither chats nor completions.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import chain
from json.encoder import encode_basestring
from typing import Protocol

import xjax
from xjax.text.answer import Delta
from xjax_server.generation import Item, Prompt
from xjax_server.openai.types import StreamOptions
from xjax_server.serving import ServedModel

# JSON allows them raw, and clients that read events by lines take them for the ends of lines.
_BREAK = re.compile("[\x85\u2028\u2029]")


def quote(text: str) -> str:
    """A JSON string that no reader takes for several lines."""
    quoted = encode_basestring(text)
    return quoted if quoted.isascii() else _BREAK.sub(lambda mark: f"\\u{ord(mark[0]):04x}", quoted)


@dataclass(frozen=True, kw_only=True)
class Head:
    """What begins every reply and every event of one request.

    name      the model's name as it was asked for
    created   Unix time in seconds
    """

    id: str
    created: int
    name: str
    model: ServedModel

    def json(self, kind: str) -> str:
        """The fields, without the closing brace."""
        return (
            f'{{"id":{quote(self.id)},"object":"{kind}","created":{self.created},"model":{quote(self.name)},'
            f'"system_fingerprint":"{_fingerprint(self.model.names[0], self.model.max_model_len)}"'
        )


@cache
def _fingerprint(name: str, max_model_len: int) -> str:
    """Changes with what may change answers to equal seeds: version and model."""
    return "fp_" + sha256(f"{xjax.__version__} {name} {max_model_len}".encode()).hexdigest()[:10]


@dataclass(frozen=True, kw_only=True)
class StreamShape:
    """Which extras the events of a stream have."""

    has_usage: bool = False
    has_running_usage: bool = False

    @classmethod
    def of(cls, options: StreamOptions | None) -> "StreamShape":
        """What a request's `stream_options` ask for."""
        if options is None or not options.include_usage:
            return cls()
        return cls(has_usage=True, has_running_usage=bool(options.continuous_usage_stats))


class Writer(Protocol):
    """Makes a request's answer in one form or the other; `first`, `of` and `last` are those of sse.Frames."""

    def first(self) -> bytes: ...

    def of(self, items: Sequence[Item]) -> bytes: ...

    def last(self) -> bytes: ...

    def whole(self, items: Sequence[Item]) -> bytes:
        """The reply that is not streamed."""
        ...


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request after its text work: what to run and who writes the answer."""

    prompts: tuple[Prompt, ...]
    priority: int
    is_stream: bool
    writer: Writer

    @property
    def is_scored(self) -> bool:
        """Whether there are log-probabilities, of which a long answer has very many."""
        sampling = self.prompts[0].sampling
        return sampling.logprobs is not None or sampling.prompt_logprobs is not None


class Tally:
    """Counts the tokens of one request; a prompt counts once, however many answers it gets."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._num_prompt = sum(map(len, prompts))
        self._num_completion = 0
        self._cached = [0] * len(prompts)

    def count(self, items: Iterable[Item]) -> None:
        """Take deltas in."""
        for i, delta in items:
            self._num_completion += len(delta.token_ids)
            if delta.num_cached_tokens and delta.sample_id == 0:  # others find what it has computed
                self._cached[i] = delta.num_cached_tokens

    def json(self) -> str:
        """The `usage` object so far."""
        prompt, completion = self._num_prompt, self._num_completion
        details = f'{{"cached_tokens":{sum(self._cached)}}}'
        return (
            f'{{"prompt_tokens":{prompt},"completion_tokens":{completion},'
            f'"total_tokens":{prompt + completion},"prompt_tokens_details":{details}}}'
        )


def event(data: str) -> str:
    """One server-sent event."""
    return f"data: {data}\n\n"


def merge(items: Sequence[Item]) -> list[Item]:
    """Put what came for the same sample together, in the order in which samples appear."""
    if len(items) == 1:
        return list(items)
    by_sample: dict[tuple[int, int], list[Delta]] = {}
    for i, delta in items:
        by_sample.setdefault((i, delta.sample_id), []).append(delta)
    return [(i, _joined(deltas)) for (i, _), deltas in by_sample.items()]


def _joined(deltas: list[Delta]) -> Delta:
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
    )


def ids_json(token_ids: Iterable[int]) -> str:
    """A list of token ids."""
    return "[" + ",".join(map(str, token_ids)) + "]"


def reason_json(reason: str | int | None) -> str:
    """A `stop_reason`: a stop text, a token id or null."""
    return "null" if reason is None else quote(reason) if isinstance(reason, str) else str(reason)
