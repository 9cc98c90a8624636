"""Work over V for one row, and the loop that does it for the rows that need it.

Knows orders, sums and blocks of a row; no sampling parameters.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

WIDTH = 512  # tokens of a block whose weights are summed together
_TOP_WIDTH = 64  # tokens of a block of which only the largest is looked at first
_LARGEST = float(jnp.finfo(jnp.float32).max)

Carry = TypeVar("Carry")


def for_rows(active: jax.Array, body: Callable[[jax.Array, Carry], Carry], carry: Carry) -> Carry:
    """Fold `body(row, carry)` over the active rows; costs nothing when there are none.

    active  [J] bool

    A loop, not a vmap: the body is compiled once and alike for every J, its branches are real
    ones, and rows that are not active pay nothing.
    """
    rows = jnp.nonzero(active, size=active.shape[0], fill_value=0)[0].astype(jnp.int32)
    count = jnp.sum(active, dtype=jnp.int32)

    def step(i: jax.Array, carry: Carry) -> Carry:
        # Tied to i: with J = 1 XLA would see that the row never changes, see `take_row`.
        row, _ = jax.lax.optimization_barrier((rows[i], i))
        return body(row, carry)

    return jax.lax.fori_loop(jnp.int32(0), count, step, carry)


def take_row(logits: jax.Array, row: jax.Array) -> jax.Array:
    """Take the row of the logits that the body of `for_rows` works on, NaN turned into +inf.

    logits   [J, V] float32
    row      []     int32
    returns  [V]    float32

    The barrier keeps the work on it inside the loop: with J = 1 XLA moves it out, and a step
    with no active row pays for it all the same. NaN: XLA's max and top_k on CPU may or may not
    let it through.
    """
    taken, _ = jax.lax.optimization_barrier((jax.lax.dynamic_index_in_dim(logits, row, keepdims=False), row))
    return without_nan(taken)


def blocks(row: jax.Array, width: int, fill: float) -> jax.Array:
    """Cut the last axis into blocks, the last one filled up.

    row      [..., V]
    returns  [..., ceil(V / width), width]
    """
    missing = -row.shape[-1] % width
    if missing:
        row = jnp.pad(row, [(0, 0)] * (row.ndim - 1) + [(0, missing)], constant_values=fill)
    return row.reshape(*row.shape[:-1], -1, width)


def without_nan(logits: jax.Array) -> jax.Array:
    """Turn NaN into +inf, which no maximum loses.

    logits   [...] float32
    returns  [...] float32
    """
    return jnp.where(jnp.isnan(logits), jnp.inf, logits)


def total(weights: jax.Array) -> jax.Array:
    """Sum a row in two stages, which keeps the rounding near that of the longer side.

    weights  [n, WIDTH] float32
    returns  []         float32
    """
    # Without the barrier XLA merges both sums into one chain of V additions.
    return jnp.sum(jax.lax.optimization_barrier(jnp.sum(weights, axis=-1)))


def scale(values: jax.Array, best: jax.Array, temperature: jax.Array) -> jax.Array:
    """Give logits relative to the row's largest, divided by the temperature: at most 0.

    values             [...]  float32
    best, temperature  [...]  float32, broadcast against `values`
    returns            [...]  float32, -inf where a token cannot be drawn

    Subtracting first keeps tiny temperatures and huge logits finite where it matters.
    """
    best = jnp.clip(best, -_LARGEST, _LARGEST)
    return (jnp.minimum(values, _LARGEST) - best) / temperature


def first_best(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Find the largest logit of each row and the lowest id that has it.

    logits   [J, V] float32
    returns  [J] float32, and [J] int32, always an id below V

    By blocks, since XLA's argmax on CPU is ten times slower than its max.
    """
    size = logits.shape[-1]
    parts = blocks(logits, _TOP_WIDTH, -jnp.inf)
    maxima = jax.lax.optimization_barrier(jnp.max(parts, axis=-1))
    best = jnp.max(maxima, axis=-1)
    block = _first_equal(maxima, best)
    offset = _first_equal(jnp.take_along_axis(parts, block[:, None, None], axis=1)[:, 0], best)
    return best, jnp.minimum(block * _TOP_WIDTH + offset, size - 1)


def _first_equal(values: jax.Array, wanted: jax.Array) -> jax.Array:
    size = values.shape[-1]
    index = jnp.arange(size, dtype=jnp.int32)[None]
    return jnp.min(jnp.where(values == wanted[:, None], index, size - 1), axis=-1)


def top(row: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """Find the first `num` tokens of a row's order.

    row      [V] float32
    returns  [num] float32 best first, [num] int32 ids

    They lie in the `num` blocks with the largest maxima, since each of those blocks holds a
    token that comes before all of any other block.
    """
    parts = blocks(row, _TOP_WIDTH, -jnp.inf)
    if parts.shape[0] > num:
        _, chosen = jax.lax.top_k(jnp.max(parts, axis=-1), num)
        chosen = jnp.sort(chosen)  # equal logits must stay in the order of their ids
        values, place = jax.lax.top_k(parts[chosen].reshape(-1), num)
        return values, chosen[place // _TOP_WIDTH] * _TOP_WIDTH + place % _TOP_WIDTH
    values, ids = jax.lax.top_k(row, num)
    return values, ids.astype(jnp.int32)
