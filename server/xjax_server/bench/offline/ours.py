"""xjax as a subject of the benchmark: requests through the engine, times from its events.

What is timed is what a client of the engine sees, host work included. Knows no peer.
"""

import dataclasses
import itertools
import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import xjax
from xjax.config import PagedLayer, cache_home
from xjax.errors import EngineError
from xjax.request import FinishReason, Request, SamplingParams, TokenEvent
from xjax_server.bench.offline.cases import DECODE_ROOM, PAGE


class OurEngine:
    """An LLM with just the pages that the cases need.

    threads   processor threads
    rows      sequences at once
    tokens    longest sequence, prompt and answer
    pages     of 16 tokens; None: as many as all rows need
    options   further ones of the engine
    """

    def __init__(
        self, model: str, *, threads: int, rows: int, tokens: int, pages: int | None = None, **options: Any
    ) -> None:
        self._llm = xjax.LLM(
            model,
            threads=threads,
            max_num_seqs=rows,
            max_model_len=tokens,
            num_pages=pages or rows * -(-tokens // PAGE) + 1,
            page_size=PAGE,
            dtype="float32",
            skip_tokenizer_init=True,
            compile_cache=str(cache_home() / "compiled"),
            **options,
        )
        self._serial = itertools.count()

    def describe(self) -> dict[str, Any]:
        """Sizes of the model in numbers and bytes, and the engine's settings.

        read_weights, read_bytes   what a step reads of the weights
        head_weights               numbers of the head, which scores fewer tokens than a step has
        kv                         [numbers of a token, window] of each kind of layer; kv_width: bytes of one
        """
        model, memory, params = self._llm.model, self._llm.plan.memory, self._llm.model.params
        # An embedding that is also the head is read whole; one beside a head is only looked up.
        counts, lookups = (
            count_weights(params),
            count_weights(params.embed if params.head is not None else ()),
        )
        paged = [layer for layer in model.spec if isinstance(layer, PagedLayer)]
        kv: dict[int | None, int] = {}
        for layer in paged:
            kv[layer.window] = kv.get(layer.window, 0) + 2 * layer.num_kv_heads * layer.head_dim
        kv_bytes = sum(memory.page_bytes) / memory.page_size
        return {
            "weights_bytes": memory.weights,
            "read_weights": counts[0] - lookups[0],
            "read_bytes": counts[1] - lookups[1],
            "head_weights": model.config.vocab_size * model.config.embed_dim,
            "kv": [[numbers, window] for window, numbers in kv.items()],
            "kv_width": kv_bytes / max(1, sum(kv.values())),
            "pages_bytes": memory.pages_total,
            "vocab_size": model.config.vocab_size,
            "options": {name: str(value) for name, value in vars(self._llm.options).items()},
        }

    def _start(self, prompts: Sequence[Sequence[int]], times: "_Times", num_tokens: int) -> None:
        """Run greedy requests to their end, or until `times` has seen enough."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, seed=0)
        requests = [
            Request(request_id=f"bench-{next(self._serial)}", prompt_ids=tuple(prompt), sampling=sampling)
            for prompt in prompts
        ]
        self._llm.engine.prepare(requests)
        times.row_by_id = {request.request_id: row for row, request in enumerate(requests)}
        times.began = time.perf_counter()
        for request in requests:
            self._llm.engine.submit(request, times.add)
        times.is_enough.wait()
        for request in requests:
            self._llm.engine.abort(request.request_id)
        times.wait()

    def check(self, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
        """Greedy `ids` after a prompt."""
        times = _Times(1, num_tokens)
        self._start([prompt], times, num_tokens)
        return {"ids": times.ids[0]}

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """`seconds` [1] from submit to the event with the first token."""
        times = _Times(1, 1)
        self._start([prompt], times, 1)
        return {"seconds": [times.at[0][0] - times.began]}

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
        """`seconds` [1] of a step in which every row decodes, and the `host_seconds` the engine counted."""
        # One token begins the first step, and one step more is left out of the times.
        times = _Times(len(prompts), num_tokens + 2)
        self._start(prompts, times, DECODE_ROOM)
        return {"seconds": times.steps(), "host_seconds": self._llm.stats()["host_seconds_median"]}

    def serve(self, prompts: Sequence[Sequence[int]], num_tokens: int, streams: int) -> dict[str, Any]:
        """Work as a server does under `streams` clients: the next prompt is submitted when one ends.

        `rows` has for each prompt [submitted, first, last, tokens, gaps], `seconds` the whole.
        """
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, seed=0)
        waiting = iter([_Row(next(self._serial), prompt, sampling) for prompt in prompts])
        rows: list[_Row] = []
        ends: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

        def submit(count: int) -> None:
            for row in itertools.islice(waiting, count):
                rows.append(row)
                row.submitted = time.perf_counter()
                self._llm.engine.submit(row.request, lambda event, row=row: row.add(event, ends))

        began = time.perf_counter()
        submit(streams)
        for _ in prompts:
            event = ends.get()
            if event.finish_reason is FinishReason.ERROR:
                raise EngineError(event.error or "the request failed")
            submit(1)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "rows": [row.times() for row in rows]}

    def close(self) -> None:
        """Stop the engine."""
        self._llm.close()


def count_weights(tree: Any) -> tuple[int, int]:
    """Numbers that a tree of parameters stands for, and the bytes that it takes.

    What holds codes has a shape of its own, which counts, and parts, whose bytes count.
    """
    if dataclasses.is_dataclass(cast(object, tree)):
        found = [count_weights(getattr(tree, item.name)) for item in dataclasses.fields(tree)]
        shape = getattr(tree, "shape", None)  # of the layout of codes it is a function
        is_matrix = isinstance(shape, tuple)
        numbers = math.prod(cast("tuple[int, ...]", shape)) if is_matrix else sum(count for count, _ in found)
        return numbers, _bytes(found)
    if isinstance(tree, Mapping | list | tuple):
        parts = cast("Mapping[str, Any] | Sequence[Any]", tree)
        found = [count_weights(part) for part in (parts.values() if isinstance(parts, Mapping) else parts)]
        return sum(count for count, _ in found), _bytes(found)
    return (math.prod(tree.shape), tree.nbytes) if hasattr(tree, "nbytes") else (0, 0)


def _bytes(found: Sequence[tuple[int, int]]) -> int:
    return sum(size for _, size in found)


class _Row:
    """One request and when its tokens came."""

    def __init__(self, serial: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.request = Request(request_id=f"bench-{serial}", prompt_ids=tuple(prompt), sampling=sampling)
        self.submitted = 0.0
        self._at: list[float] = []
        self._count = 0

    def add(self, event: TokenEvent, ends: "queue.SimpleQueue[TokenEvent]") -> None:
        """Note one event; the engine's output thread."""
        if event.token_ids:
            self._at.append(time.perf_counter())
            self._count += len(event.token_ids)
        if event.finish_reason is not None:
            ends.put(event)

    def times(self) -> tuple[float, float, float, int, list[float]]:
        """Submitted, first and last token, tokens, gaps between events."""
        gaps = [b - a for a, b in itertools.pairwise(self._at)]
        return self.submitted, self._at[0], self._at[-1], self._count, gaps


class _Times:
    """When each row got each of its tokens; enough is seen when the last row to begin has `wanted`."""

    def __init__(self, rows: int, wanted: int) -> None:
        self.began = 0.0
        self.at: list[list[float]] = [[] for _ in range(rows)]
        self.ids: list[list[int]] = [[] for _ in range(rows)]
        self.row_by_id: dict[str, int] = {}
        self.is_enough = threading.Event()
        self._wanted = wanted
        self._ends: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def add(self, event: TokenEvent) -> None:
        """Note one event; the engine's output thread."""
        row = self.row_by_id[event.request_id]
        self.at[row] += [time.perf_counter()] * len(event.token_ids)
        self.ids[row] += event.token_ids
        if event.finish_reason is not None:
            is_bad = event.finish_reason is FinishReason.ERROR
            self._ends.put(event.error or "the request failed" if is_bad else None)
        if event.finish_reason is not None or min(map(len, self.at)) >= self._wanted:
            self.is_enough.set()

    def wait(self) -> None:
        """Wait for the end of every row. Raises EngineError when one failed."""
        errors = [self._ends.get() for _ in self.at]
        for error in errors:
            if error is not None:
                raise EngineError(error)

    def steps(self) -> list[float]:
        """Seconds of a step, the mean over those in which all rows decode; nothing where there are none.

        Not the times between single tokens: the engine is a step ahead, so two of them may come at once and
        the next late, and their median is no step's time. The first is left out, since it may have had
        fewer rows.
        """
        last = max(self.at, key=lambda marks: marks[0])
        end = min(marks[-1] for marks in self.at)
        marks = [mark for mark in last if mark <= end][1:]
        return [(marks[-1] - marks[0]) / (len(marks) - 1)] if len(marks) > 1 else []
