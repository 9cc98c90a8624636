"""Each row's first tokens and its mass in XLA operations, one row after the other."""

import jax
import jax.numpy as jnp

from xjax.kernels.candidates.rows import (
    WIDTH,
    blocks,
    first_best,
    for_rows,
    scale,
    take_row,
    top,
    total,
    without_nan,
)


def pick(logits: jax.Array, temperature: jax.Array, num: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pick each row's first tokens, and take the mass of all; only rows with a temperature pay for that.

    logits       [J, V] float32
    temperature  [J]    float32, 0 for greedy
    returns      values [J, num] float32, ids [J, num] int32, logsumexp [J] float32
    """
    best, best_id = first_best(without_nan(logits))

    def pick_row(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values, ids, logsumexp = carry
        row = take_row(logits, j)
        row_values, row_ids = top(row, num)
        weights = jnp.exp(scale(row, best[j], temperature[j]))
        mass = total(blocks(weights, WIDTH, 0.0))
        return values.at[j].set(row_values), ids.at[j].set(row_ids), logsumexp.at[j].set(jnp.log(mass))

    rest = (logits.shape[0], num - 1)
    values = jnp.concatenate([best[:, None], jnp.full(rest, -jnp.inf, jnp.float32)], axis=1)
    ids = jnp.concatenate([best_id[:, None], jnp.zeros(rest, jnp.int32)], axis=1)
    values, ids, logsumexp = for_rows(temperature > 0, pick_row, (values, ids, jnp.zeros_like(best)))
    return values, ids, logsumexp
