"""From an open checkpoint to parameters on the device, one array at a time.

    1. plan      which tensors make each array of the family's tree
    2. read      threads read and dequantize parts of an array to where they belong in it: q, k, v by
                 kv head, gate over up; and go on with the next array while this one is placed
    3. place     into its sharding; without a copy where the platform allows it

Three arrays at most are in host memory at once: two being read and one being placed. What a tensor's
bytes mean is known to xjax.checkpoints, what an array is for to xjax.models.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xjax.checkpoints.checkpoint import Checkpoint
from xjax.models.family import Family
from xjax.models.layers import Params
from xjax.models.layout import whole_config
from xjax.models.registry import load_config
from xjax.state.quantized import QuantizedArray, is_quantized, spread
from xjax.weights.codes import read_codes
from xjax.weights.packed import pack_codes, packed_parts
from xjax.weights.plan import LeafPlan, Planner
from xjax.weights.read import parts_of
from xjax.weights.relay import lay_out, places_before
from xjax.weights.saved.orbax import read_saved_config, restore_params

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_ALIGNMENT = 64  # bytes; what XLA wants of an array that it takes over as it is
_AHEAD = 2  # arrays
_MOST_THREADS = 8  # more than can be had of memory by then


def read_config(checkpoint: Checkpoint) -> tuple[Family, Any]:
    """Find the family of a checkpoint and its Config. Raises LoadError."""
    if checkpoint.saved is not None:
        return read_saved_config(checkpoint.saved, str(checkpoint.path))
    return load_config(checkpoint.kind, checkpoint.architecture, checkpoint.config, checkpoint.tensors)


def load_params(
    checkpoint: Checkpoint,
    family: Family,
    config: Any,
    *,
    dtype: jnp.dtype,
    sharding: Any = None,
    packs: bool = False,
    progress: Progress | None = None,
) -> Params:
    """Read every parameter of a model.

    sharding   None for the default device, one sharding or device, or a tree of them as
               `family.shardings` makes it
    packs      keep blocks of GGUF files, and codes of folders, in packed matrices; for one device

    Raises LoadError naming tensor, file, expected and found shape, when one is missing, of
    another shape or not part of the model.
    """
    specs = family.specs(config)
    if checkpoint.saved is not None:
        kept = family.specs(whole_config(config))  # as one device wants it
        params = restore_params(
            checkpoint.saved,
            checkpoint.path,
            kept,
            dtype=dtype,
            sharding=places_before(kept, specs, sharding),
            progress=progress,
        )
        return _pack(params, jnp.dtype(dtype), sharding) if packs else lay_out(params, config, sharding)
    found, tree = jax.tree_util.tree_flatten_with_path(specs)
    planner = Planner(checkpoint, family, config, packs=packs)
    plans = [planner.plan(path, spec) for path, spec in found]
    planner.check_all_used(tied=specs.head is None)
    targets = tree.flatten_up_to(sharding) if isinstance(sharding, Params) else [sharding] * len(plans)
    total, done, leaves = sum(plan.num_bytes for plan in plans), 0, []
    for values, target, plan in zip(_read_ahead(plans, jnp.dtype(dtype)), targets, plans, strict=True):
        if is_quantized(values) and isinstance(target, jax.sharding.Sharding):
            target = spread(values, target)
        leaves.append(jax.device_put(values, target))
        jax.block_until_ready(leaves[-2:-1])  # what is still under way keeps its copy here
        done += plan.num_bytes
        if progress is not None:
            progress(done, total)
    return jax.tree.unflatten(tree, leaves)


def _pack(params: Params, dtype: jnp.dtype, sharding: Any) -> Params:
    """Pack the codes of a tree, one array after the other; the tree is not to be used any more."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_quantized)
    del params
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, QuantizedArray):
            leaves[i] = jax.device_put(pack_codes(leaf, dtype, _aligned), sharding)
    return jax.tree.unflatten(tree, leaves)


def _aligned(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    count = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(count + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + count].view(dtype).reshape(shape)


def _read_ahead(plans: list[LeafPlan], dtype: jnp.dtype) -> Iterator[Any]:
    """Read arrays of numpy, or of numpy parts, in order, the next ones already while one is placed."""
    num_threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="xjax-load") as pool:
        pending: deque[tuple[Any, list[Future[Any]]]] = deque()

        def finish() -> Any:
            out, parts = pending[0]
            made = [part.result() for part in parts]
            pending.popleft()
            return made[0] if out is None else out

        try:
            for plan in plans:
                out, parts = _begin(plan, dtype)
                pending.append((out, [pool.submit(part) for part in parts]))
                if len(pending) >= _AHEAD:
                    yield finish()
            while pending:
                yield finish()
        finally:
            for _, parts in pending:
                for part in parts:
                    part.cancel()


def _begin(plan: LeafPlan, dtype: jnp.dtype) -> tuple[Any, Iterable[Callable[[], Any]]]:
    """What a plan makes and the functions that fill it; None where the one function returns it."""
    if plan.is_codes:
        return None, [partial(_read_codes, plan, dtype)]
    if plan.is_packed:
        return packed_parts(plan, dtype, _aligned)
    out = _aligned(plan.spec.shape, jnp.dtype(plan.spec.dtype or dtype))
    return out, parts_of(plan, out)


def _read_codes(plan: LeafPlan, dtype: jnp.dtype) -> Any:
    found = read_codes(plan, dtype, _aligned)
    if plan.is_packed and isinstance(found, QuantizedArray):
        return pack_codes(found, dtype, _aligned)
    return found
