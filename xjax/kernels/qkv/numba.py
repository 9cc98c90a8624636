"""From a fused product to queries and written pages as one FFI call.

    item    a run of tokens; of each the heads one after the other, straight from the product to where
            queries and pages have them

A token's bits depend on its own numbers alone. What a target outside the pages names is not written.
Importing this imports Numba.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import njit

from xjax.kernels import ffi
from xjax.kernels.ffi import (
    DATA,
    larger,
    load_f32,
    load_i32,
    load_i64,
    own,
    quotient,
    remainder,
    smaller,
    store_i64,
)
from xjax.kernels.qkv import xla
from xjax.kernels.rows import inverse_root, squares, turn, turn_half

NAME = "xjax_qkv"
_FEW_NUMBERS = 1 << 15  # of the product: an item, and what the caller does alone

# Slots of a job's own data: addresses in the order of operands, then of results, then dimensions.
(
    _QKV, _BIAS, _Q_NORM, _K_NORM, _COS, _SIN, _TARGET, _Q, _K, _V, _FACTORS,
    _TOKENS, _KV_HEADS, _GROUP, _DIM, _HALF, _PAGES, _SIZE, _IS_HALF, _IS_WHOLE, _EACH, _NUM_SLOTS,
) = range(22)  # fmt: skip


# ---- an item ----------------------------------------------------------------------------


def _item(job, index, worker):
    first = index * own(job, _EACH)
    for token in range(first, smaller(first + own(job, _EACH), own(job, _TOKENS))):
        _place_token(job, token)


@njit
def _place_token(job, token):
    num_kv, group, dim = own(job, _KV_HEADS), own(job, _GROUP), own(job, _DIM)
    row, head_bytes = own(job, _QKV) + 4 * token * num_kv * (group + 2) * dim, 4 * dim
    q_factor, k_factor = np.float32(1), np.float32(1)
    if own(job, _IS_WHOLE):
        q_factor, k_factor = _whole_factors(job, row)
    size, number_bytes = own(job, _SIZE), 2 if own(job, _IS_HALF) else 4
    target = load_i32(own(job, _TARGET) + 4 * token)
    page, offset = quotient(target, size), remainder(target, size)
    is_inside = target >= 0 and page < own(job, _PAGES)
    bias, kv_bytes = own(job, _BIAS), size * dim * number_bytes
    place = (page * num_kv * size + offset) * dim * number_bytes
    for head in range(num_kv):
        for i in range(group):
            out = own(job, _Q) + (token * num_kv * group + head * group + i) * head_bytes
            _turn_head(job, token, row, bias, _Q_NORM, head * group + i, out, q_factor, False)
            row += head_bytes
            bias = _after(bias, head_bytes)
        if is_inside:
            is_half = own(job, _IS_HALF) != 0
            _turn_head(job, token, row, bias, _K_NORM, head, own(job, _K) + place, k_factor, is_half)
            row += head_bytes
            bias = _after(bias, head_bytes)
            if is_half:
                turn_half(row, bias, 0, 0, 0, 0, dim, own(job, _V) + place, np.float32(1))
            else:
                turn(row, bias, 0, 0, 0, 0, dim, own(job, _V) + place, np.float32(1))
            row += head_bytes
            bias = _after(bias, head_bytes)
        else:
            row += 2 * head_bytes
            bias = _after(bias, 2 * head_bytes)
        place += kv_bytes


@njit
def _after(address, num_bytes):
    """An address farther on; 0, which stands for no array, stays."""
    return address + num_bytes if address != 0 else 0


@njit
def _turn_head(job, token, row, bias, norm, head, out, factor, is_half):
    """Norm and turn one head of queries or keys."""
    dim, half, weight = own(job, _DIM), own(job, _HALF), own(job, norm)
    if weight != 0 and own(job, _IS_WHOLE):
        weight += 4 * head * dim
    elif weight != 0:
        factor = inverse_root(squares(row, bias, dim, np.float32(0)), dim, load_f32(own(job, _FACTORS)))
    cos, sin = own(job, _COS) + 4 * token * half, own(job, _SIN) + 4 * token * half
    if is_half:
        turn_half(row, bias, weight, cos, sin, half, dim, out, factor)
    else:
        turn(row, bias, weight, cos, sin, half, dim, out, factor)


@njit
def _whole_factors(job, row):
    """What all queries of a token are divided by together, and all its keys: the inverses."""
    num_kv, group, dim = own(job, _KV_HEADS), own(job, _GROUP), own(job, _DIM)
    bias, eps = own(job, _BIAS), load_f32(own(job, _FACTORS))
    queries, keys, step = np.float32(0), np.float32(0), 4 * group * dim
    for _ in range(num_kv):
        queries += squares(row, bias, group * dim, np.float32(0))
        row, bias = row + step, _after(bias, step)
        keys += squares(row, bias, dim, np.float32(0))
        row, bias = row + 8 * dim, _after(bias, 8 * dim)
    return inverse_root(queries, num_kv * group * dim, eps), inverse_root(keys, num_kv * dim, eps)


_run = ffi.pool(NAME)


# ---- the call ---------------------------------------------------------------------------


@njit
def _optional(buffer):
    """Address of an array that may be missing: then it has no numbers."""
    return ffi.data(buffer) if ffi.dim(buffer, 0) > 0 else 0


def _handler(frame):
    if ffi.is_question(frame):
        return 0
    if ffi.num_arguments(frame) != 9 or ffi.num_attributes(frame) != 2 or ffi.attribute_size(frame, 1) != 3:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "qkv takes nine arrays, factors and a layout")
    qkv, bias, q_norm, k_norm = (
        ffi.argument(frame, 0),
        ffi.argument(frame, 1),
        ffi.argument(frame, 2),
        ffi.argument(frame, 3),
    )
    cos, q = ffi.argument(frame, 4), ffi.result(frame, 0)
    k, v, target = ffi.result(frame, 1), ffi.result(frame, 2), ffi.argument(frame, 8)
    for i in range(6):
        if ffi.dtype(ffi.argument(frame, i)) != ffi.FLOAT32:
            return ffi.error(frame, ffi.INVALID_ARGUMENT, "qkv takes float32 numbers")
    if ffi.dtype(q) != ffi.FLOAT32 or ffi.dtype(target) != ffi.INT32 or ffi.dtype(k) != ffi.dtype(v):
        return ffi.error(
            frame, ffi.INVALID_ARGUMENT, "qkv takes float32 queries, int32 targets, keys like values"
        )
    if ffi.dtype(k) != ffi.FLOAT32 and ffi.dtype(k) != ffi.UINT16:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "qkv writes pages of float32 or of bfloat16 bits")
    if ffi.rank(qkv) != 2 or ffi.rank(q) != 3 or ffi.rank(k) != 4 or ffi.rank(cos) != 2:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "qkv takes a product [N, U] and pages [P, K, S, D]")
    num_tokens, num_kv, dim = ffi.dim(qkv, 0), ffi.dim(k, 1), ffi.dim(k, 3)
    group, width = quotient(ffi.dim(q, 1), num_kv), ffi.dim(qkv, 1)
    if width != num_kv * (group + 2) * dim or 2 * ffi.dim(cos, 1) > dim or ffi.dim(q, 2) != dim:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "qkv's product, queries and pages do not fit")
    factors, layout = ffi.attribute(frame, 0), ffi.attribute(frame, 1)
    workers, is_whole = load_i64(layout), load_i64(layout + 8)
    each = larger(smaller(quotient(_FEW_NUMBERS, width), num_tokens), 1)
    job = ffi.make_job(quotient(num_tokens + each - 1, each), workers, _NUM_SLOTS)
    if job == 0:
        return ffi.error(frame, ffi.RESOURCE_EXHAUSTED, "qkv has no memory for its task")
    slots = job + DATA
    store_i64(slots + 8 * _QKV, ffi.data(qkv))
    store_i64(slots + 8 * _BIAS, _optional(bias))
    store_i64(slots + 8 * _Q_NORM, _optional(q_norm))
    store_i64(slots + 8 * _K_NORM, _optional(k_norm))
    store_i64(slots + 8 * _COS, ffi.data(cos))
    store_i64(slots + 8 * _SIN, ffi.data(ffi.argument(frame, 5)))
    store_i64(slots + 8 * _TARGET, ffi.data(target))
    store_i64(slots + 8 * _Q, ffi.data(q))
    store_i64(slots + 8 * _K, ffi.data(k))
    store_i64(slots + 8 * _V, ffi.data(v))
    store_i64(slots + 8 * _FACTORS, factors)
    store_i64(slots + 8 * _TOKENS, num_tokens)
    store_i64(slots + 8 * _KV_HEADS, num_kv)
    store_i64(slots + 8 * _GROUP, group)
    store_i64(slots + 8 * _DIM, dim)
    store_i64(slots + 8 * _HALF, ffi.dim(cos, 1))
    store_i64(slots + 8 * _PAGES, ffi.dim(k, 0))
    store_i64(slots + 8 * _SIZE, ffi.dim(k, 2))
    store_i64(slots + 8 * _IS_HALF, np.int64(ffi.dtype(k) == ffi.UINT16))
    store_i64(slots + 8 * _IS_WHOLE, is_whole)
    store_i64(slots + 8 * _EACH, each)
    _run(frame, job)
    return 0


def register() -> None:
    """Compile the call or load it from the disk, and make it known to XLA."""
    ffi.register(NAME, _handler, _item)


def place(
    qkv: jax.Array,
    bias: jax.Array | None,
    norms: xla.Norms,
    rope: tuple[jax.Array, jax.Array],
    pages: tuple[jax.Array, jax.Array],
    target: jax.Array,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norm and turn queries and keys, and put keys and values where `target` says.

    qkv      [N, U]             model dtype
    bias     [U]                or None
    norms    [D] or [H * D]     float32, of queries and of keys, or None
    rope     [N, d / 2]         float32, cosine and sine
    pages    [P, K, S, D]       float32, or uint16 bits of bfloat16; other pages go to `xla`
    target   [N]                int32
    returns  q [N, H, D], and the pages
    """
    if pages[0].dtype not in (jnp.float32, jnp.uint16):
        return xla.place(qkv, bias, norms, rope, pages, target, eps)
    register()
    _, num_kv_heads, _, dim = pages[0].shape
    num_heads = qkv.shape[1] // dim - 2 * num_kv_heads
    q_norm, k_norm = norms if None not in norms else (None, None)
    is_whole = q_norm is not None and q_norm.shape[0] != dim
    layout = np.array([ffi.num_workers(), is_whole, 0], np.int64)
    results = (
        jax.ShapeDtypeStruct((qkv.shape[0], num_heads, dim), jnp.float32),
        *(jax.ShapeDtypeStruct(page.shape, page.dtype) for page in pages),
    )
    call: Any = jax.ffi.ffi_call(NAME, results, input_output_aliases={6: 1, 7: 2})
    nothing = jnp.zeros((0,), jnp.float32)
    given = (nothing if x is None else x.astype(jnp.float32) for x in (qkv, bias, q_norm, k_norm))
    found = call(*given, *rope, *pages, target, factors=np.array([eps, 0], np.float32), layout=layout)
    return found[0].astype(qkv.dtype), found[1], found[2]
