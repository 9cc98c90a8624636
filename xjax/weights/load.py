"""From an open checkpoint to parameters on the device, one array at a time.

    1. names     which tensors make each array of the family's tree
    2. read      a thread reads and dequantizes the next array while this one is placed
    3. fuse      q, k, v by kv head; gate over up; on the host
    4. place     into its sharding; without a copy where the platform allows it

Two arrays at most are in host memory at once. What a tensor's bytes mean is known to
xjax.checkpoints, what an array is for to xjax.models.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xjax.checkpoints.checkpoint import Checkpoint, TensorView
from xjax.errors import LoadError
from xjax.models.layers import Params
from xjax.models.registry import Family
from xjax.state.mesh import ParamSpec
from xjax.weights.names import Names, names_for, text_name, unexplained

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
    reader = _Reader(checkpoint, family, config)
    plans = [reader.plan(path, spec) for path, spec in found]
    reader.check_all_used(tied=specs.head is None)
    targets = tree.flatten_up_to(sharding) if isinstance(sharding, Params) else [sharding] * len(plans)
    sizes = [sum(view.num_bytes for view in plan.views) for plan in plans]
    done, leaves = 0, []
    for values, target, size in zip(_read_ahead(plans, jnp.dtype(dtype)), targets, sizes, strict=True):
        leaves.append(jax.device_put(values, target))
        done += size
        if progress is not None:
            progress(done, sum(sizes))
    return jax.tree.unflatten(tree, leaves)


@dataclass(frozen=True)
class _Plan:
    """How one array is made: its spec, the tensors, and how they are put together."""

    spec: ParamSpec
    views: tuple[TensorView, ...]
    fuse: Callable[[np.ndarray, list[np.ndarray]], None]

    def build(self, dtype: jnp.dtype) -> np.ndarray:
        """Read and fuse, [*spec.shape] of the spec's dtype or of `dtype`."""
        out = _aligned(self.spec.shape, jnp.dtype(self.spec.dtype or dtype))
        self.fuse(out, [view.read() for view in self.views])
        return out


class _Reader:
    """Finds the tensors of one checkpoint for one family and checks their shapes."""

    def __init__(self, checkpoint: Checkpoint, family: Family, config: Any) -> None:
        self.checkpoint, self.family, self.config = checkpoint, family, config
        self.is_gguf = checkpoint.kind == "gguf"
        changes = family.NAMING.gguf if self.is_gguf else family.NAMING.hf
        self.names: Names = names_for(checkpoint.kind, changes)
        self.views = {
            short: view for name, view in checkpoint.tensors.items() if (short := text_name(name)) is not None
        }
        self.used: set[str] = set()

    def plan(self, path: tuple[Any, ...], spec: ParamSpec) -> _Plan:
        """Plan the array at a path of the tree."""
        layer_id = path[1].idx if path[0].name == "layers" else None
        field = ".".join(part.name for part in (path if layer_id is None else path[2:]))
        names = self.names.of(field, layer_id)
        views = tuple(self._find(name) for name in names)
        shapes, fuse = self._recipe(field, spec, len(names))
        for view, shape in zip(views, shapes, strict=True):
            if view.shape != shape:
                expected = f"must have shape {shape}, found {view.shape}"
                raise LoadError(f"{view.file}: tensor {view.name} {expected}")
        return _Plan(spec, views, fuse)

    def _find(self, name: str) -> TensorView:
        if name not in self.views:
            raise LoadError(f"{self.checkpoint.path}: tensor {name} is missing")
        self.used.add(name)
        return self.views[name]

    def _recipe(
        self, field: str, spec: ParamSpec, num_tensors: int
    ) -> tuple[list[tuple[int, ...]], Callable[..., None]]:
        """Shapes of the tensors of a field and the function that puts them together."""
        rest, naming = spec.shape[1:], self.family.NAMING
        if field in ("attention.qkv", "attention.qkv_bias"):
            heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
            pairs = self.config.rope.dim if (naming.gguf_pairs if self.is_gguf else naming.hf_pairs) else 0
            shapes = [(count * dim, *rest) for count in (heads, kv_heads, kv_heads)]
            if num_tensors == 1:
                ends = (heads * dim, (heads + kv_heads) * dim)
                return [spec.shape], lambda out, parts: fuse_qkv(
                    out, np.split(parts[0], ends), kv_heads, dim, pairs
                )
            return shapes, lambda out, parts: fuse_qkv(out, parts, kv_heads, dim, pairs)
        if field in ("feed_forward.gate_up", "feed_forward.gate_up_bias") and num_tensors == 2:
            return [(spec.shape[0] // 2, *rest)] * 2, _stack
        offset = 0.0 if self.is_gguf or not field.endswith("norm") else naming.hf_norm_offset
        return [spec.shape], _stack if not offset else lambda out, parts: _shift(out, parts, offset)

    def check_all_used(self, *, tied: bool) -> None:
        """Refuse a checkpoint that holds tensors the model has no place for."""
        head = self.names.fields["head"] if tied else ()
        left = unexplained(self.views, self.used, head)
        if left:
            view = self.views[left[0]]
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise LoadError(
                f"{view.file}: tensor {view.name}{more} has no place in the model its config describes"
            )


def fuse_qkv(out: np.ndarray, parts: list[np.ndarray], num_kv_heads: int, head_dim: int, pairs: int) -> None:
    """Lay q, k and v by kv head: for each its query heads, its key, its value.

    out     [K * (H / K + 2) * D, ...]   written
    parts   q [H * D, ...], k [K * D, ...], v [K * D, ...]
    pairs   rotated dimensions of a head whose rows alternate between both halves in q and k, as for
            rotation of neighbours; 0: none do
    """
    rest = out.shape[1:]
    fused = out.reshape(num_kv_heads, -1, head_dim, *rest)
    group = fused.shape[1] - 2
    q, k, v = (part.reshape(num_kv_heads, -1, head_dim, *rest) for part in parts)
    half = pairs // 2
    for target, source in ((fused[:, :group], q), (fused[:, group:-1], k)):
        target[:, :, :half], target[:, :, half:pairs] = source[:, :, 0:pairs:2], source[:, :, 1:pairs:2]
        target[:, :, pairs:] = source[:, :, pairs:]
    fused[:, -1:] = v


def _stack(out: np.ndarray, parts: list[np.ndarray]) -> None:
    start = 0
    for part in parts:
        out[start : start + len(part)] = part
        start += len(part)


def _shift(out: np.ndarray, parts: list[np.ndarray], offset: float) -> None:
    out[...] = parts[0] + np.float32(offset)


def _aligned(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    count = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(count + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + count].view(dtype).reshape(shape)


def _read_ahead(plans: list[_Plan], dtype: jnp.dtype) -> Iterator[np.ndarray]:
    """Build arrays in order, the next ones already while one is placed."""
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="xjax-load") as pool:
        pending: deque[Future[np.ndarray]] = deque()
        rest = iter(plans)
        try:
            for plan in rest:
                pending.append(pool.submit(plan.build, dtype))
                if len(pending) >= _AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
