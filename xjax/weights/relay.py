"""Parameters laid out for one device, as converted models hold them, in the order that several share them in.

Which row goes where is asked of the functions that fuse tensors, given numbers of rows instead of rows. An
array is moved on the devices, one after another. What layouts are good for is known to xjax.models.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from xjax.models.layers import Params
from xjax.models.layout import Layout
from xjax.state.mesh import replicated
from xjax.state.quantized import QuantizedArray, is_quantized, spread
from xjax.weights.fuse import fuse_qkv, interleave, repeat_heads

_GATED = ("gate_up", "gate_up_bias")


def places_before(kept: Params, wanted: Params, sharding: Any) -> Any:
    """Say where parameters are read to before `lay_out`: where they shall lie, but for what will grow.

    kept, wanted   specs of the model on one device and of what it is laid out for
    sharding       as `load_params` takes it
    """
    if not isinstance(sharding, Params):
        return sharding
    return jax.tree.map(
        lambda one, other, place: place if one.shape == other.shape else replicated(place.mesh),
        kept, wanted, sharding,
    )  # fmt: skip


def lay_out(params: Params, config: Any, shardings: Any) -> Params:
    """Move rows of fused weights to where `config.layout` wants them.

    params      of the same model on one device, where `places_before` says; not to be used any more
    shardings   that the results shall have, as `family.shardings` makes them
    """
    if config.layout == Layout():
        return params
    found, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)
    del params
    targets = tree.flatten_up_to(shardings)
    leaves = []
    while found:
        path, leaf = found.pop(0)
        target, parts = targets[len(leaves)], [step.name for step in path if hasattr(step, "name")]
        rows = _rows(parts, leaf.shape, config)
        leaves.append(leaf if rows is None else _move(leaf, rows, target))
    return jax.tree.unflatten(tree, leaves)


def _rows(parts: list[str], shape: Any, config: Any) -> npt.NDArray[np.intp] | None:
    """Which row of an array each row shall be; None where all stay. Experts' rows are counted by expert."""
    field, layout, dim = parts[-1], config.layout, config.head_dim
    num_kv, copies = config.num_kv_heads, layout.kv_copies
    if field in _GATED and config.parts.is_gated:
        num_rows = shape[0] if len(shape) < 3 else shape[1]
        blocks = layout.blocks(num_rows // 2)
        if blocks == 1:
            return None
        rows = np.empty(num_rows, np.intp)
        interleave(rows, [np.arange(num_rows)], blocks)
        return rows
    if field in ("qkv", "qkv_bias") and copies > 1:
        fused = np.arange(shape[0]).reshape(num_kv // copies, -1, dim)
        q, k, v = (part.reshape(-1) for part in np.split(fused, (-2, -1), axis=1))
        rows = np.empty((config.num_heads + 2 * num_kv) * dim, np.intp)
        fuse_qkv(rows, [q, k, v], num_kv, dim, 0, copies)
        return rows
    if field == "k_norm" and config.parts.qk_norm == "whole" and copies > 1:
        rows = np.empty(num_kv * dim, np.intp)
        repeat_heads(rows, [np.arange(shape[0])], dim, copies)
        return rows
    return None


def _move(leaf: Any, rows: npt.NDArray[np.intp], target: Any) -> Any:
    if not isinstance(leaf, QuantizedArray):
        axis = 1 if leaf.ndim == 3 else 0
        return jax.jit(partial(jnp.take, axis=axis), out_shardings=target)(leaf, rows.astype(np.int32))
    places = spread(leaf, target)
    parts = {
        name: _move(part, rows, getattr(places, name))
        for name in ("codes", "scales", "minimum", "zeros")
        if (part := getattr(leaf, name)) is not None
    }
    return leaf.replace(**parts, shape=(len(rows), leaf.shape[1]))  # pyright: ignore[reportAttributeAccessIssue]
