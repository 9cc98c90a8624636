"""From an open checkpoint to parameters on the device, one array at a time.

    1. plan      which tensors make each array of the family's tree
    2. read      a thread reads and dequantizes the next array while this one is placed
    3. fuse      q, k, v by kv head; gate over up; on the host
    4. place     into its sharding; without a copy where the platform allows it

Two arrays at most are in host memory at once. What a tensor's bytes mean is known to
xjax.checkpoints, what an array is for to xjax.models.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xjax.checkpoints.checkpoint import Checkpoint
from xjax.models.family import Family
from xjax.models.layers import Params
from xjax.weights.plan import LeafPlan, Planner

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_ALIGNMENT = 64  # bytes; what XLA wants of an array that it takes over as it is
_AHEAD = 2


def load_params(
    checkpoint: Checkpoint,
    family: Family,
    config: Any,
    *,
    dtype: jnp.dtype,
    sharding: Any = None,
    progress: Progress | None = None,
) -> Params:
    """Read every parameter of a model.

    sharding   None for the default device, one sharding or device, or a tree of them as
               `family.shardings` makes it

    Raises LoadError naming tensor, file, expected and found shape, when one is missing, of
    another shape or not part of the model.
    """
    specs = family.specs(config)
    found, tree = jax.tree_util.tree_flatten_with_path(specs)
    planner = Planner(checkpoint, family, config)
    plans = [planner.plan(path, spec) for path, spec in found]
    planner.check_all_used(tied=specs.head is None)
    targets = tree.flatten_up_to(sharding) if isinstance(sharding, Params) else [sharding] * len(plans)
    total, done, leaves = sum(plan.num_bytes for plan in plans), 0, []
    for values, target, plan in zip(_read_ahead(plans, jnp.dtype(dtype)), targets, plans, strict=True):
        leaves.append(jax.device_put(values, target))
        done += plan.num_bytes
        if progress is not None:
            progress(done, total)
    return jax.tree.unflatten(tree, leaves)


def _build(plan: LeafPlan, dtype: jnp.dtype) -> np.ndarray:
    """Read and fuse, [*spec.shape] of the spec's dtype or of `dtype`."""
    out = _aligned(plan.spec.shape, jnp.dtype(plan.spec.dtype or dtype))
    plan.fuse(out, [view.read() for view in plan.views])
    return out


def _aligned(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    count = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(count + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + count].view(dtype).reshape(shape)


def _read_ahead(plans: list[LeafPlan], dtype: jnp.dtype) -> Iterator[np.ndarray]:
    """Build arrays in order, the next ones already while one is placed."""
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="xjax-load") as pool:
        pending: deque[Future[np.ndarray]] = deque()
        rest = iter(plans)
        try:
            for plan in rest:
                pending.append(pool.submit(_build, plan, dtype))
                if len(pending) >= _AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
