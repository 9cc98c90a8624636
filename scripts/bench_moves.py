"""Move pages between device and host as swap does, beside plain copies of as many bytes.

    scripts/bench_moves.py [LAYERS KV_HEADS DIM [REPEATS]]   prints JSON, by number of pages: seconds a page,
                                                            median, range and count, of each of

    save          gather, and landing in host memory, from begin to end
    save_copy     as many bytes copied from one array to another of its size, to memory that was used before
    load          reading host memory, and scatter into the state, from begin to end
    load_copy     the same as save_copy, just beside `load`
    save_engine   the part of `save` that the engine's thread does; `load_engine` likewise
    compile       seconds that all programs took to compile, once a start

The default is SmolLM2-135M: 30 layers of 3 heads of 64. Pages lie apart, as after much work.
"""

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xjax.config import PagedLayer
from xjax.engine.transfer import Mover
from xjax.scheduler import Transfer
from xjax.state.kv import EngineState, abstract_state, allocate
from xjax_server.bench.samples import summarize

PAGES, SLOTS, PAGE_SIZE = 256, 255, 16
COUNTS = (1, 32, 100)


class Moves:
    """A mover over a state of its own; `land` waits for what it saves."""

    def __init__(self, layers: int, kv_heads: int, dim: int) -> None:
        spec = (PagedLayer(kv_heads, dim),) * layers
        abstract = abstract_state(
            spec, num_pages=(PAGES,), page_size=PAGE_SIZE, num_rows=1, dtype=np.dtype("float32")
        )
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self.state: EngineState = jax.tree.map(lambda leaf: allocate(leaf, sharding), abstract)
        self._landed = threading.Event()
        self.mover = Mover(spec, self.state, (SLOTS,), lambda *_: self._landed.set())
        self.page_bytes = self.mover.hosts[0].page_bytes

    def save(self, transfer: Transfer) -> tuple[float, float]:
        """Seconds of all of it, and of the caller's part."""
        self._landed.clear()
        began = time.perf_counter()
        self.mover.save(self.state, transfer)
        own = time.perf_counter() - began
        self._landed.wait()
        return time.perf_counter() - began, own

    def load(self, transfer: Transfer) -> tuple[float, float]:
        """Seconds of all of it, and of the caller's part."""
        began = time.perf_counter()
        self.state = self.mover.load(self.state, transfer)
        own = time.perf_counter() - began
        jax.block_until_ready(self.state)
        return time.perf_counter() - began, own


def timed(work: Callable[[], Any]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(layers: int, kv_heads: int, dim: int, repeats: int) -> dict[str, Any]:
    """Time everything in turn."""
    moves = Moves(layers, kv_heads, dim)
    found: dict[str, Any] = {
        "page_bytes": moves.page_bytes, "compile": timed(moves.mover.prepare), "pages": {}
    }  # fmt: skip
    every = np.arange(1, PAGES, dtype=np.int32)
    moves.save(Transfer(0, (every,), (every,)))  # memory that was never touched is another matter
    source = np.random.default_rng(0)
    for count in COUNTS:
        here, there = (np.ones(count * moves.page_bytes, np.uint8) for _ in range(2))
        samples: dict[str, list[float]] = {}

        def note(name: str, seconds: float, *, samples: Any = samples, count: int = count) -> None:
            samples.setdefault(name, []).append(seconds / count)

        for number in range(repeats + 2):
            pages, slots = (source.permutation(every)[:count] for _ in range(2))
            transfer = Transfer(number, (pages,), (slots,))
            for name, work in (("save", moves.save), ("load", moves.load)):
                seconds, own = work(transfer)
                copied = timed(lambda there=there, here=here: np.copyto(there, here))
                if number >= 2:
                    note(name, seconds)
                    note(f"{name}_engine", own)
                    note(f"{name}_copy", copied)
        found["pages"][str(count)] = {name: summarize(values) for name, values in samples.items()} | {
            f"{name}_ratio": statistics.median(samples[name]) / statistics.median(samples[f"{name}_copy"])
            for name in ("save", "load")
        }
    moves.mover.close()
    return found


if __name__ == "__main__":
    given = [int(part) for part in sys.argv[1:]]
    layers, kv_heads, dim = given[:3] or (30, 3, 64)
    print(json.dumps(measure(layers, kv_heads, dim, given[3] if len(given) > 3 else 15)))
