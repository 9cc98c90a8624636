"""Matrices of codes put together as matrices of numbers are: codes, scales and zeros along the outputs.

What the codes of a file mean is known to xjax.checkpoints, what is done with them to xjax.state.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xjax.checkpoints.checkpoint import QuantizedView
from xjax.checkpoints.quantized.codes import Codes
from xjax.state.quantized import QuantizedArray
from xjax.weights.fuse import Array, Fuse
from xjax.weights.plan import LeafPlan

Allocate = Callable[[tuple[int, ...], Any], Array]


def read_codes(plan: LeafPlan, dtype: jnp.dtype, allocate: Allocate) -> QuantizedArray | Array:
    """Make the array of a plan that `is_codes`: of numpy parts, for `jax.device_put`.

    allocate   makes an array to be written of a shape and a dtype

    Matrices that cannot share one become numbers of `dtype`.
    """
    parts = [view.read_codes() for view in plan.views if isinstance(view, QuantizedView)]
    assert len(parts) == len(plan.views), "a plan of codes holds something else"
    if alike(parts):
        found = fuse_codes(parts, plan.fuse, plan.spec.shape[0], allocate)
    else:
        found = allocate(plan.spec.shape, jnp.dtype(plan.spec.dtype or dtype))
        plan.fuse(found, [part.numbers() for part in parts])
    for view in plan.views:
        view.release()
    return found


def alike(parts: Sequence[Codes]) -> bool:
    """Tell whether matrices can share an array: kind of codes, size of groups and order of inputs are one."""
    first = parts[0]
    return all(
        part.kind == first.kind
        and part.scales.shape[1] == first.scales.shape[1]
        and part.codes.shape[1] == first.codes.shape[1]
        and _are_equal(part.order, first.order)
        for part in parts
    )


def _are_equal(one: Array | None, other: Array | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def fuse_codes(parts: Sequence[Codes], fuse: Fuse, num_out: int, allocate: Allocate) -> QuantizedArray:
    """Put matrices that are `alike` together, as `fuse` does with the outputs of numbers.

    parts   [rows, In] each
    """
    first = parts[0]
    groups, width = first.scales.shape[1], first.codes.shape[1]

    def fused(arrays: Sequence[Array], columns: int) -> Array:
        out = allocate((num_out, columns), arrays[0].dtype)
        fuse(out, arrays)
        return out

    codes, zeros = fused([part.codes for part in parts], width), None
    if any(part.zeros is not None for part in parts):
        zeros = fused(
            [np.zeros(part.scales.shape, np.int8) if part.zeros is None else part.zeros for part in parts],
            groups,
        )
    num_in = 2 * width if first.kind == "int4" else width
    values: dict[str, Any] = {
        "codes": codes,
        "scales": fused([part.scales for part in parts], groups),
        "zeros": zeros,
        "order": first.order,
        "kind": first.kind if groups == 1 else f"{first.kind}_{num_in // groups}",
        "shape": (num_out, num_in),
    }
    return QuantizedArray(**values)
