"""Devices and how arrays lie on them: logical axes of parameters and pages -> shardings.

A parameter is described once, by a `ParamSpec`: its shape, a logical axis for each dimension and
how it is drawn. Abstract tree, shardings and random values are three views of such a tree. The
mesh has one axis, over which kv heads, ffn rows and the vocabulary are split; a dimension whose
units do not divide evenly is replicated. No model is known here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
    return jax.make_mesh((len(found),), (TENSOR_AXIS,), devices=found)


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
