"""Host time and memory of the prefix index: no device, no engine.

scripts/bench_index.py [RECORDS]     prints JSON: microseconds for a prompt of 4,096 tokens, least of many
                                     keys      of its 256 pages
                                     match     of all of them
                                     insert    of all of them, as when they are computed
                                     evict     each of them, from its end
                                     the same with RECORDS (a million) in the index, and bytes of each;
                                     a request of 4,096 tokens: `prompt`, its tokens and keys on the
                                     caller's thread, and `submit`, `plan` (with the match) on the engine's;
                                     a step of 64 rows that decode and share nothing, planned and
                                     committed, with the cache and without
"""

import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np

from xjax.cache.host import HostPool
from xjax.cache.index import Parent, PrefixIndex
from xjax.cache.keys import KeyChain, page_tokens
from xjax.cache.pool import PagePool
from xjax.config import SchedulerConfig, StepShapes
from xjax.request import Request, SamplingParams
from xjax.scheduler import Prompt, Scheduler, StepResult

TOKENS, SIZE, REPEATS = 4096, 16, 30
PAGES = TOKENS // SIZE


class Bench:
    """An index of so many pages, filled with conversations of 4,096 tokens."""

    def __init__(self, num_records: int) -> None:
        self.pool = PagePool(num_records + PAGES + 1)
        self.index = PrefixIndex([self.pool], [HostPool(0)], (None,), SIZE)
        self.chain = KeyChain(bytes(32), SIZE)
        self.rng = np.random.default_rng(0)

    def prompt(self) -> tuple[list[bytes], list[bytes]]:
        """Keys and pages of a new prompt."""
        tokens = self.rng.integers(0, 150_000, TOKENS).astype(np.int32)
        keys: list[bytes] = []
        pages = page_tokens(tokens, SIZE)
        self.chain.extend(keys, pages)
        return keys, pages

    def insert(self, keys: list[bytes], tokens: list[bytes], pages: list[int]) -> None:
        """As a sequence publishes what it has computed."""
        parent: Parent = b""
        for key, part, page in zip(keys, tokens, pages, strict=True):
            record = self.index.insert(key, parent, part, [page])
            assert record is not None
            parent = record

    def fill(self, num_records: int) -> float:
        """Seconds of inserting alone."""
        seconds = 0.0
        for _ in range(num_records // PAGES):
            keys, tokens = self.prompt()
            pages = self.pool.allocate(PAGES)
            began = time.perf_counter()
            self.insert(keys, tokens, pages)
            seconds += time.perf_counter() - began
            self.pool.release(reversed(pages))
        return seconds

    def one_prompt(self) -> dict[str, float]:
        """Microseconds of each part, for a prompt that is new and then is not."""
        found: dict[str, list[float]] = {"keys": [], "match": [], "insert": [], "evict": []}
        for _ in range(REPEATS):
            tokens = self.rng.integers(0, 150_000, TOKENS).astype(np.int32)
            keys: list[bytes] = []
            parts = page_tokens(tokens, SIZE)
            found["keys"].append(_timed(lambda keys=keys, parts=parts: self.chain.extend(keys, parts)))
            pages = self.pool.allocate(PAGES)
            found["insert"].append(_timed(lambda k=keys, t=parts, p=pages: self.insert(k, t, p)))
            found["match"].append(_timed(lambda k=keys, t=parts: self.index.match(k, t, PAGES)))
            assert len(self.index.match(keys, parts, PAGES).records) == PAGES
            self.pool.release(reversed(pages))
            found["evict"].append(_timed(lambda: [self.index.evict(0) for _ in range(PAGES)]))
        return {name: round(min(values) * 1e6, 1) for name, values in found.items()}


def steps(count: int = 800) -> dict[str, float]:
    """Median microseconds of the thread for a step of 64 rows, of which four fill a page."""
    rows, rng = 64, np.random.default_rng(0)
    shapes = StepShapes.plan(max_num_seqs=rows, prefill_chunk_size=512, max_model_len=4096)
    schedulers = [
        Scheduler(SchedulerConfig(
            max_num_seqs=rows, max_model_len=4096, page_size=SIZE, num_pages=(rows * PAGES + 1,),
            windows=(None,), shapes=shapes, prefix_cache=is_on,
        )) for is_on in (True, False)
    ]  # fmt: skip
    for row in range(rows):
        prompt = tuple(rng.integers(0, 150_000, 64 + row % SIZE).tolist())
        sampling = SamplingParams(max_tokens=2 * count, ignore_eos=True)
        for scheduler in schedulers:
            scheduler.submit(Request(request_id=str(row), prompt_ids=prompt, sampling=sampling))
    found: list[list[int]] = [[], []]
    for _ in range(count):
        for scheduler, times in zip(schedulers, found, strict=True):
            began = time.thread_time_ns()
            plan = scheduler.plan()
            planned = time.thread_time_ns()
            assert plan is not None
            places = plan.num_rows + len(plan.scored_targets)
            result = StepResult(np.full(places, 7, np.int32), np.zeros(places, np.int32))
            ran = time.thread_time_ns()
            scheduler.commit(plan, result)
            times.append(planned - began + time.thread_time_ns() - ran)
    on, off = (float(np.median(times[count // 8 :])) / 1000 for times in found)
    return {"with": round(on, 1), "without": round(off, 1), "more": round(on - off, 1)}


def arrival() -> dict[str, float]:
    """Least microseconds of what a request costs until its first step is planned."""
    shapes = StepShapes.plan(max_num_seqs=1, prefill_chunk_size=512, max_model_len=2 * TOKENS)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=1, max_model_len=2 * TOKENS, page_size=SIZE, num_pages=(4 * PAGES,), windows=(None,),
            shapes=shapes,
        )
    )  # fmt: skip
    rng, found = np.random.default_rng(0), dict[str, list[float]]()

    def time_part(name: str, work: Callable[[], object]) -> None:
        found.setdefault(name, []).append(_timed(work))

    for number in range(REPEATS):
        tokens = tuple(rng.integers(0, 150_000, TOKENS).tolist())
        request = Request(request_id=str(number), prompt_ids=tokens, sampling=SamplingParams())
        prompt = Prompt.of(request, scheduler.config)
        time_part("prompt", partial(Prompt.of, request, scheduler.config))
        time_part("submit", partial(scheduler.submit, request, prompt))
        time_part("plan", scheduler.plan)
        scheduler.abort(request.request_id)
    return {name: round(min(values) * 1e6, 1) for name, values in found.items()}


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(num_records: int) -> dict[str, object]:
    """All figures."""
    small = Bench(PAGES).one_prompt()
    tracemalloc.start()
    memory = Bench(num_records)
    before = tracemalloc.get_traced_memory()[0]
    memory.fill(num_records // 10)  # tracing is slow; bytes a record hardly change
    num_bytes = (tracemalloc.get_traced_memory()[0] - before) / len(memory.index)
    tracemalloc.stop()
    del memory
    large = Bench(num_records)
    seconds = large.fill(num_records)
    return {
        "of 4,096 tokens, microseconds": small,
        "records": len(large.index),
        "inserted a second": round(len(large.index) / seconds),
        "bytes a record": round(num_bytes),
        "of 4,096 tokens among them, microseconds": large.one_prompt(),
        "of a request of 4,096 tokens, microseconds": arrival(),
        "of a step with 64 rows, microseconds": steps(),
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000), indent=2))
