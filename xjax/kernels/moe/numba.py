"""Products of grouped tokens with their experts' weights as FFI calls; weights are read where they lie.

    pair    a token and one of its experts; pairs are sorted by expert, in their own order within one
    expand  x [N, In] -> [N * k, Out]    item: one expert x a block of outputs
    reduce  x [N * k, In] -> [N, Out]    item: a block of outputs, of every expert in use, one after the other

Only experts in use are read, each once for all its tokens. A sum runs in the order of the inputs and
over experts in the order of their numbers, so a token's result is the same to the bit whatever else is
in the batch. Importing this imports Numba.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import njit

from xjax.kernels import ffi, lanes
from xjax.kernels.activation import gate
from xjax.kernels.ffi import (
    DATA,
    load_f32,
    load_i32,
    load_i64,
    own,
    quotient,
    remainder,
    smaller,
    store_f32,
    store_i64,
)
from xjax.kernels.lanes import DOT_HEIGHTS, DOT_WIDTH, LANES
from xjax.kernels.moe import xla

NAME = "xjax_moe"
_FEW_PAIRS = 64
_FEW_BLOCK, _MANY_BLOCK = 16, 32  # outputs of an item; multiples of DOT_WIDTH; measured
_SCRATCH = 40  # slots of a worker: addresses of rows, columns, targets; factors; sums

# Slots of a job's own data: addresses, then dimensions, then addresses of what lies behind the slots.
(
    _X, _W, _OUT, _FACTORS, _NUM_IN, _WHOLE, _NUM_OUT, _EACH, _NUM_ROWS, _IS_HALF, _BLOCK, _BLOCKS,
    _USED, _NUM_USED, _ORDER, _STARTS, _WORK, _NUM_SLOTS,
) = range(18)  # fmt: skip

_H0, _H1, _H2, _H3 = DOT_HEIGHTS
_dots_0, _dots_1, _dots_2, _dots_3 = (lanes.dots(height, is_half=False) for height in DOT_HEIGHTS)
_half_0, _half_1, _half_2, _half_3 = (lanes.dots(height, is_half=True) for height in DOT_HEIGHTS)
_load_half = lanes.load_half


@njit
def _height(rows):
    """Rows to take at once when so many are left."""
    return _H0 if rows >= _H0 else _H1 if rows >= _H1 else _H2 if rows >= _H2 else _H3


@njit
def _dots(height, is_half, rows, columns, targets, factors, count):
    if is_half:
        if height == _H0:
            _half_0(rows, columns, targets, factors, count)
        elif height == _H1:
            _half_1(rows, columns, targets, factors, count)
        elif height == _H2:
            _half_2(rows, columns, targets, factors, count)
        else:
            _half_3(rows, columns, targets, factors, count)
    elif height == _H0:
        _dots_0(rows, columns, targets, factors, count)
    elif height == _H1:
        _dots_1(rows, columns, targets, factors, count)
    elif height == _H2:
        _dots_2(rows, columns, targets, factors, count)
    else:
        _dots_3(rows, columns, targets, factors, count)


# ---- an item ----------------------------------------------------------------------------


def _item(job, index, worker):
    """A block of outputs of one expert, or, when results are added up, of all in use."""
    scratch = own(job, _WORK) + 8 * _SCRATCH * worker
    if own(job, _FACTORS) == 0:
        block = remainder(index, own(job, _BLOCKS))
        _expert(job, scratch, load_i64(own(job, _USED) + 8 * quotient(index, own(job, _BLOCKS))), block)
        return
    first = index * own(job, _BLOCK)
    stop = smaller(first + own(job, _BLOCK), own(job, _NUM_OUT))
    for row in range(own(job, _NUM_ROWS)):
        place = own(job, _OUT) + 4 * row * own(job, _NUM_OUT)
        for column in range(first, stop):
            store_f32(place + 4 * column, np.float32(0))
    for used in range(own(job, _NUM_USED)):
        _expert(job, scratch, load_i64(own(job, _USED) + 8 * used), index)


@njit
def _expert(job, scratch, expert, block):
    """Multiply all tokens of an expert with a block of its outputs."""
    starts = own(job, _STARTS) + 8 * expert
    pair, end = load_i64(starts), load_i64(starts + 8)
    first = block * own(job, _BLOCK)
    stop = smaller(first + own(job, _BLOCK), own(job, _NUM_OUT))
    weights = own(job, _W) + expert * own(job, _NUM_OUT) * own(job, _NUM_IN) * (
        2 if own(job, _IS_HALF) else 4
    )
    while pair < end:
        height = _height(end - pair)
        _panel(job, scratch, weights, pair, height, first, stop)
        pair += height


@njit
def _panel(job, scratch, weights, pair, height, first, stop):
    """Multiply `height` pairs from `pair` on with outputs first <= i < stop."""
    rows, columns, targets = scratch, scratch + 64, scratch + 96
    factors, sums = scratch + 160, scratch + 184
    num_in, num_out, is_half = own(job, _NUM_IN), own(job, _NUM_OUT), own(job, _IS_HALF)
    whole, adds = own(job, _WHOLE), own(job, _FACTORS) != 0
    for i in range(height):
        number = load_i64(own(job, _ORDER) + 8 * (pair + i))
        token = quotient(number, own(job, _EACH))
        store_i64(rows + 8 * i, own(job, _X) + 4 * (number if adds else token) * num_in)
        if adds:
            store_f32(factors + 4 * i, load_f32(own(job, _FACTORS) + 4 * number))
    for column in range(first, stop, DOT_WIDTH):
        for i in range(DOT_WIDTH):
            place = smaller(column + i, num_out - 1)
            store_i64(columns + 8 * i, weights + place * num_in * (2 if is_half else 4))
        is_direct = whole == num_in and column + DOT_WIDTH <= num_out
        for i in range(height):
            number = load_i64(own(job, _ORDER) + 8 * (pair + i))
            row = quotient(number, own(job, _EACH)) if adds else number
            target = own(job, _OUT) + 4 * (row * num_out + column)
            store_i64(targets + 8 * i, target if is_direct else sums + 16 * i)
        if whole > 0:
            _dots(height, is_half, rows, columns, targets, factors if adds and is_direct else 0, whole)
        if not is_direct:
            _finish(job, scratch, pair, height, column)


@njit
def _finish(job, scratch, pair, height, column):
    """Add the inputs that fill no vector, and put those of four sums that are wanted in their places."""
    rows, columns, sums = scratch, scratch + 64, scratch + 184
    num_in, num_out, whole = own(job, _NUM_IN), own(job, _NUM_OUT), own(job, _WHOLE)
    adds = own(job, _FACTORS) != 0
    for i in range(height):
        number = load_i64(own(job, _ORDER) + 8 * (pair + i))
        row = quotient(number, own(job, _EACH)) if adds else number
        for j in range(smaller(DOT_WIDTH, num_out - column)):
            total = load_f32(sums + 16 * i + 4 * j) if whole > 0 else np.float32(0)
            for k in range(whole, num_in):
                weight = _number(load_i64(columns + 8 * j), k, own(job, _IS_HALF))
                total += load_f32(load_i64(rows + 8 * i) + 4 * k) * weight
            place = own(job, _OUT) + 4 * (row * num_out + column + j)
            if adds:
                total = total * load_f32(own(job, _FACTORS) + 4 * number) + load_f32(place)
            store_f32(place, total)


@njit
def _number(row, index, is_half):
    return _load_half(row + 2 * index) if is_half else load_f32(row + 4 * index)


_run = ffi.pool(NAME)


# ---- the call ---------------------------------------------------------------------------


def _handler(frame):
    if ffi.is_question(frame):
        return 0
    adds = ffi.num_arguments(frame) == 4
    if not adds and ffi.num_arguments(frame) != 3:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "moe takes three arrays, or four")
    x, ids, w, out = (
        ffi.argument(frame, 0),
        ffi.argument(frame, 1),
        ffi.argument(frame, 2),
        ffi.result(frame, 0),
    )
    if ffi.dtype(x) != ffi.FLOAT32 or ffi.dtype(out) != ffi.FLOAT32 or ffi.dtype(ids) != ffi.INT32:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "moe takes float32 rows and int32 experts")
    if ffi.dtype(w) != ffi.FLOAT32 and ffi.dtype(w) != ffi.BFLOAT16:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "moe takes weights of float32 or bfloat16")
    if (
        ffi.rank(x) != 2
        or ffi.rank(ids) != 1
        or ffi.rank(w) != 3
        or ffi.rank(out) != 2
        or ffi.dim(w, 2) != ffi.dim(x, 1)
        or ffi.dim(w, 1) != ffi.dim(out, 1)
    ):
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "moe takes rows [N, In] and weights [X, Out, In]")
    pairs, rows = ffi.dim(ids, 0), ffi.dim(x, 0)
    num_tokens = ffi.dim(out, 0) if adds else rows
    given = rows if adds else ffi.dim(out, 0)
    if num_tokens == 0 or given != pairs or remainder(pairs, num_tokens) != 0:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "moe takes as many experts for each row")
    if ffi.num_attributes(frame) != 1 or ffi.attribute_size(frame, 0) != 2:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "moe takes a layout")
    layout, num_experts = ffi.attribute(frame, 0), ffi.dim(w, 0)
    block, workers = load_i64(layout), load_i64(layout + 8)
    behind = _NUM_SLOTS + pairs + 2 * num_experts + 1 + workers * _SCRATCH
    job = ffi.make_job(0, workers, behind)
    if job == 0:
        return ffi.error(frame, ffi.RESOURCE_EXHAUSTED, "moe has no memory for its task")
    slots = job + DATA
    order = slots + 8 * _NUM_SLOTS
    starts, used = order + 8 * pairs, order + 8 * (pairs + num_experts + 1)
    store_i64(slots + 8 * _X, ffi.data(x))
    store_i64(slots + 8 * _W, ffi.data(w))
    store_i64(slots + 8 * _OUT, ffi.data(out))
    store_i64(slots + 8 * _FACTORS, ffi.data(ffi.argument(frame, 3)) if adds else 0)
    store_i64(slots + 8 * _NUM_IN, ffi.dim(x, 1))
    store_i64(slots + 8 * _WHOLE, ffi.dim(x, 1) - remainder(ffi.dim(x, 1), LANES))
    store_i64(slots + 8 * _NUM_OUT, ffi.dim(out, 1))
    store_i64(slots + 8 * _EACH, quotient(pairs, num_tokens))
    store_i64(slots + 8 * _NUM_ROWS, num_tokens)
    store_i64(slots + 8 * _IS_HALF, np.int64(ffi.dtype(w) == ffi.BFLOAT16))
    store_i64(slots + 8 * _BLOCK, block)
    blocks = quotient(ffi.dim(out, 1) + block - 1, block)
    store_i64(slots + 8 * _BLOCKS, blocks)
    store_i64(slots + 8 * _USED, used)
    store_i64(slots + 8 * _ORDER, order)
    store_i64(slots + 8 * _STARTS, starts)
    store_i64(slots + 8 * _WORK, used + 8 * num_experts)
    num_used = _sort(ffi.data(ids), pairs, num_experts, order, starts, used)
    store_i64(slots + 8 * _NUM_USED, num_used)
    store_i64(job + 24, blocks if adds else blocks * num_used)
    _run(frame, job)
    return 0


@njit
def _sort(ids, pairs, num_experts, order, starts, used):
    """Sort pairs by expert, leaving out those of none; returns how many experts are in use.

    ids      [P] int32       order   [P] int64       starts   [X + 1] int64       used   [X] int64
    """
    for expert in range(num_experts + 1):
        store_i64(starts + 8 * expert, 0)
    for pair in range(pairs):
        expert = load_i32(ids + 4 * pair)
        if 0 <= expert < num_experts:
            store_i64(starts + 8 * expert, load_i64(starts + 8 * expert) + 1)
    total, num_used = 0, 0
    for expert in range(num_experts + 1):  # counts become the ends of runs
        count = load_i64(starts + 8 * expert)
        if count > 0:
            store_i64(used + 8 * num_used, expert)
            num_used += 1
        total += count
        store_i64(starts + 8 * expert, total)
    for i in range(pairs):  # from behind, so that ends become starts
        pair = pairs - 1 - i
        expert = load_i32(ids + 4 * pair)
        if 0 <= expert < num_experts:
            place = load_i64(starts + 8 * expert) - 1
            store_i64(starts + 8 * expert, place)
            store_i64(order + 8 * place, pair)
    return num_used


def register() -> None:
    """Compile the call or load it from the disk, and make it known to XLA."""
    ffi.register(NAME, _handler, _item)


def moe(
    x: jax.Array,
    expert_id: jax.Array,
    weight: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    activation: str,
) -> jax.Array:
    """Pass each token through its experts and add up what they say.

    x           [N, E]         model dtype
    expert_id   [N, k]         int32, X for none
    weight      [N, k]         float32
    gate_up     [X, 2 * F, E]  float32 or bfloat16; others go to `xla`
    down        [X, E, F]      the same
    returns     [N, E]         dtype of x

    Has no gradient: `xla` has.
    """
    if any(w.dtype not in (jnp.float32, jnp.bfloat16) for w in (gate_up, down)):
        return xla.moe(x, expert_id, weight, gate_up, down, activation)
    register()
    ids = expert_id.reshape(-1)
    inner = _call(x.astype(jnp.float32), ids, gate_up, rows=ids.shape[0])
    inner = gate(inner, activation)
    out = _call(inner, ids, down, weight.reshape(-1).astype(jnp.float32), rows=x.shape[0])
    return out.astype(x.dtype)


def _call(x: jax.Array, ids: jax.Array, w: jax.Array, *factors: jax.Array, rows: int) -> jax.Array:
    workers = ffi.num_workers()
    block = _FEW_BLOCK if ids.shape[0] <= _FEW_PAIRS else _MANY_BLOCK
    call: Any = jax.ffi.ffi_call(NAME, jax.ShapeDtypeStruct((rows, w.shape[1]), jnp.float32))
    return call(x, ids, w, *factors, layout=np.array([block, workers], np.int64))
