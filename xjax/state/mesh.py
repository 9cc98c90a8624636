"""Devices and how arrays lie on them: logical axes of parameters and pages -> shardings.

A parameter is described once, by a `ParamSpec`: its shape, a logical axis for each dimension and
how it is drawn. Abstract tree, shardings and random values are three views of such a tree. The
mesh has one axis, over which kv heads, ffn rows and the vocabulary are split; a dimension whose
units do not divide evenly is replicated. Between parts that are split, activations are whole on
every device. No model is known here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TENSOR_AXIS = "tensor"
SPLIT_AXES = frozenset({"kv_heads", "ffn", "vocab"})


@dataclass(frozen=True)
class ParamSpec:
    """One parameter before it exists.

    shape   of the array
    axes    a logical axis for each dimension: "vocab", "embed", "kv_heads", "ffn" or None
    units   how many indivisible pieces the split dimension has; 0: its length
    draw    "normal" (scaled by the inputs), "embedding", "ones" or "zeros"
    dtype   None for the model's
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    units: int = 0
    draw: str = "normal"
    dtype: str | None = None


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """Lay devices (default: all) in a line, the axis that tensors are split over."""
    found = list(devices) if devices is not None else jax.devices()
    return jax.make_mesh((len(found),), (TENSOR_AXIS,), (AxisType.Auto,), devices=found)


def partition(spec: ParamSpec, mesh: Mesh) -> PartitionSpec:
    """Say which dimension of a parameter, if any, is split over a mesh."""
    size = mesh.shape[TENSOR_AXIS]
    for i, axis in enumerate(spec.axes):
        if axis in SPLIT_AXES and (spec.units or spec.shape[i]) % size == 0:
            return PartitionSpec(*(TENSOR_AXIS if j == i else None for j in range(len(spec.axes))))
    return PartitionSpec()


def abstract_params(specs: Any, dtype: jnp.dtype) -> Any:
    """Describe a tree of ParamSpecs with ShapeDtypeStructs."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or dtype)), specs)


def param_shardings(specs: Any, mesh: Mesh) -> Any:
    """Give each ParamSpec of a tree its NamedSharding."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, partition(spec, mesh)), specs)


def init_params(key: jax.Array, specs: Any, dtype: jnp.dtype) -> Any:
    """Draw random values for a tree of ParamSpecs, each array from a key of its own.

    key   []   a jax.random key
    """
    leaves, tree = jax.tree.flatten(specs)

    def draw(spec: ParamSpec, key: jax.Array) -> jax.Array:
        kind = jnp.dtype(spec.dtype or dtype)
        if spec.draw == "ones":
            return jnp.ones(spec.shape, kind)
        if spec.draw == "zeros":
            return jnp.zeros(spec.shape, kind)
        scale = 1.0 if spec.draw == "embedding" else 1.0 / math.sqrt(spec.shape[-1])
        return (scale * jax.random.normal(key, spec.shape, jnp.float32)).astype(kind)

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, [draw(spec, keys[i]) for i, spec in enumerate(leaves)])


def page_sharding(mesh: Mesh, num_kv_heads: int) -> NamedSharding:
    """Sharding of pages [P, K, S, D]: kv heads are split where they divide evenly, else replicated."""
    split = TENSOR_AXIS if num_kv_heads % mesh.shape[TENSOR_AXIS] == 0 else None
    return NamedSharding(mesh, PartitionSpec(None, split))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of what every device of a mesh holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def whole(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Let every device hold all of an array: sums that are spread over the mesh are added up here.

    x        [...]   any dtype
    returns  [...]   the same; without a mesh as it was
    """
    return x if mesh is None else jax.lax.with_sharding_constraint(x, replicated(mesh))


def joined(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Let every device hold all of an array whose last dimension is computed in parts, and put together here.

    x        [N, V]   any dtype
    returns  [N, V]   the same; without a mesh as it was

    Said in two steps: of the result alone the compiler may conclude to put the weights together instead.
    """
    if mesh is None:
        return x
    if x.shape[-1] % mesh.size == 0:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(None, TENSOR_AXIS)))
    return whole(x, mesh)


def on_shards(
    function: Callable[..., Any], mesh: Mesh | None, split: tuple[int | None, ...], *, result: int | None = 1
) -> Callable[..., Any]:
    """Let each device of a mesh run a function on the parts that it holds, as on arrays of its own.

    split    for each argument the dimension that is split, evenly; None: every device sees it whole
    result   the dimension in which results are parts; None: they are summed up

    So a kernel, a black box to the compiler, is split as well. Without a mesh it is the function itself.
    """
    if mesh is None:
        return function

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, TENSOR_AXIS)

    def run(*arrays: Any) -> Any:
        out = function(*arrays)
        return out if result is not None else jax.lax.psum(out, TENSOR_AXIS)

    return jax.shard_map(
        run, mesh=mesh, in_specs=tuple(map(spec, split)), out_specs=spec(result), check_vma=False
    )


def shard_bytes(tree: Any) -> int:
    """Bytes that a tree of arrays, or of ShapeDtypeStructs with shardings, takes on each device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
