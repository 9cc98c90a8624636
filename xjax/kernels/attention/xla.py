"""Paged attention in plain XLA: an online softmax over blocks of pages.

    decode   all rows together: block i of every row, until the longest row is done
    tiles    one after the other, each with its own number of blocks; the G query heads of a
             kv head are folded into the rows of one matrix product

Every loop's trip count comes from the lengths in the batch, so no shape depends on a length, and a
row's arithmetic is in an order of its own, whatever else is in the batch. Such loops cannot be
differentiated backwards: the gradient is that of `dense`, the same sums over all pages at once.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from xjax.kernels.pages.xla import gather

_MASKED = -1e30  # finite, so that a block without any visible position makes no NaN
_DECODE_BLOCK = 128  # tokens that one trip of a loop reads from each row; measured
_TILE_BLOCK = 256


@dataclass(frozen=True)
class _Static:
    num_decode: int
    tile: int
    scale: float
    window: int | None
    soft_cap: float | None


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    row_of: jax.Array,
    position: jax.Array,
    *,
    num_decode: int,
    tile: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """Attend each token to the pages of its own sequence.

    q         [N, H, D]      model dtype
    k, v      [P, K, S, D]   cache dtype
    table     [B, M]         int32 page ids
    row_of    [N]            int32
    position  [N]            int32, -1 for padding
    returns   [N, H, D]      dtype of q
    """
    static = _Static(num_decode, tile, scale, window, soft_cap)
    return _attend(q, k, v, table, row_of, position, static)


def _blocks(q, k, v, table, row_of, position, static):
    return _regions(_decode_blocks, _tile_blocks, q, k, v, table, row_of, position, static)


def _attend_forward(q, k, v, table, row_of, position, static):
    saved = (q, k, v, table, row_of, position)
    return _attend(*saved, static), saved


def _attend_backward(static, saved, gradient):
    q, k, v, *where = saved
    _, pull = jax.vjp(lambda q, k, v: dense(q, k, v, *where, static), q, k, v)  # pyright: ignore[reportCallIssue]
    return *pull(gradient), None, None, None


_attend: Any = jax.custom_vjp(_blocks, nondiff_argnums=(6,))
_attend.defvjp(_attend_forward, _attend_backward)


def _regions(decode, tiles, q, k, v, table, row_of, position, static):
    """Split the tokens into the decode region and tiles and join the results of both."""
    count, parts = static.num_decode, []
    if count:
        rows = jnp.take(table, row_of[:count], axis=0)
        parts.append(decode(q[:count], k, v, rows, position[:count], static))
    if q.shape[0] > count:
        num_tiles = (q.shape[0] - count) // static.tile
        heads, at = row_of[count :: static.tile], position[count:].reshape(num_tiles, static.tile)
        q_tiles = q[count:].reshape(num_tiles, static.tile, *q.shape[1:])
        out = tiles(q_tiles, k, v, jnp.take(table, heads, axis=0), at, static)
        parts.append(out.reshape(-1, *q.shape[1:]))
    out = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return out.astype(q.dtype)


def _visible(at, position, window):
    """Whether a token at `position` sees one at `at`; both broadcast against each other."""
    seen = at <= position
    return seen if window is None else seen & (at > position - window)


def _first_page(position, page_size, window):
    if window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - window + 1, 0) // page_size


def _positions(page, page_size):
    """Positions that pages hold: page index [..., n] -> [..., n * S]."""
    inside = jnp.arange(page_size, dtype=jnp.int32).reshape((1,) * page.ndim + (page_size,))
    return (page[..., None] * page_size + inside).reshape(*page.shape[:-1], -1)


def _cap(scores, soft_cap):
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _online(carry, scores, seen, values):
    """One step of the online softmax.

    carry   highest score [..., R], sum of weights [..., R], weighted values [..., R, D]
    scores  [..., R, n]     seen [..., R, n] bool     values [..., n, D], zero where unseen by all
    """
    high, total, out = carry
    scores = jnp.where(seen, scores, _MASKED)
    new_high = jnp.maximum(high, scores.max(-1))
    weight = jnp.where(seen, jnp.exp(scores - new_high[..., None]), 0.0)
    fade = jnp.exp(high - new_high)
    return new_high, total * fade + weight.sum(-1), out * fade[..., None] + weight @ values


def _start(shape, head_dim):
    return (
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )


def _normalize(carry):
    _, total, out = carry
    return out / jnp.where(total > 0, total, 1.0)[..., None]


def _decode_blocks(q, k, v, table, position, static):
    """Attend one token of each row: q [B, H, D], table [B, M], position [B] -> [B, H, D]."""
    num_rows, num_heads, head_dim = q.shape
    num_kv, page_size = k.shape[1:3]
    width = max(_DECODE_BLOCK // page_size, 1)
    first = _first_page(position, page_size, static.window)
    trips = (jnp.max((position + page_size) // page_size - first) + width - 1) // width
    q = (q.astype(jnp.float32) * static.scale).reshape(num_rows, num_kv, num_heads // num_kv, head_dim)

    def block(i, carry):
        page = first[:, None] + i * width + jnp.arange(width, dtype=jnp.int32)[None, :]
        ids = jnp.take_along_axis(table, page, axis=1, mode="clip")
        at = _positions(page, page_size)
        seen = _visible(at, position[:, None], static.window)
        scores = _cap(jnp.einsum("bkgd,bktd->bkgt", q, gather(k, ids)), static.soft_cap)
        values = jnp.where(seen[:, None, :, None], gather(v, ids), 0.0)
        return _online(carry, scores, seen[:, None, None, :], values)

    carry = jax.lax.fori_loop(0, trips, block, _start(q.shape[:3], head_dim))
    return _normalize(carry).reshape(num_rows, num_heads, head_dim)


def _fold(q, num_kv):
    """Fold query heads into rows: [T, H, D] -> [K, G * T, D]."""
    tile, num_heads, head_dim = q.shape
    grouped = q.reshape(tile, num_kv, num_heads // num_kv, head_dim)
    return grouped.transpose(1, 2, 0, 3).reshape(num_kv, -1, head_dim)


def _unfold(out, tile):
    """Undo `_fold`: [K, G * T, D] -> [T, H, D]."""
    num_kv, rows, head_dim = out.shape
    return out.reshape(num_kv, rows // tile, tile, head_dim).transpose(2, 0, 1, 3).reshape(tile, -1, head_dim)


def _span(at, position, window):
    """Positions that any token of a tile sees: at [n], position [T] -> bool [n]; T tokens, padding -1."""
    last = jnp.max(position)
    seen = at <= last
    if window is None:
        return seen
    first = jnp.min(jnp.where(position < 0, last, position))
    return seen & (at > first - window)


def _tile_blocks(q, k, v, table, position, static):
    """Attend tile after tile: q [n, T, H, D], table [n, M], position [n, T] -> [n, T, H, D]."""
    num_kv, page_size = k.shape[1:3]
    group = q.shape[2] // num_kv
    width = max(_TILE_BLOCK // page_size, 1)

    def one(args):
        q, table, position = args
        last = jnp.max(position)
        first = _first_page(jnp.min(jnp.where(position < 0, last, position)), page_size, static.window)
        trips = ((last + page_size) // page_size - first + width - 1) // width
        folded = _fold(q.astype(jnp.float32) * static.scale, num_kv)
        rows = jnp.tile(position, group)[:, None]

        def block(i, carry):
            page = first + i * width + jnp.arange(width, dtype=jnp.int32)
            ids = jnp.take(table, page, mode="clip")
            at = _positions(page, page_size)
            scores = _cap(jnp.einsum("krd,ktd->krt", folded, gather(k, ids)), static.soft_cap)
            values = jnp.where(_span(at, position, static.window)[None, :, None], gather(v, ids), 0.0)
            return _online(carry, scores, _visible(at[None, :], rows, static.window)[None], values)

        carry = jax.lax.fori_loop(0, trips, block, _start(folded.shape[:2], q.shape[-1]))
        return _unfold(_normalize(carry), q.shape[0])

    return jax.lax.map(one, (q, table, position))


def dense(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    row_of: jax.Array,
    position: jax.Array,
    static: _Static,
) -> jax.Array:
    """Attend as `attend` does, over all pages of a table at once; differentiable, slow for long tables.

    q         [N, H, D]      model dtype
    k, v      [P, K, S, D]   cache dtype
    table     [B, M]         int32 page ids
    row_of    [N]            int32
    position  [N]            int32, -1 for padding
    returns   [N, H, D]      dtype of q
    """
    return _regions(_dense_rows, _dense_tiles, q, k, v, table, row_of, position, static)


def _dense_rows(q, k, v, table, position, static):
    return _dense_tiles(q[:, None], k, v, table, position[:, None], static)[:, 0]


def _dense_tiles(q, k, v, table, position, static):
    num_kv, page_size = k.shape[1:3]
    at = jnp.arange(table.shape[1] * page_size, dtype=jnp.int32)

    def one(args):
        q, table, position = args
        folded = _fold(q.astype(jnp.float32) * static.scale, num_kv)
        rows = jnp.tile(position, q.shape[1] // num_kv)[:, None]
        seen = _visible(at[None, :], rows, static.window)[None]
        span = _span(at, position, static.window)[None, :, None]
        keys = jnp.where(span, gather(k, table), 0.0)
        values = jnp.where(span, gather(v, table), 0.0)
        scores = jnp.where(seen, _cap(jnp.einsum("krd,ktd->krt", folded, keys), static.soft_cap), _MASKED)
        weight = jnp.where(seen, jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))), 0.0)
        total = weight.sum(-1, keepdims=True)
        return _unfold((weight / jnp.where(total > 0, total, 1.0)) @ values, q.shape[0])

    return jax.lax.map(one, (q, table, position))
