"""Products with packed weights and what stands between them as one FFI call, in stages.

    rows in      norm, and int8 codes of it for each of the first matrices
    first        items of their products
    between      bias, activation, and codes of the result
    second       items of its product
    rows out     matrices' results put together; bias, norm, scale, residual

Items of all stages are numbered through, so that threads are called once. The products are `linear.numba`'s,
each with a view of its own into the job. Importing this imports Numba.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import njit

from xjax.kernels import ffi
from xjax.kernels.activation import ACTIVATIONS
from xjax.kernels.chain import xla
from xjax.kernels.chain.parts import Finish, First, Norm, Second
from xjax.kernels.ffi import DATA, larger, load_f32, load_i64, own, quotient, smaller, store_i64
from xjax.kernels.linear import numba as product
from xjax.kernels.norm.numba import norm_row
from xjax.kernels.rows import (
    KINDS,
    add_row,
    gate_gelu,
    gate_gelu_tanh,
    gate_silu,
    inverse_root,
    scale_row,
    squares,
)

NAME = "xjax_chain"
MOST_PIECES = 4  # of the first product
_LEAST_NUMBERS = 2048  # of an item of rows, about
_HELP_BYTES = 384 << 10  # of weights, for which another thread is called: that costs some microseconds
_NUM_STAGES = 5
_PIECE_WORDS = 8  # of the layout, for each matrix: linear.numba's, then places, outputs, bytes of panels

# Slots of a job's own data: operands and results, dimensions, what the layout says, items; then views.
(
    _X, _NORM, _NORM_BIAS, _BIAS, _LAST_BIAS, _POST_NORM, _RESIDUAL, _OUT, _SCRATCH, _FACTORS, _STRIPS,
    _ROWS, _IN, _HIDDEN, _LAST, _WORKER_BYTES, _NUM_FIRST, _ACTIVATION, _IS_GATED, _NUM_STRIPS, _HAS_SECOND,
    _HAS_FINISH, _EACH_IN, _EACH_BETWEEN, _EACH_OUT,
) = range(25)  # fmt: skip
_ENDS = 25  # of the stages
_PIECE_ENDS = _ENDS + _NUM_STAGES  # of the items of each first product
_VIEWS = _PIECE_ENDS + MOST_PIECES
_SECOND = MOST_PIECES  # its view
_NUM_SLOTS = _VIEWS + (MOST_PIECES + 1) * product.NUM_SLOTS

_HEAD = 9  # words of the layout in front of the matrices'
_SHARED = 1 << 30  # a place in the layout: the result itself


# ---- an item ----------------------------------------------------------------------------


def _item(job, index, worker):
    stage = 0
    while index >= own(job, _ENDS + stage):
        stage += 1
    if stage > 0:
        index -= own(job, _ENDS + stage - 1)
    scratch = own(job, _SCRATCH) + worker * own(job, _WORKER_BYTES)
    if stage == 0:
        _take_rows(job, scratch, index * own(job, _EACH_IN))
    elif stage == 1:
        _multiply_first(job, index)
    elif stage == 2:
        _activate_rows(job, scratch, index * own(job, _EACH_BETWEEN))
    elif stage == 3:
        product.multiply_item(_view(job, _SECOND), index)
    else:
        _finish_rows(job, scratch, index * own(job, _EACH_OUT))


@njit
def _view(job, piece):
    """What the functions of `linear.numba` take for a job: the slots of one matrix."""
    return job + 8 * (_VIEWS + piece * product.NUM_SLOTS)


@njit
def _take_rows(job, scratch, first):
    """Norm and quantize rows from `first` on, for all first matrices."""
    num_in, weight = own(job, _IN), own(job, _NORM)
    stop = smaller(first + own(job, _EACH_IN), product.padded_rows(_view(job, 0)))
    for row in range(first, stop):
        source = own(job, _X) + 4 * smaller(row, own(job, _ROWS) - 1) * num_in
        if weight != 0:
            norm_row(source, weight, own(job, _NORM_BIAS), scratch, num_in, load_f32(own(job, _FACTORS)))
            source = scratch
        for piece in range(own(job, _NUM_FIRST)):
            product.quantize_row(_view(job, piece), row, source)


@njit
def _multiply_first(job, index):
    piece = 0
    while index >= own(job, _PIECE_ENDS + piece):
        piece += 1
    if piece > 0:
        index -= own(job, _PIECE_ENDS + piece - 1)
    product.multiply_item(_view(job, piece), index)


@njit
def _activate_rows(job, scratch, first):
    """Activate rows of the first product from `first` on, and quantize them for the second."""
    second, count, kind = _view(job, _SECOND), own(job, _HIDDEN), own(job, _ACTIVATION)
    stop = smaller(first + own(job, _EACH_BETWEEN), product.padded_rows(second))
    bias, up_bias = own(job, _BIAS), own(job, _BIAS)
    if bias != 0:
        up_bias = bias + 4 * count
    for row in range(first, stop):
        at = smaller(row, own(job, _ROWS) - 1)
        gate, up = product.out_row(_view(job, 0), at), 0
        if own(job, _IS_GATED):
            up = gate + 4 * count if own(job, _NUM_FIRST) == 1 else product.out_row(_view(job, 1), at)
        if kind == 0:
            gate_silu(gate, bias, up, up_bias, scratch, count)
        elif kind == 1:
            gate_gelu_tanh(gate, bias, up, up_bias, scratch, count)
        else:
            gate_gelu(gate, bias, up, up_bias, scratch, count)
        product.quantize_row(second, row, scratch)


@njit
def _finish_rows(job, scratch, first):
    """Put rows of the last product together from `first` on, and do to them what follows."""
    count, bias, post_norm = own(job, _LAST), own(job, _LAST_BIAS), own(job, _POST_NORM)
    factors, has_finish = own(job, _FACTORS), own(job, _HAS_FINISH)
    for row in range(first, smaller(first + own(job, _EACH_OUT), own(job, _ROWS))):
        target = own(job, _OUT) + 4 * row * count
        source = target
        if own(job, _NUM_STRIPS) > 0:
            source = scratch if has_finish else target
            _join_row(job, row, source)
        if has_finish:
            factor = np.float32(1)
            if post_norm != 0:
                factor = inverse_root(squares(source, bias, count, np.float32(0)), count, load_f32(factors))
            residual = own(job, _RESIDUAL) + 4 * row * count
            add_row(source, bias, post_norm, residual, target, count, factor, load_f32(factors + 4))


@njit
def _join_row(job, row, target):
    """Take turns among the first matrices' results; a strip: piece, first, number, its period's."""
    end, period = target + 4 * own(job, _LAST), 0
    while target < end:
        for strip in range(own(job, _NUM_STRIPS)):
            words = own(job, _STRIPS) + 32 * strip
            count = load_i64(words + 16)
            begin = load_i64(words + 8) + period * load_i64(words + 24)
            source = product.out_row(_view(job, load_i64(words)), row) + 4 * begin
            scale_row(source, 0, 0, target, count, np.float32(0), np.float32(1))
            target += 4 * count
        period += 1


_run = ffi.pool(NAME, stages=(_ENDS, _ENDS + _NUM_STAGES))


# ---- the call ---------------------------------------------------------------------------


def _handler(frame):
    if ffi.is_question(frame):
        return 0
    if ffi.num_arguments(frame) < 8 or ffi.num_attributes(frame) != 2:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "chain takes rows, seven arrays, matrices and a layout")
    x, out, scratch = ffi.argument(frame, 0), ffi.result(frame, 0), ffi.result(frame, 1)
    for i in range(7):
        if ffi.dtype(ffi.argument(frame, i)) != ffi.FLOAT32:
            return ffi.error(frame, ffi.INVALID_ARGUMENT, "chain takes float32 numbers")
    if ffi.rank(x) != 2 or ffi.rank(out) != 2 or ffi.rank(scratch) != 1 or ffi.dtype(out) != ffi.FLOAT32:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "chain takes and gives float32 rows")
    layout, rows = ffi.attribute(frame, 1), ffi.dim(x, 0)
    num_pieces = ffi.num_arguments(frame) - 7
    if (
        ffi.attribute_size(frame, 1) < _HEAD + _PIECE_WORDS * num_pieces
        or load_i64(layout + 8) + load_i64(layout + 16) != num_pieces
        or load_i64(layout + 8) > MOST_PIECES
        or load_i64(layout + 56) > ffi.dim(scratch, 0)
        or ffi.dim(out, 0) != rows
    ):
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "chain's layout does not fit its arrays")
    if rows == 0:
        return 0
    job = ffi.make_job(0, load_i64(layout), _NUM_SLOTS)
    if job == 0:
        return ffi.error(frame, ffi.RESOURCE_EXHAUSTED, "chain has no memory for its task")
    if not _describe(frame, job, x, out, layout):
        ffi.release(job)
        return ffi.error(
            frame, ffi.INVALID_ARGUMENT, "chain's rows do not fit its matrices, or a form is not prepared"
        )
    store_i64(job + 24, _count(job, load_i64(layout)))
    store_i64(job + 40, smaller(load_i64(layout), 1 + quotient(_work(job), _HELP_BYTES)))
    _run(frame, job)
    return 0


@njit
def _optional(frame, index, size):
    """Address of an array of `size` numbers, 0 where it is missing, which it is by having none; else -1."""
    buffer = ffi.argument(frame, index)
    if ffi.rank(buffer) > 0 and ffi.dim(buffer, 0) == 0:
        return 0
    return ffi.data(buffer) if ffi.dim(buffer, ffi.rank(buffer) - 1) == size else -1


@njit
def _describe(frame, job, x, out, layout):
    """Fill a job's slots; whether everything fits."""
    slots, rows, num_first = job + DATA, ffi.dim(x, 0), load_i64(layout + 8)
    has_second, num_in, last = load_i64(layout + 16), ffi.dim(x, 1), ffi.dim(out, 1)
    scratch, words = ffi.data(ffi.result(frame, 1)), layout + 8 * _HEAD
    wide = 0
    for piece in range(num_first + has_second):
        is_second = piece == num_first
        view = _view(job, _SECOND if is_second else piece)
        num_out, place = load_i64(words + 48), load_i64(words + 40)
        inputs = load_i64(layout + 64) if is_second else num_in
        found = product.describe(view, ffi.argument(frame, 7 + piece), rows, inputs, num_out, words)
        if found < 0 or found > load_i64(words + 56):
            return False
        target = ffi.data(out) if place == _SHARED else scratch + place
        product.place(view, 0, target, scratch + load_i64(words + 32))
        wide += 0 if is_second else num_out
        words += 8 * _PIECE_WORDS
        if place == _SHARED and num_out != last:
            return False
    hidden, num_strips = load_i64(layout + 64), load_i64(layout + 48)
    if (has_second and wide != hidden * (1 + load_i64(layout + 32))) or (num_strips and wide != last):
        return False
    store_i64(slots + 8 * _X, ffi.data(x))
    store_i64(slots + 8 * _NORM, _optional(frame, 1, num_in))
    store_i64(slots + 8 * _NORM_BIAS, _optional(frame, 2, num_in))
    store_i64(slots + 8 * _BIAS, _optional(frame, 3, wide))
    store_i64(slots + 8 * _LAST_BIAS, _optional(frame, 4, last))
    store_i64(slots + 8 * _POST_NORM, _optional(frame, 5, last))
    store_i64(slots + 8 * _RESIDUAL, _optional(frame, 6, last))
    for i in range(1, 7):
        if own(job, i) == -1:
            return False
    residual = ffi.argument(frame, 6)
    if own(job, _RESIDUAL) != 0 and (ffi.rank(residual) != 2 or ffi.dim(residual, 0) != rows):
        return False
    store_i64(slots + 8 * _OUT, ffi.data(out))
    store_i64(slots + 8 * _SCRATCH, scratch)
    store_i64(slots + 8 * _FACTORS, ffi.attribute(frame, 0))
    store_i64(slots + 8 * _STRIPS, words)
    store_i64(slots + 8 * _ROWS, rows)
    store_i64(slots + 8 * _IN, num_in)
    store_i64(slots + 8 * _HIDDEN, hidden)
    store_i64(slots + 8 * _LAST, last)
    store_i64(slots + 8 * _NUM_FIRST, num_first)
    store_i64(slots + 8 * _HAS_SECOND, has_second)
    store_i64(slots + 8 * _ACTIVATION, load_i64(layout + 24))
    store_i64(slots + 8 * _IS_GATED, load_i64(layout + 32))
    store_i64(slots + 8 * _WORKER_BYTES, load_i64(layout + 40))
    store_i64(slots + 8 * _NUM_STRIPS, num_strips)
    store_i64(slots + 8 * _HAS_FINISH, np.int64(own(job, _RESIDUAL) != 0))
    return True


@njit
def _count(job, workers):
    """Cut all stages into items; returns how many there are."""
    padded, end = product.padded_rows(_view(job, 0)), 0
    ends, piece_ends = job + DATA + 8 * _ENDS, job + DATA + 8 * _PIECE_ENDS
    each = _rows_each(padded, own(job, _IN), workers)
    store_i64(job + DATA + 8 * _EACH_IN, each)
    end += quotient(padded + each - 1, each)
    store_i64(ends, end)
    items = 0
    for piece in range(own(job, _NUM_FIRST)):
        items += product.share(_view(job, piece), workers)
        store_i64(piece_ends + 8 * piece, items)
    end += items
    store_i64(ends + 8, end)
    if own(job, _HAS_SECOND):
        each = _rows_each(padded, own(job, _HIDDEN), workers)
        store_i64(job + DATA + 8 * _EACH_BETWEEN, each)
        end += quotient(padded + each - 1, each)
    store_i64(ends + 16, end)
    if own(job, _HAS_SECOND):
        end += product.share(_view(job, _SECOND), workers)
    store_i64(ends + 24, end)
    if own(job, _HAS_FINISH) or own(job, _NUM_STRIPS) > 0:
        each = _rows_each(own(job, _ROWS), own(job, _LAST), workers)
        store_i64(job + DATA + 8 * _EACH_OUT, each)
        end += quotient(own(job, _ROWS) + each - 1, each)
    store_i64(ends + 32, end)
    return end


@njit
def _work(job):
    """Bytes of all weights, as often as what is done with them takes longer than reading them."""
    num_bytes = product.weight_bytes(_view(job, _SECOND)) if own(job, _HAS_SECOND) else 0
    for piece in range(own(job, _NUM_FIRST)):
        num_bytes += product.weight_bytes(_view(job, piece))
    return num_bytes * quotient(own(job, _ROWS) + 3, 4)


@njit
def _rows_each(rows, width, workers):
    """Rows of an item: for a few items a thread, but not for less work than handing one out."""
    share = quotient(rows + 4 * workers - 1, 4 * workers)
    return larger(larger(share, quotient(_LEAST_NUMBERS, width)), 1)


def register() -> None:
    """Compile the call or load it from the disk, and make it known to XLA."""
    product.lines()
    ffi.register(NAME, _handler, _item)


def run(
    x: jax.Array, norm: Norm | None, first: First, second: Second | None, finish: Finish | None, eps: float
) -> jax.Array:
    """Pass rows through one product or two.

    x        [N, E]     floating point
    returns  [N, Out]   dtype of x
    """
    halves = len(first.pieces) == 2 and first.turns == tuple((i, first.num_out // 2) for i in range(2))
    if len(first.pieces) > MOST_PIECES or (second is not None and len(first.pieces) > 1 and not halves):
        return xla.run(x, norm, first, second, finish, eps)
    register()
    num_out = first.num_out if second is None else second.weight.num_out
    layout, num_bytes = _layout(x.shape, first, second, has_finish=finish is not None)
    results = (
        jax.ShapeDtypeStruct((x.shape[0], num_out), jnp.float32),
        jax.ShapeDtypeStruct((num_bytes,), jnp.uint8),
    )
    given = (
        x,
        None if norm is None else norm.weight,
        None if norm is None else norm.bias,
        None if second is None else second.bias,
        None if finish is None else finish.bias,
        None if finish is None else finish.post_norm,
        None if finish is None else finish.residual,
    )
    nothing = jnp.zeros((0,), jnp.float32)
    arrays = [nothing if array is None else array.astype(jnp.float32) for array in given]
    pieces = (*first.pieces, *(() if second is None else (second.weight,)))
    factors = np.array([eps, 1.0 if finish is None else finish.scale], np.float32)
    call: Any = jax.ffi.ffi_call(NAME, results)
    return call(*arrays, *(piece.data for piece in pieces), factors=factors, layout=layout)[0].astype(x.dtype)


def _layout(
    shape: tuple[int, ...], first: First, second: Second | None, *, has_finish: bool
) -> tuple[np.ndarray, int]:
    """What a call is told beside its arrays, and how many bytes of scratch it takes."""
    (num_rows, num_in), is_joined = shape, len(first.pieces) > 1
    workers = ffi.num_workers()
    hidden = 0 if second is None else first.num_out // (2 if second.is_gated else 1)
    widest = max(num_in, hidden, first.num_out if is_joined and second is None and has_finish else 0)
    worker_bytes = -(-4 * widest // 64) * 64
    end = workers * worker_bytes
    words: list[int] = []

    def take(num_bytes: int) -> int:
        nonlocal end
        start, end = end, end + -(-num_bytes // 64) * 64
        return start

    last = first.pieces if second is None else (second.weight,)
    for piece in (*first.pieces, *(() if second is None else (second.weight,))):
        inputs = hidden if second is not None and piece is second.weight else num_in
        panel_bytes = product.most_panel_bytes(piece.form, num_rows, inputs)
        is_last = len(last) == 1 and piece is last[0]
        panels = take(panel_bytes)
        place = _SHARED if is_last else take(4 * num_rows * piece.num_out)
        words += [*product.layout_of(piece.form), panels, place, piece.num_out, panel_bytes]
    strips: list[int] = []
    if is_joined and second is None:
        taken = [0] * len(first.pieces)
        for piece, count in first.turns:
            strips += [piece, taken[piece], count, sum(n for p, n in first.turns if p == piece)]
            taken[piece] += count
    kind = 0 if second is None else ACTIVATIONS.index(second.activation)
    is_gated = second is not None and second.is_gated
    head = [workers, len(first.pieces), second is not None, kind, is_gated, worker_bytes, len(strips) // 4]
    return np.array([*head, end, hidden, *words, *strips], np.int64), end


assert KINDS == ACTIVATIONS
