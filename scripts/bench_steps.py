"""The step alone as a subject of scripts/bench: compiled programs called back to back, no engine around.

    scripts/bench_steps.py MODEL THREADS ROWS TOKENS KERNELS     a subject of bench.offline.worker

What the engine takes longer than this is the host's share. Prompts are only counted: the time of a
step does not depend on its token ids.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.config import EngineOptions, cache_home
from xjax.engine.build import Model, load_model, plan_engine, set_threads, with_defaults
from xjax.engine.pack import shapes_of
from xjax.engine.step import StepSpec
from xjax.engine.warmup import ProgramCache, ProgramTable, prepare_kernels
from xjax.errors import EngineError
from xjax.state.batch import BatchShape, Packed
from xjax.state.kv import allocate
from xjax_server.bench.offline.worker import serve


class StepAlone:
    """Programs over a state of their own."""

    def __init__(
        self, model: str | Model, *, threads: int, rows: int, tokens: int, kernels: str = "xla"
    ) -> None:
        set_threads(threads)
        device = jax.devices()[0]
        pages = rows * -(-tokens // 16) + 1
        options = EngineOptions(
            max_num_seqs=rows, max_model_len=tokens, num_pages=pages, page_size=16, dtype="float32",
            kernels=kernels,
        )  # fmt: skip
        options = with_defaults(options, device)
        prepare_kernels(options.kernels)
        if isinstance(model, str):
            model = load_model(open_checkpoint(Path(model)), dtype="float32", kernels=options.kernels)
        self._model = model
        plan = plan_engine(self._model, options, device=device)
        self._config = plan.scheduler
        self._state = allocate(plan.state, jax.sharding.SingleDeviceSharding(device))
        spec = StepSpec(self._model.family, self._model.config, options.kernels)
        cache = ProgramCache(cache_home() / "compiled")
        self._table = ProgramTable(spec, self._model.params, self._state, cache=cache)
        self._shapes = [shape for shape in shapes_of(self._config) if not shape.full]

    def describe(self) -> dict[str, Any]:
        """Nothing that the engine does not say."""
        return {"options": {}}

    def check(self, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
        """Refuse: there is no loop here that could continue a prompt."""
        raise EngineError("the step alone answers no prompts")

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """`seconds` [1] of the calls that take a prompt, as many as its chunks are."""
        most, seconds = max(shape.num_prefill for shape in self._shapes), 0.0
        for start in range(0, len(prompt), most):
            positions = np.arange(start, min(start + most, len(prompt)))
            shape = next(shape for shape in self._shapes if shape.num_prefill >= len(positions))
            packed = self._packed(shape, shape.num_decode, len(positions), row=0)
            self._fill(packed, 0, positions, at=shape.num_decode)
            seconds += self._call(shape, packed)
        return {"seconds": [seconds]}

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
        """`seconds` of calls in which every row takes one token behind its prompt."""
        rows = len(prompts)
        fits = [shape for shape in self._shapes if not shape.num_prefill and shape.num_rows >= rows]
        seconds = []
        for token in range(num_tokens):
            packed = Packed(fits[0])
            for row, prompt in enumerate(prompts):
                self._fill(packed, row, np.array([len(prompt) + token]), at=row)
            packed.sample_token[:rows] = np.arange(rows)
            seconds.append(self._call(fits[0], packed))
        return {"seconds": seconds}

    def _packed(self, shape: BatchShape, first: int, length: int, *, row: int) -> Packed:
        packed = Packed(shape)
        packed.sample_token[row] = first + length - 1
        return packed

    def _fill(self, packed: Packed, row: int, positions: np.ndarray, *, at: int) -> None:
        """Put tokens of one row at these positions into the step."""
        shape, size, stop = packed.shape, self._config.page_size, at + len(positions)
        table = 1 + row * shape.max_pages + np.arange(shape.max_pages)
        packed.table[:, row] = table
        packed.slot[row] = packed.sample_slot[row] = row
        packed.token_id[at:stop] = 7
        packed.position[at:stop] = positions
        packed.row_of[at:stop] = row
        packed.write[:, at:stop] = table[positions // size] * size + positions % size
        packed.query_start[row], packed.query_length[row] = at, len(positions)
        packed.kv_length[row] = positions[-1] + 1

    def _call(self, shape: BatchShape, packed: Packed) -> float:
        program = self._table.get(shape)
        began = time.perf_counter()
        self._state, output = program.call(self._model.params, self._state, packed.vector)
        jax.block_until_ready((output, self._state))
        return time.perf_counter() - began

    def close(self) -> None:
        """Stop the compiling threads."""
        self._table.close()


if __name__ == "__main__":
    path, *numbers, kernels = sys.argv[1:]
    threads, rows, tokens = map(int, numbers)
    serve(StepAlone(path, threads=threads, rows=rows, tokens=tokens, kernels=kernels))
