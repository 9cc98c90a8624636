"""One row's draw when its candidates do not reach: exact, over V, without sorting.

A set of first tokens is a `Cut`: the logit and, among equal ones, the id where it ends. Cuts
are found by bisection over the ordered bit patterns of the logits, so they are exact for any
logits. The draw is one race of Gumbel noise: each candidate runs for itself with the noise of
its id, the tail runs as blocks with the log of a block's mass, and only the winning block's
tokens run among themselves. So V tokens need one exponential each and no noise.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from xjax.kernels.candidates.rows import WIDTH, blocks, scale, total
from xjax.sampling.noise import OF_BLOCKS, gumbel


@struct.dataclass
class Limits:
    """How a row's distribution is shaped; [J] for a step, [] for one row.

    temperature   [J] float32  above 0
    top_k         [J] int32    0 for off
    top_p, min_p  [J] float32  1 and 0 for off
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


@struct.dataclass
class Cut:
    """The first tokens of a row: those above `rank`, and those at it with ids up to `last_id`.

    rank, last_id   [] int32
    """

    rank: jax.Array
    last_id: jax.Array

    def keeps(self, ranks: jax.Array, ids: jax.Array) -> jax.Array:
        """Tell which tokens are in the set; all arrays of one shape."""
        return (ranks > self.rank) | ((ranks == self.rank) & (ids <= self.last_id))


def ordered(values: jax.Array) -> jax.Array:
    """Map floats to integers of the same order, -0 just below 0 as `lax.top_k` has it.

    values   [...] float32
    returns  [...] int32
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _largest(holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array) -> jax.Array:
    """Bisect for the largest integer in [low, high) that holds; `low` must hold, `high` must not."""

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean of two that may be 2^32 apart
        is_held = holds(middle)
        return jnp.where(is_held, middle, low), jnp.where(is_held, high, middle)

    return jax.lax.while_loop(lambda bounds: bounds[0] + 1 < bounds[1], halve, (low, high))[0]


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.int32)


def _last_id(ties: jax.Array, ids: jax.Array, quota: jax.Array) -> jax.Array:
    """Find the id at which `quota` of the ties, lowest ids first, are complete."""
    last = jnp.max(jnp.where(ties, ids, 0))
    low = jnp.where(_count(ties) > quota, jnp.int32(0), last)
    return _largest(lambda end: _count(ties & (ids < end)) < quota, low, last + 1)


def _first_mass(ranks: jax.Array, ids: jax.Array, weights: jax.Array, wanted: jax.Array) -> Cut:
    """Cut where the first tokens' weights reach `wanted`; the arrays are [n, WIDTH]."""

    def reaches(x: jax.Array) -> jax.Array:
        return total(jnp.where(ranks >= x, weights, 0.0)) >= wanted

    rank = _largest(reaches, jnp.min(ranks), jnp.max(ranks) + 1)
    ties = (ranks == rank) & (weights > 0)
    weight = jnp.max(jnp.where(ties, weights, 0.0))
    missing = wanted - total(jnp.where(ranks > rank, weights, 0.0))
    quota = jnp.clip(jnp.ceil(missing / weight), 1, _count(ties).astype(jnp.float32))
    return Cut(rank, _last_id(ties, ids, quota.astype(jnp.int32)))


def find_cut(ranks: jax.Array, ids: jax.Array, weights: jax.Array, limits: Limits, size: int) -> Cut:
    """Apply top_k, then top_p over what it left, to one row.

    ranks    [n, WIDTH] int32    `ordered` logits
    ids      [n, WIDTH] int32
    weights  [n, WIDTH] float32  relative to the largest
    limits   of scalars; `size` is V

    To cut after k tokens is to cut at mass k where each weighs one (exact in float32 below
    2^24 tokens). So both are turns of one loop, which halves what there is to compile.
    """

    def turn(stage: jax.Array, cut: Cut) -> Cut:
        kept = jnp.where(cut.keeps(ranks, ids), weights, 0.0)
        masses = jnp.where(stage == 0, jnp.ones_like(weights), kept)
        share = limits.top_p * total(kept)
        return _first_mass(ranks, ids, masses, jnp.where(stage == 0, limits.top_k.astype(jnp.float32), share))

    has_k = (limits.top_k > 0) & (limits.top_k < size)
    first = jnp.where(has_k, jnp.int32(0), jnp.int32(1))
    after_last = jnp.where(limits.top_p < 1, jnp.int32(2), jnp.int32(1))
    return jax.lax.fori_loop(first, after_last, turn, Cut(jnp.min(ranks), jnp.int32(ids.size - 1)))


def draw(row: jax.Array, values: jax.Array, ids: jax.Array, key: jax.Array, limits: Limits) -> jax.Array:
    """Draw one row's token from its exact distribution.

    row      [V]  float32 logits
    values   [C]  float32 its first candidates
    ids      [C]  int32
    key      [2]  uint32
    limits   of scalars
    returns  []   int32
    """
    best, temperature = values[0], limits.temperature
    logits = blocks(row, WIDTH, -jnp.inf)
    all_ids = jnp.arange(logits.size, dtype=jnp.int32).reshape(logits.shape)
    ranks, scaled = ordered(logits), scale(logits, best, temperature)
    weights = jnp.exp(scaled)
    cut = find_cut(ranks, all_ids, weights, limits, row.shape[0])

    keep = cut.keeps(ranks, all_ids) & (weights >= limits.min_p)
    tail = jnp.where(keep, weights, 0.0).at[ids // WIDTH, ids % WIDTH].set(0.0)
    block_score = jnp.log(jnp.sum(tail, axis=-1))
    block_score += gumbel(key, jnp.arange(logits.shape[0], dtype=jnp.int32), OF_BLOCKS)

    score = scale(values, best, temperature)
    is_kept = cut.keeps(ordered(values), ids) & (jnp.exp(score) >= limits.min_p)
    score = jnp.where(is_kept, score + gumbel(key, ids), -jnp.inf)

    block = jnp.argmax(block_score).astype(jnp.int32)
    noise = gumbel(key, all_ids[block])
    offset = jnp.argmax(jnp.where(tail[block] > 0, scaled[block] + noise, -jnp.inf)).astype(jnp.int32)
    token = jnp.where(jnp.max(block_score) > jnp.max(score), block * WIDTH + offset, ids[jnp.argmax(score)])
    return jnp.minimum(token, row.shape[0] - 1)
