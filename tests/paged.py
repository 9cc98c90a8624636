"""Run a model over real paged state, several rows at once, in any schedule of chunks.

What an engine does, without its scheduler: pages are dealt out in random order from a pool that is
filled with NaN, pages wholly behind a window are taken back, and a token's logits are read the way
a step reads them. So a read of anything that was not written shows.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from xjax.config import page_groups
from xjax.models.registry import Family
from xjax.state.batch import BatchShape, Packed, unpack
from xjax.state.kv import EngineState, abstract_state, place_state


def _step(
    params: Any, packed: Any, state: EngineState, *, family: Family, config: Any, shape: BatchShape,
    backend: str, mesh: Mesh | None = None,
) -> tuple[jax.Array, EngineState]:  # fmt: skip
    """Logits of every token of a step, [N, V], and the new state."""
    batch, _ = unpack(packed, shape, backend=backend, mesh=mesh)
    hidden, state = family.forward(params, config, state, batch)
    return family.logits(params, config, hidden, backend=backend, mesh=mesh), state


_jit = functools.partial(
    jax.jit, _step, static_argnames=("family", "config", "shape", "backend", "mesh"), donate_argnums=2
)
run_step = _jit()


@functools.cache
def _run_quickly() -> Any:
    """The same for programs that run once: compiled in a fifth of the time, and slower."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    emitters = {"xla_cpu_use_fusion_emitters": False}  # the slowest part; not every compiler has the option
    try:
        jax.jit(lambda x: x, compiler_options=emitters)(0)
    except jax.errors.JaxRuntimeError:
        emitters = {}
    return _jit(compiler_options=options | emitters)


class PagedRows:
    """Rows of tokens that are computed chunk by chunk.

    num_tiles, tile   the room for prefill in a step, beside one decode token a row
    is_quick          compile quickly and without optimizations, for a program that runs once
    logits            for each row, a list of [V] for each token so far
    """

    def __init__(
        self, family: Family, config: Any, params: Any, *, num_rows: int, num_tiles: int, tile: int = 8,
        page_size: int = 4, max_pages: int = 16, seed: int = 0, dtype: str = "float32",
        can_decode: bool = True, backend: str = "xla", mesh: Mesh | None = None, is_quick: bool = False,
    ) -> None:  # fmt: skip
        self.family, self.config, self.params, self.page_size = family, config, params, page_size
        self.backend, self.mesh, spec = backend, mesh, family.cache_spec(config)
        self._run = _run_quickly() if is_quick else run_step
        self.groups = page_groups(spec)
        self.shape = BatchShape(
            num_rows=num_rows, num_decode=num_rows if can_decode else 0, num_prefill=num_tiles * tile,
            tile=tile, num_groups=len(self.groups), max_pages=max_pages, num_sampled=num_rows,
            trash_row=num_rows,
        )  # fmt: skip
        num_pages = num_rows * max_pages + 1
        abstract = abstract_state(
            spec,
            num_pages=(num_pages,) * len(self.groups),
            page_size=page_size,
            num_rows=num_rows,
            dtype=jnp.dtype(dtype),
        )
        self.state = jax.tree.map(
            lambda leaf: jnp.full(leaf.shape, jnp.nan if leaf.dtype.kind != "i" else 0, leaf.dtype), abstract
        )
        if mesh is not None:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, place_state(abstract, mesh))
            self.state = jax.device_put(self.state, shardings)
        rng = np.random.default_rng(seed)
        deal = [1 + rng.permutation(num_pages - 1).astype(np.int32) for _ in self.groups]
        self.table = np.stack([pages.reshape(num_rows, max_pages) for pages in deal])
        self.logits: list[list[np.ndarray]] = [[] for _ in range(num_rows)]

    def step(self, decode: dict[int, int], prefill: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Compute one token of each row in `decode` and a chunk of each row in `prefill`."""
        shape, packed = self.shape, Packed(self.shape)
        packed.table[:] = self.table
        packed.row_of[: shape.num_decode] = np.arange(shape.num_decode)
        placed = [(row, [token], row) for row, token in decode.items()]
        start = shape.num_decode
        for row, ids in prefill:
            placed.append((row, list(ids), start))
            start += -(-len(ids) // shape.tile) * shape.tile
            assert start <= shape.num_tokens, "the chunks do not fit into the step"
        for row, ids, at in placed:
            self._place(packed, row, ids, at)
        out, self.state = self._run(
            self.params, packed.vector, self.state, family=self.family, config=self.config, shape=shape,
            backend=self.backend, mesh=self.mesh,
        )  # fmt: skip
        out = np.asarray(out)
        for row, ids, at in placed:
            self.logits[row].extend(out[at : at + len(ids)])

    def _place(self, packed: Packed, row: int, ids: list[int], at: int) -> None:
        """Write one chunk of a row into the packed step, from token `at` on."""
        first, size = len(self.logits[row]), self.page_size
        position = first + np.arange(len(ids))
        packed.token_id[at : at + len(ids)] = ids
        packed.position[at : at + len(ids)] = position
        if at >= packed.shape.num_decode:
            tile = packed.shape.tile
            packed.row_of[at : at + -(-len(ids) // tile) * tile] = row
        packed.query_start[row], packed.query_length[row] = at, len(ids)
        packed.kv_length[row] = first + len(ids)
        for g, group in enumerate(self.groups):
            packed.write[g, at : at + len(ids)] = (
                self.table[g, row, position // size] * size + position % size
            )
            if group.window is not None:
                packed.table[g, row, : max(first - group.window + 1, 0) // size] = 0


def run_alone(rows: PagedRows, ids: Sequence[int], chunks: Sequence[int]) -> np.ndarray:
    """Logits [n, V] of one prompt, computed in chunks; a chunk of one is a decode."""
    start = 0
    for count in chunks:
        part = [int(token) for token in ids[start : start + count]]
        if count == 1 and rows.shape.num_decode:
            rows.step({0: part[0]}, [])
        else:
            rows.step({}, [(0, part)])
        start += count
    assert start == len(ids)
    return np.stack(rows.logits[0])
