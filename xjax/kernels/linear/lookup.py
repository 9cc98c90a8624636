"""Rows of a packed embedding as an FFI call: the weights of some outputs, as numbers.

What one output's weights are made with is `micro.expand`, found in the table of `linear.numba`. Knows
no tokens: ids that no output has are taken for the nearest that has. Importing this imports Numba.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import njit

from xjax.kernels import ffi
from xjax.kernels.ffi import DATA, load_i32, load_i64, own, quotient, remainder, smaller, store_i64
from xjax.kernels.linear.forms import OUTPUTS, UNIT, Form
from xjax.kernels.linear.numba import EXPAND, call_five, line_address, prepare, record_bytes

NAME = "xjax_rows_packed"
_NUMBERS_EACH = 1 << 15  # of an item

_IDS, _W, _OUT, _FUNCTION, _NUM_ROWS, _NUM_OUT, _NUM_RUNS, _RUN, _RECORD, _ROWS_EACH, _NUM_SLOTS = range(11)


def _item(job, index, worker):
    """Expand some rows."""
    first = index * own(job, _ROWS_EACH)
    row_bytes = 4 * own(job, _NUM_RUNS) * own(job, _RUN) * UNIT
    for row in range(first, smaller(first + own(job, _ROWS_EACH), own(job, _NUM_ROWS))):
        number = _within(load_i32(own(job, _IDS) + 4 * row), own(job, _NUM_OUT))
        record = own(job, _W) + quotient(number, OUTPUTS) * own(job, _RECORD)
        target = own(job, _OUT) + row * row_bytes
        call_five(
            own(job, _FUNCTION),
            record,
            remainder(number, OUTPUTS),
            target,
            own(job, _NUM_RUNS),
            own(job, _RUN),
        )


@njit
def _within(number, count):
    return ffi.larger(smaller(number, count - 1), 0)


_run = ffi.pool(NAME)


def _handler(frame):
    if ffi.is_question(frame):
        return 0
    if ffi.num_arguments(frame) != 2 or ffi.num_attributes(frame) != 1 or ffi.attribute_size(frame, 0) != 4:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "rows_packed takes ids, records and a layout")
    ids, w, out = ffi.argument(frame, 0), ffi.argument(frame, 1), ffi.result(frame, 0)
    if ffi.dtype(ids) != ffi.INT32 or ffi.dtype(out) != ffi.FLOAT32:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "rows_packed takes int32 ids")
    if ffi.rank(ids) != 1 or ffi.rank(w) != 2 or ffi.rank(out) != 2 or ffi.dim(out, 0) != ffi.dim(ids, 0):
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "rows_packed takes ids [N] and records [Nb, R]")
    layout = ffi.attribute(frame, 0)
    line, workers, run = line_address(load_i64(layout)), load_i64(layout + 8), load_i64(layout + 16)
    num_rows, num_in = ffi.dim(out, 0), ffi.dim(out, 1)
    num_runs = quotient(num_in, UNIT * run)
    record = record_bytes(line, num_runs * run, num_runs)
    if load_i64(line + 8 * EXPAND) == 0:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "rows_packed has no code for this form: prepare it")
    if num_in != num_runs * run * UNIT or ffi.dim(w, 1) != record or ffi.dim(w, 0) == 0:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "rows_packed's rows do not fit its records")
    if num_rows == 0 or num_in == 0:
        return 0
    each = ffi.larger(quotient(_NUMBERS_EACH, num_in), 1)
    job = ffi.make_job(quotient(num_rows + each - 1, each), workers, _NUM_SLOTS)
    if job == 0:
        return ffi.error(frame, ffi.RESOURCE_EXHAUSTED, "rows_packed has no memory for its task")
    slots = job + DATA
    store_i64(slots + 8 * _IDS, ffi.data(ids))
    store_i64(slots + 8 * _W, ffi.data(w))
    store_i64(slots + 8 * _OUT, ffi.data(out))
    store_i64(slots + 8 * _FUNCTION, load_i64(line + 8 * EXPAND))
    store_i64(slots + 8 * _NUM_ROWS, num_rows)
    store_i64(slots + 8 * _NUM_OUT, ffi.dim(w, 0) * OUTPUTS)
    store_i64(slots + 8 * _NUM_RUNS, num_runs)
    store_i64(slots + 8 * _RUN, run)
    store_i64(slots + 8 * _RECORD, record)
    store_i64(slots + 8 * _ROWS_EACH, each)
    _run(frame, job)
    return 0


def register(form: Form, machine: str | None = None) -> int:
    """Compile the call for a form or load it from the disk; returns the form's line in the table."""
    line = prepare(form, machine)
    ffi.register(NAME, _handler, _item)
    return line


def rows_packed(
    token_id: jax.Array, data: jax.Array, form: Form, num_in: int, dtype: Any, machine: str | None = None
) -> jax.Array:
    """Look up rows of an embedding.

    token_id  [N]           int32
    data      [Nb, record]  uint8
    returns   [N, In]       `dtype`, rounded from the float32 of `forms.unpack`
    """
    workers = ffi.num_workers()
    layout = np.array([register(form, machine), workers, form.run, 0], np.int64)
    shape = jax.ShapeDtypeStruct((token_id.shape[0], num_in), jnp.float32)
    call: Any = jax.ffi.ffi_call(NAME, shape)
    return call(token_id.astype(jnp.int32), data, layout=layout).astype(dtype)
