"""Each row's first tokens and its mass as one FFI call.

    item    a part of a row, always the same one: a pass that keeps what is above the least of the
            best so far, and for a row with a temperature the sum of its exponentials, by its own best
    merge   by whoever finishes a row's last part: parts in their order, so the order in which they
            were done leaves no trace

A token is one integer, its logit's key above the rest of its id, so that all are different and the
largest is the first. Knows no order of draws. Importing this imports Numba.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir
from numba import njit, types

from xjax.kernels import ffi
from xjax.kernels.ffi import (
    DATA,
    fetch_add,
    larger,
    load_f32,
    load_i32,
    load_i64,
    own,
    procedure,
    quotient,
    remainder,
    slot,
    smaller,
    store_f32,
    store_i64,
)
from xjax.kernels.rows import GROUP, LANES, exp_total, lane_maxima, lowest_bit, next_above, which_above

NAME = "xjax_candidates"
PART = 1 << 15  # tokens of an item: they stay in the second cache from the first pass to the next
_BLOCK = 1 << 10  # of these float32 is enough to sum; small weights get lost in longer sums
_LAST = (1 << 32) - 1
_LEAST = -(1 << 31)  # below every key
_INFINITE, _LARGEST, _LOG2E = 0x7F800000, np.float32(3.4028234663852886e38), 1.4426950408889634

# Slots of a job's own data.
(
    _LOGITS, _TEMPERATURE, _VALUES, _IDS, _LOGSUMEXP, _SCRATCH, _ROWS, _SIZE, _NUM, _PARTS, _NUM_SLOTS,
) = range(11)  # fmt: skip
# Words of a part's record; then 2 * NUM tokens. The scratch begins with a count of parts done for each row.
_COUNT, _MASS, _BEST, _HEADER = range(4)


def _emit_store_i32(context, builder, signature, arguments):
    value = builder.trunc(arguments[1], ir.IntType(32))
    builder.store(value, builder.inttoptr(arguments[0], ir.PointerType()))
    return context.get_dummy_value()


_store_i32 = procedure(types.void(types.int64, types.int64), _emit_store_i32)


# ---- tokens -----------------------------------------------------------------------------


@njit
def _key(address, is_greedy):
    """The key of a logit; of a row that takes its best, -0 is 0."""
    bits = load_i32(address)
    if (bits & 0x7FFFFFFF) > _INFINITE:
        return np.int64(_INFINITE)
    if bits < 0:
        bits = bits ^ 0x7FFFFFFF
        if is_greedy and bits == -1:
            return np.int64(0)
    return np.int64(bits)


@njit
def _id(token):
    return _LAST - (token & _LAST)


@njit
def _select(tokens, count, num):
    """Move the `num` first of them to the front, in any order, the last of these to its end."""
    low, high, wanted = 0, count - 1, num - 1
    while low < high:
        pivot = slot(tokens, (low + high) >> 1)
        i, j = low, high
        while i <= j:
            while slot(tokens, i) > pivot:
                i += 1
            while slot(tokens, j) < pivot:
                j -= 1
            if i <= j:
                kept = slot(tokens, i)
                store_i64(tokens + 8 * i, slot(tokens, j))
                store_i64(tokens + 8 * j, kept)
                i += 1
                j -= 1
        if wanted <= j:
            high = j
        elif wanted >= i:
            low = i
        else:
            return


@njit
def _sort(tokens, count):
    """The largest first, by exchanges over ever smaller distances."""
    gap = 57
    while gap > 0:
        for i in range(gap, count):
            token, j = slot(tokens, i), i
            while j >= gap and slot(tokens, j - gap) < token:
                store_i64(tokens + 8 * j, slot(tokens, j - gap))
                j -= gap
            store_i64(tokens + 8 * j, token)
        gap = 23 if gap == 57 else 10 if gap == 23 else 4 if gap == 10 else 1 if gap == 4 else 0


# ---- an item ----------------------------------------------------------------------------


@njit
def _record(job, row, part):
    words = _HEADER + 2 * own(job, _NUM)
    return own(job, _SCRATCH) + 8 * (own(job, _ROWS) + (row * own(job, _PARTS) + part) * words)


def _item(job, index, worker):
    num_parts, size = own(job, _PARTS), own(job, _SIZE)
    row, part = quotient(index, num_parts), remainder(index, num_parts)
    record, first = _record(job, row, part), part * PART
    source, count = own(job, _LOGITS) + 4 * (row * size + first), smaller(PART, size - first)
    temperature = load_f32(own(job, _TEMPERATURE) + 4 * row)
    is_greedy = not temperature > 0
    num = 1 if is_greedy else own(job, _NUM)
    _collect(record, source, first, count, num, is_greedy)
    if not is_greedy:
        _weigh(record, source, first, count, temperature)
    if fetch_add(own(job, _SCRATCH) + 8 * row, 1) == num_parts - 1:
        _merge(job, row, num, is_greedy)


@njit
def _collect(record, source, first, count, num, is_greedy):
    """Keep the part's first `num` tokens, and up to as many more."""
    tokens, kept = record + 8 * _HEADER, 0
    threshold = _first_threshold(tokens, source, count, num)
    group = next_above(source, 0, count, threshold)
    while group < count:
        bits = which_above(source, group, count, threshold)
        while bits != 0:
            index = group + lowest_bit(bits)
            bits &= bits - 1
            key = _key(source + 4 * index, is_greedy)
            if key > threshold:
                store_i64(tokens + 8 * kept, (key << 32) | (_LAST - first - index))
                kept += 1
                if kept == 2 * num:
                    _select(tokens, kept, num)
                    kept, threshold = num, slot(tokens, num - 1) >> 32
        group = next_above(source, group + GROUP, count, threshold)
    store_i64(record + 8 * _COUNT, kept)


@njit
def _first_threshold(tokens, source, count, num):
    """A key that at least `num` tokens are above: so many of 2 * num parts have their best above it.

    It spares the pass most of the tokens that would be kept for a while, four of five.
    """
    num_blocks = (2 * num) // LANES
    if num_blocks * LANES <= num or count < 4 * num:
        return np.int64(_LEAST)
    num_vectors = quotient(count, num_blocks * LANES)
    for block in range(num_blocks):
        lane_maxima(source + 4 * block * num_vectors * LANES, num_vectors, tokens + 8 * block * LANES)
    _select(tokens, num_blocks * LANES, num)
    return slot(tokens, num - 1) - 1


@njit
def _weigh(record, source, first, count, temperature):
    """Sum the part's exponentials relative to its own best."""
    best = slot(record, _HEADER)
    for i in range(1, slot(record, _COUNT)):
        best = larger(best, slot(record, _HEADER + i))
    value = _finite(load_f32(source + 4 * (_id(best) - first)))
    factor = np.float32(_LOG2E) / temperature
    if not factor < _LARGEST:
        factor = _LARGEST
    store_f32(record + 8 * _BEST, value)
    mass, start = np.float64(0), 0
    while start < count:
        num = smaller(_BLOCK, count - start)
        mass += np.float64(exp_total(source + 4 * start, num, value, factor))
        start += num
    store_f32(record + 8 * _MASS, np.float32(mass))


@njit
def _finite(value):
    if not value < _LARGEST:
        return _LARGEST
    return value if value > -_LARGEST else -_LARGEST


@njit
def _merge(job, row, num, is_greedy):
    """Write a row from its parts."""
    size, most, num_parts = own(job, _SIZE), own(job, _NUM), own(job, _PARTS)
    source = own(job, _LOGITS) + 4 * row * size
    store_f32(own(job, _LOGSUMEXP) + 4 * row, np.float32(0) if is_greedy else _mass(job, row))
    tokens, count = _record(job, row, 0) + 8 * _HEADER, 0
    for part in range(num_parts):
        record = _record(job, row, part)
        for i in range(slot(record, _COUNT)):  # never before what was already read
            store_i64(tokens + 8 * count, slot(record, _HEADER + i))
            count += 1
    _select(tokens, count, num)
    _sort(tokens, num)
    values, ids = own(job, _VALUES) + 4 * row * most, own(job, _IDS) + 4 * row * most
    for i in range(num):
        index = _id(slot(tokens, i))
        value = load_f32(source + 4 * index)
        store_f32(values + 4 * i, value if value == value else np.float32(np.inf))
        _store_i32(ids + 4 * i, index)
    for i in range(num, most):
        store_f32(values + 4 * i, np.float32(-np.inf))
        _store_i32(ids + 4 * i, 0)


@njit
def _mass(job, row):
    """Log of the row's mass relative to its best."""
    num_parts, best = own(job, _PARTS), -_LARGEST
    temperature = np.float64(load_f32(own(job, _TEMPERATURE) + 4 * row))
    for part in range(num_parts):
        value = load_f32(_record(job, row, part) + 8 * _BEST)
        if value > best:
            best = value
    mass = 0.0
    for part in range(num_parts):
        record = _record(job, row, part)
        away = (np.float64(load_f32(record + 8 * _BEST)) - np.float64(best)) / temperature
        mass += np.float64(load_f32(record + 8 * _MASS)) * math.exp(away)
    return np.float32(math.log(mass)) if mass > 0 else np.float32(-np.inf)


_run = ffi.pool(NAME)


# ---- the call ---------------------------------------------------------------------------


def _handler(frame):
    if ffi.is_question(frame):
        return 0
    if ffi.num_arguments(frame) != 2 or ffi.num_attributes(frame) != 1:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "candidates takes logits, temperatures and a layout")
    logits, temperature, values = ffi.argument(frame, 0), ffi.argument(frame, 1), ffi.result(frame, 0)
    if ffi.dtype(logits) != ffi.FLOAT32 or ffi.dtype(temperature) != ffi.FLOAT32:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "candidates takes float32 logits and temperatures")
    if ffi.rank(logits) != 2 or ffi.rank(temperature) != 1 or ffi.rank(values) != 2:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "candidates takes logits [J, V] and temperatures [J]")
    rows, size, num = ffi.dim(logits, 0), ffi.dim(logits, 1), ffi.dim(values, 1)
    num_parts = quotient(size + PART - 1, PART)
    words = rows * (1 + num_parts * (_HEADER + 2 * num))
    if num < 1 or num > size or ffi.dim(temperature, 0) != rows:
        return ffi.error(
            frame, ffi.INVALID_ARGUMENT, "candidates' logits, temperatures and results do not fit"
        )
    if ffi.dim(ffi.result(frame, 3), 0) != 2 * words:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "candidates' scratch does not fit")
    job = ffi.make_job(rows * num_parts, load_i64(ffi.attribute(frame, 0)), _NUM_SLOTS)
    if job == 0:
        return ffi.error(frame, ffi.RESOURCE_EXHAUSTED, "candidates has no memory for its task")
    slots, scratch = job + DATA, ffi.data(ffi.result(frame, 3))
    for row in range(rows):
        store_i64(scratch + 8 * row, 0)
    store_i64(slots + 8 * _LOGITS, ffi.data(logits))
    store_i64(slots + 8 * _TEMPERATURE, ffi.data(temperature))
    store_i64(slots + 8 * _VALUES, ffi.data(values))
    store_i64(slots + 8 * _IDS, ffi.data(ffi.result(frame, 1)))
    store_i64(slots + 8 * _LOGSUMEXP, ffi.data(ffi.result(frame, 2)))
    store_i64(slots + 8 * _SCRATCH, scratch)
    store_i64(slots + 8 * _ROWS, rows)
    store_i64(slots + 8 * _SIZE, size)
    store_i64(slots + 8 * _NUM, num)
    store_i64(slots + 8 * _PARTS, num_parts)
    _run(frame, job)
    return 0


def register() -> None:
    """Compile the call or load it from the disk, and make it known to XLA."""
    ffi.register(NAME, _handler, _item)


def pick(logits: jax.Array, temperature: jax.Array, num: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pick each row's first tokens, and take the mass of all.

    logits       [J, V] float32
    temperature  [J]    float32, 0 for greedy
    returns      values [J, num] float32, ids [J, num] int32, logsumexp [J] float32
    """
    register()
    rows, size = logits.shape
    words = rows * (1 + -(-size // PART) * (_HEADER + 2 * num))
    results = (
        jax.ShapeDtypeStruct((rows, num), jnp.float32),
        jax.ShapeDtypeStruct((rows, num), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct((2 * words,), jnp.int32),
    )
    call: Any = jax.ffi.ffi_call(NAME, results)
    layout = np.array([ffi.num_workers()], np.int64)
    return call(logits, temperature, layout=layout)[:3]
