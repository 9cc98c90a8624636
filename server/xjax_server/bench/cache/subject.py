"""An engine with one setting of cache and swap, in a child process: first tokens, and work in bulk.

`python -m xjax_server.bench.cache.subject MODEL OPTIONS` starts it; OPTIONS is a JSON object of engine
options. Times are those of the engine's events, host work included.
"""

import hashlib
import itertools
import json
import queue
import sys
import time
from collections.abc import Sequence
from typing import Any

import xjax
from xjax.config import cache_home
from xjax.errors import EngineError
from xjax.request import FinishReason, Request, SamplingParams, TokenEvent
from xjax_server.bench.offline.worker import serve

COUNTS = (
    "steps", "preemptions", "recomputed_tokens", "prefill_tokens", "decode_tokens", "swap_out_sequences",
    "swap_out_pages", "swap_in_sequences", "swap_in_pages", "retained_pages", "prefix_hit_tokens", "stalls",
)  # fmt: skip
_WARM_PROMPT = 64


class CacheEngine:
    """An LLM that is asked with token ids. `options` are the engine's."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        folder = str(cache_home() / "compiled")
        self._llm = xjax.LLM(
            model, skip_tokenizer_init=True, dtype="float32", compile_cache=folder, **options
        )
        self._serial = itertools.count()

    def describe(self) -> dict[str, Any]:
        """Sizes that the cases are made from."""
        memory = self._llm.plan.memory
        return {
            "vocab_size": self._llm.model.config.vocab_size,
            "page_size": memory.page_size,
            "page_bytes": sum(memory.page_bytes),
            "pages": memory.num_pages[0] - 1,
            "host_pages": memory.host_pages[0],
        }

    def first(self, prompt: Sequence[int]) -> dict[str, Any]:
        """`seconds` from submit to the first token, which is also the last, and the tokens `cached`."""
        before = self._llm.stats()["prefix_hit_tokens"]
        done = self.work([prompt], 1)
        return {"seconds": done["seconds"], "cached": self._llm.stats()["prefix_hit_tokens"] - before}

    def work(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
        """Answer prompts that come at once greedily: `seconds`, `counts` of what happened, a `digest`.

        `work_seconds` is processor time, which other work on the machine disturbs less than the clock. The
        digest is of all token ids, so that engines can be seen to answer alike.
        """
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, seed=0)
        requests = [
            Request(request_id=f"bench-{next(self._serial)}", prompt_ids=tuple(prompt), sampling=sampling)
            for prompt in prompts
        ]
        ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
        ends: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

        def add(event: TokenEvent) -> None:
            ids[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                ends.put(event)

        before = self._llm.stats()
        self._llm.engine.prepare(requests)
        began, worked = time.perf_counter(), time.process_time()
        for request in requests:
            self._llm.engine.submit(request, add)
        for _ in requests:
            event = ends.get()
            if event.finish_reason is FinishReason.ERROR:
                raise EngineError(event.error or "the request failed")
        seconds, after = time.perf_counter() - began, self._llm.stats()
        return {
            "seconds": seconds,
            "work_seconds": time.process_time() - worked,
            "counts": {name: after[name] - before[name] for name in COUNTS},
            "digest": hashlib.sha256(repr(list(ids.values())).encode()).hexdigest(),
        }

    def warm(self) -> dict[str, Any]:
        """Compile every program, and touch the memory of some."""
        self._llm.wait_ready()
        self._llm.engine.prepare_moves()
        while self._llm.engine.metrics.compiles is None:  # smaller programs come in the background
            time.sleep(0.1)
        return self.work([[i + 1] * _WARM_PROMPT for i in range(self._llm.options.max_num_seqs)], 4)

    def clear(self) -> dict[str, Any]:
        """Forget every prefix."""
        return {"forgotten": self._llm.engine.clear_cache().result()}

    def close(self) -> None:
        """Stop the engine."""
        self._llm.close()


def answer(subject: CacheEngine, question: dict[str, Any]) -> dict[str, Any]:
    """Call what a question names."""
    do = question.pop("do")
    if do not in ("describe", "first", "work", "warm", "clear"):
        raise EngineError(f"a cache benchmark's worker knows no {do!r}")
    return getattr(subject, do)(**question)


if __name__ == "__main__":
    serve(CacheEngine(sys.argv[1], json.loads(sys.argv[2])), answer)
