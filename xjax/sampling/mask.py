"""Grammar masks: one bit a token, set where the token is allowed. Knows no grammar."""

import jax
import jax.numpy as jnp

WORD = 32


def apply(logits: jax.Array, allowed: jax.Array) -> jax.Array:
    """Ban the tokens whose bit is not set.

    logits   [J, V]           float32
    allowed  [J, ceil(V/32)]  int32; bit i of word w allows token 32 * w + i
    returns  [J, V]           float32, banned tokens -inf

    NaN stays, so that a broken row is still seen. A row with every token banned is -inf
    throughout, which `sample.choose` flags.
    """
    bits = (allowed[:, :, None] >> jnp.arange(WORD, dtype=jnp.int32)[None, None]) & 1
    is_allowed = bits.reshape(allowed.shape[0], -1)[:, : logits.shape[1]] > 0
    return jnp.where(is_allowed | jnp.isnan(logits), logits, -jnp.inf)
