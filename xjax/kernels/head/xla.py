"""From hidden states to logits as one dot."""

import jax
import jax.numpy as jnp

from xjax.kernels.linear.xla import product


def logits(h: jax.Array, w: jax.Array, soft_cap: float | None) -> jax.Array:
    """Score every word for each position.

    h        [J, E]  model dtype
    w        [V, E]  floating point
    returns  [J, V]  float32
    """
    scores = product(h, w)
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
