"""Penalties and bias from sparse (row, token id) pairs; nothing of size J * V but the scatter.

Knows the pairs and the last token on the device; where counts come from is the host's matter.
"""

import jax
import jax.numpy as jnp

from xjax.state.batch import Sampled


def apply(logits: jax.Array, sampled: Sampled, last_token: jax.Array) -> jax.Array:
    """Penalize the counted tokens of each row, then add the bias.

    logits      [J, V] float32
    last_token  [R+1]  int32; the last token of a pending row is counted once more
    returns     [J, V] float32

    Repetition divides positive logits and multiplies negative ones; frequency is subtracted
    for each count, presence once for a count above 0. A (row, id) occurs at most once among
    the pairs with a count of 0 or more; pairs with count -1 only add their bias.
    """
    num_rows = logits.shape[0]
    rows, ids, counts = _counted(sampled, last_token, num_rows)
    safe = jnp.minimum(rows, num_rows - 1)
    value = logits[safe, ids]
    repetition = sampled.repetition_penalty[safe]
    value = jnp.where(value > 0, value / repetition, value * repetition)
    value -= sampled.frequency_penalty[safe] * counts.astype(jnp.float32)
    value -= jnp.where(counts > 0, sampled.presence_penalty[safe], 0.0)
    # Row J is outside: pairs that are padding or not counted are dropped by the scatters.
    logits = logits.at[rows, ids].set(value, mode="drop")
    return logits.at[sampled.pair_row, sampled.pair_id].add(sampled.pair_bias, mode="drop")


def _counted(
    sampled: Sampled, last_token: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows, ids and counts of all counted tokens, [Z + J] each; row J for none."""
    pending_id = jnp.where(sampled.pending > 0, last_token[sampled.slot], -1)
    row = jnp.minimum(sampled.pair_row, num_rows - 1)
    is_counted = (sampled.pair_row < num_rows) & (sampled.pair_count >= 0)
    is_pending = is_counted & (sampled.pair_id == pending_id[row])
    has_pair = jnp.zeros(num_rows, bool).at[row].max(is_pending)
    own = jnp.arange(num_rows, dtype=jnp.int32)
    rows = jnp.concatenate(
        [jnp.where(is_counted, row, num_rows), jnp.where((pending_id >= 0) & ~has_pair, own, num_rows)]
    )
    ids = jnp.concatenate([sampled.pair_id, jnp.maximum(pending_id, 0)])
    counts = jnp.concatenate([sampled.pair_count + is_pending.astype(jnp.int32), jnp.ones_like(own)])
    return rows, ids, counts
