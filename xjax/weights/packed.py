"""Matrices that stay the codes of their file: rows of GGUF blocks laid into records.

    tensor in its file:   part | part | part        some rows each
                            |      |      |         taken apart in a slab that a cache holds
    records:              outputs where the plan's `fuse` puts them

Tensors of one array that are of different forms become its pieces, each with its own rows in the order
of the array; what has no form becomes a piece of numbers. Knows no device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from xjax.checkpoints.checkpoint import TensorView
from xjax.checkpoints.quantized.packing import unpack_nibbles
from xjax.kernels.linear.forms import FORMS, OUTPUTS, UNIT, Fields, Form, int4, int8, put
from xjax.state.packed import JoinedArray, PackedArray
from xjax.state.quantized import QuantizedArray
from xjax.weights.fuse import Array
from xjax.weights.plan import LeafPlan
from xjax.weights.read import PART, SLAB, Rows, read_part, targets_of

# Forms of the GGUF types that have one; codes of wider ones stand for the same numbers.
FORM_BY_TYPE = {name: name for name in FORMS} | {"iq4_nl": "q8_0", "q3_k": "q6_k"}

Allocate = Callable[[tuple[int, ...], Any], Array]
Part = Callable[[], None]


def packed_parts(
    plan: LeafPlan, dtype: jnp.dtype, allocate: Allocate
) -> tuple[PackedArray | JoinedArray, list[Part]]:
    """Make the array of a plan that `is_packed`, of numpy parts, and list what fills it.

    allocate   makes an array to be written of a shape and a dtype

    What is listed may run in any order and at once.
    """
    targets, views = targets_of(plan), [view for view in plan.views if isinstance(view, TensorView)]
    assert targets is not None and len(views) == len(plan.views), "no plan of rows of blocks"
    names = [FORM_BY_TYPE.get(view.dtype) for view in views]
    kinds = list(dict.fromkeys(names))
    piece_of = np.empty(plan.spec.shape[0], np.intp)  # by row of the array
    for name, target in zip(names, targets, strict=True):
        piece_of[target] = kinds.index(name)
    pieces: list[Any] = []
    parts: list[Part] = []
    for i, kind in enumerate(kinds):
        shape = (int(np.count_nonzero(piece_of == i)), plan.spec.shape[1])
        places = np.cumsum(piece_of == i) - 1  # row of the piece by row of the array
        piece = _empty(None if kind is None else FORMS[kind], shape, dtype, allocate)
        pieces.append(piece)
        for view, name, target in zip(views, names, targets, strict=True):
            if name == kind:
                parts += _parts(view, piece, places[target])
    if len(pieces) == 1:
        return pieces[0], parts
    return JoinedArray(tuple(pieces), _turns(piece_of), plan.spec.shape), parts  # pyright: ignore


def pack_codes(array: QuantizedArray, dtype: jnp.dtype, allocate: Allocate) -> QuantizedArray | PackedArray:
    """Pack codes of 4 or 8 bits that have scales for whole units; others come back as they are.

    array   of numpy parts

    What it stands for stays the same to the bit: where zeros are to become minimums, only if the products
    of these with scales are exact.
    """
    (num_out, num_in), groups, zeros = array.shape, array.scales.shape[1], array.zeros
    is_int4, scales = array.kind.startswith("int4"), np.asarray(array.scales, np.float32)
    fits = array.order is None and array.minimum is None and (is_int4 or array.kind.startswith("int8"))
    if not fits or num_in % (groups * UNIT) or (zeros is not None and not (is_int4 and _are_short(scales))):
        return array
    run = num_in // groups // UNIT
    form = int4(run, has_minimum=zeros is not None) if is_int4 else int8(run)
    packed, codes = _empty(form, array.shape, dtype, allocate), np.asarray(array.codes)
    step = max(OUTPUTS, SLAB // num_in // OUTPUTS * OUTPUTS)
    for first in range(0, num_out, step):
        rows = np.arange(first, min(first + step, num_out))
        own, own_scales, minimums = codes[rows], scales[rows], None
        own = unpack_nibbles(own) if is_int4 else own.view(np.uint8) ^ np.uint8(128)
        if zeros is not None:
            minimums = -(np.asarray(zeros)[rows].astype(np.float32) + np.float32(8)) * own_scales
        put(form, Fields(own, own_scales, minimums), rows, packed.data)
    return packed


def _are_short(scales: Array) -> bool:
    """Whether float32 holds every product with a whole number of five bits: so it is of 16-bit floats."""
    return not (np.ascontiguousarray(scales).view(np.uint32) & np.uint32(31)).any()


def _empty(form: Form | None, shape: tuple[int, int], dtype: jnp.dtype, allocate: Allocate) -> Any:
    if form is None:
        return allocate(shape, dtype)
    data = allocate(form.shape(*shape), np.dtype(np.uint8))
    if shape[0] % OUTPUTS:
        data[-1] = 0  # of the outputs that fill up the last block, scales are 0
    return PackedArray(data, form, shape, jnp.dtype(dtype).name)  # pyright: ignore[reportArgumentType]


def _parts(view: TensorView, piece: Any, target: Rows) -> list[Part]:
    """What reads the rows of a tensor, each into its row of a piece."""
    step = max(OUTPUTS, PART // view.num_columns // OUTPUTS * OUTPUTS)
    starts = range(0, len(target), step)
    if not isinstance(piece, PackedArray):
        return [partial(read_part, view, first, piece, target[first : first + step]) for first in starts]
    return [
        partial(_pack_part, view, first, target[first : first + step], piece.form, piece.data)
        for first in starts
    ]


def _pack_part(view: TensorView, first: int, target: Rows, form: Form, data: Any) -> None:
    """Take the rows of a tensor from `first` on apart and lay them into records."""
    step = max(OUTPUTS, SLAB // view.num_columns // OUTPUTS * OUTPUTS)
    for start in range(0, len(target), step):
        rows = target[start : start + step]
        fields = Fields(**vars(view.split_rows(first + start, len(rows))))
        put(form, fields, rows, data)
    # Once: a system that maps pages around each that is read would bring back what was released before.
    view.release_rows(first, len(target))


def _turns(piece_of: Rows) -> tuple[tuple[int, int], ...]:
    """How pieces take turns: the runs of rows of the shortest period."""
    period = next(
        size
        for size in range(1, len(piece_of) + 1)
        if len(piece_of) % size == 0 and (piece_of.reshape(-1, size) == piece_of[:size]).all()
    )
    first = piece_of[:period]
    ends = [*np.flatnonzero(np.diff(first)) + 1, period]
    starts = [0, *ends[:-1]]
    return tuple((int(first[start]), int(end - start)) for start, end in zip(starts, ends, strict=True))
