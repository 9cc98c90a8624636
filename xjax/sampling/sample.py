"""Choose the token of each sampled position, and the whole path from logits to a `Choice`.

Order: penalties, bias, grammar mask, temperature, top_k, top_p over what top_k left, min_p
relative to the largest. Knows no requests and no text.
"""

import jax
import jax.numpy as jnp
from flax import struct

from xjax.kernels.candidates.rows import for_rows, scale, take_row
from xjax.sampling import logprobs, mask, penalties, wide
from xjax.sampling.candidates import Candidates, from_logits
from xjax.sampling.logprobs import Logprobs
from xjax.sampling.noise import gumbel, row_keys
from xjax.sampling.wide import Limits
from xjax.state.batch import Sampled

# Bits of a row's flags; with any of them set its token means nothing but is a valid id.
NOT_FINITE = 1  # a logit is NaN or +inf, or none is above -inf
NO_TOKEN = 2  # every token is banned: set together with NOT_FINITE
NOT_REACHED = 4  # the candidates were too few and came without logits


@struct.dataclass
class Choice:
    """What sampling gives back.

    token     [J] int32
    flags     [J] int32      0, or bits of NOT_FINITE, NO_TOKEN, NOT_REACHED
    logprobs  Logprobs of the full body, else None
    """

    token: jax.Array
    flags: jax.Array
    logprobs: Logprobs | None


def sample(
    logits: jax.Array,
    sampled: Sampled,
    *,
    last_token: jax.Array,
    allowed: jax.Array | None = None,
    backend: str = "xla",
) -> Choice:
    """Take a step's logits to tokens; the full body's work is there when `sampled` has its fields.

    logits      [J, V]            float32
    last_token  [R+1]             int32, of the state before this step's feedback
    allowed     [J, ceil(V/32)]   int32 grammar bits, or None for no grammar
    returns     Choice
    """
    is_full = sampled.pending.shape == sampled.token.shape
    shaped = penalties.apply(logits, sampled, last_token) if is_full else logits
    if allowed is not None:
        shaped = mask.apply(shaped, allowed)
    token, flags = choose(from_logits(shaped, sampled.temperature, backend=backend), sampled)
    report = logprobs.measure(logits, token, sampled) if is_full else None
    return Choice(token=token, flags=flags, logprobs=report)


def choose(candidates: Candidates, sampled: Sampled) -> tuple[jax.Array, jax.Array]:
    """Choose each row's token from its candidates, or from V where they do not reach.

    returns  token [J] int32, flags [J] int32

    A greedy row takes its first candidate. A candidate's noise is that of its id, here and in
    `wide.draw`, so a row at the border between the two draws the same. Nothing but the row's
    own numbers decides which of them draws.
    """
    is_random = sampled.temperature > 0
    greedy = candidates.ids[:, 0]

    def draw() -> tuple[jax.Array, jax.Array]:
        limits = Limits(
            temperature=jnp.where(is_random, sampled.temperature, 1.0),
            top_k=jnp.maximum(sampled.top_k, 0),
            top_p=sampled.top_p,
            min_p=sampled.min_p,
        )
        token, is_reached = _draw(candidates, limits, row_keys(sampled))
        return jnp.where(is_random, token, greedy), is_random & ~is_reached

    token, is_short = jax.lax.cond(jnp.any(is_random), draw, lambda: (greedy, jnp.zeros_like(is_random)))
    best = candidates.values[:, 0]
    flags = jnp.where(jnp.isfinite(best), 0, NOT_FINITE) | jnp.where(best == -jnp.inf, NO_TOKEN, 0)
    return token, flags.astype(jnp.int32) | jnp.where(is_short, NOT_REACHED, 0).astype(jnp.int32)


def _draw(candidates: Candidates, limits: Limits, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draw every row, and tell for which rows that was exact."""
    values, ids, logits = candidates.values, candidates.ids, candidates.logits
    scaled = scale(values, values[:, :1], limits.temperature[:, None])
    has_all = logits is not None and logits.shape[1] == ids.shape[1]
    count, is_reached = reach(scaled, candidates.logsumexp, limits, has_all)
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    score = jnp.where(index < count[:, None], scaled + gumbel(keys, ids), -jnp.inf)
    token = jnp.take_along_axis(ids, jnp.argmax(score, axis=1)[:, None], axis=1)[:, 0]
    if logits is None or has_all:
        return token, is_reached

    def widen(j: jax.Array, token: jax.Array) -> jax.Array:
        row_limits = jax.tree.map(lambda x: x[j], limits)
        return token.at[j].set(wide.draw(take_row(logits, j), values[j], ids[j], keys[j], row_limits))

    return for_rows(~is_reached, widen, token), jnp.ones_like(is_reached)


def reach(
    scaled: jax.Array, logsumexp: jax.Array, limits: Limits, has_all: bool
) -> tuple[jax.Array, jax.Array]:
    """Count the candidates that stay, and tell where no token outside them would.

    scaled      [J, C] float32, best first
    logsumexp   [J]    float32, as in Candidates
    limits      of [J]
    returns     [J] int32, [J] bool
    """
    num = scaled.shape[1]
    weights = jnp.exp(scaled)
    mass = _running_sum(weights)
    has_k = (limits.top_k > 0) & (limits.top_k <= num)
    is_off = limits.top_k == 0
    # Sorted, so a last weight of zero says that every token outside weighs nothing.
    is_empty_after = (weights[:, -1] == 0) | has_all
    first_k = jnp.where(has_k, limits.top_k, num)
    of_k = jnp.take_along_axis(mass, first_k[:, None] - 1, axis=1)[:, 0]
    wanted = limits.top_p * jnp.where(has_k | is_empty_after, of_k, jnp.exp(logsumexp))

    has_p = limits.top_p < 1
    enough = mass >= wanted[:, None]
    first_p = jnp.where(has_p & jnp.any(enough, axis=1), jnp.argmax(enough, axis=1) + 1, num)
    # Weights fall, so those that min_p keeps come first and can be counted.
    first_min = jnp.sum(weights >= limits.min_p[:, None], axis=1, dtype=jnp.int32)
    count = jnp.minimum(jnp.minimum(first_k, first_p.astype(jnp.int32)), first_min)

    ends_by_p = has_p & is_off & jnp.any(enough, axis=1)
    ends_by_min = (first_min < num) & (is_off | ~has_p)
    return jnp.maximum(count, 1), has_k | is_empty_after | ends_by_p | ends_by_min


def _running_sum(weights: jax.Array) -> jax.Array:
    """Sum along the last axis in a fixed order of elementwise additions, alike for every J."""
    num, step = weights.shape[1], 1
    while step < num:
        weights = weights + jnp.pad(weights, ((0, 0), (step, 0)))[:, :num]
        step *= 2
    return weights
