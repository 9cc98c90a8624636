"""Norms of rows as an FFI call; what is done to a row is `kernels.rows`. Importing this imports Numba."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import njit

from xjax.kernels import ffi
from xjax.kernels.ffi import DATA, load_f32, own, quotient, smaller, store_i64
from xjax.kernels.rows import inverse_root, scale_row, squares, total

NAME = "xjax_norm"
_NUMBERS_EACH = 1 << 14  # of an item

_X, _WEIGHT, _BIAS, _OUT, _EPS, _NUM_ROWS, _COUNT, _ROWS_EACH, _NUM_SLOTS = range(9)


def _item(job, index, worker):
    """Norm some rows."""
    first, weight, bias = index * own(job, _ROWS_EACH), own(job, _WEIGHT), own(job, _BIAS)
    count, eps = own(job, _COUNT), load_f32(own(job, _EPS))
    for row in range(first, smaller(first + own(job, _ROWS_EACH), own(job, _NUM_ROWS))):
        place = 4 * row * count
        norm_row(own(job, _X) + place, weight, bias, own(job, _OUT) + place, count, eps)


@njit
def norm_row(source, weight, bias, target, count, eps):
    """Norm `count` float32 at an address; a bias, where there is one, makes it a layer norm."""
    mean = np.float32(0)
    if bias != 0:
        mean = total(source, 0, count) / np.float32(count)
    factor = inverse_root(squares(source, 0, count, mean), count, eps)
    scale_row(source, weight, bias, target, count, mean, factor)


_run = ffi.pool(NAME)


def _handler(frame):
    if ffi.is_question(frame):
        return 0
    if ffi.num_arguments(frame) != 3 or ffi.num_attributes(frame) != 2 or ffi.attribute_size(frame, 0) != 1:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "norm takes rows, a weight, a bias, eps and a layout")
    x, weight, bias, out = (
        ffi.argument(frame, 0),
        ffi.argument(frame, 1),
        ffi.argument(frame, 2),
        ffi.result(frame, 0),
    )
    if ffi.dtype(x) != ffi.FLOAT32 or ffi.dtype(weight) != ffi.FLOAT32 or ffi.dtype(bias) != ffi.FLOAT32:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "norm takes float32")
    if ffi.rank(x) != 2 or ffi.rank(weight) != 1 or ffi.rank(bias) != 1:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "norm takes rows [N, E] and weights [E]")
    num_rows, count = ffi.dim(x, 0), ffi.dim(x, 1)
    if ffi.dim(weight, 0) != count or (ffi.dim(bias, 0) != count and ffi.dim(bias, 0) != 0):
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "norm's weights do not fit its rows")
    if num_rows == 0 or count == 0:
        return 0
    each = ffi.larger(quotient(_NUMBERS_EACH, count), 1)
    workers = ffi.load_i64(ffi.attribute(frame, 1))
    job = ffi.make_job(quotient(num_rows + each - 1, each), workers, _NUM_SLOTS)
    if job == 0:
        return ffi.error(frame, ffi.RESOURCE_EXHAUSTED, "norm has no memory for its task")
    slots = job + DATA
    store_i64(slots + 8 * _X, ffi.data(x))
    store_i64(slots + 8 * _WEIGHT, ffi.data(weight))
    store_i64(slots + 8 * _BIAS, ffi.data(bias) if ffi.dim(bias, 0) != 0 else 0)
    store_i64(slots + 8 * _OUT, ffi.data(out))
    store_i64(slots + 8 * _EPS, ffi.attribute(frame, 0))
    store_i64(slots + 8 * _NUM_ROWS, num_rows)
    store_i64(slots + 8 * _COUNT, count)
    store_i64(slots + 8 * _ROWS_EACH, each)
    _run(frame, job)
    return 0


def register() -> None:
    """Compile the call or load it from the disk, and make it known to XLA."""
    ffi.register(NAME, _handler, _item)


def norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """Norm rows, each by itself: RMS, or with a bias layer norm.

    x              [N, E]  any floating dtype
    weight, bias   [E]     float32; bias or None
    returns        [N, E]  dtype of x
    """
    register()
    workers = ffi.num_workers()
    call: Any = jax.ffi.ffi_call(NAME, jax.ShapeDtypeStruct(x.shape, jnp.float32))
    biases = jnp.zeros(0, jnp.float32) if bias is None else bias
    out = call(
        x.astype(jnp.float32),
        weight,
        biases,
        eps=np.array([eps], np.float32),
        layout=np.array([workers], np.int64),
    )
    return out.astype(x.dtype)
