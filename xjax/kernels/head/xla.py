"""From hidden states to logits as one dot."""

import jax
import jax.numpy as jnp


def logits(h: jax.Array, w: jax.Array, soft_cap: float | None) -> jax.Array:
    """Score every word for each position.

    h        [J, E]  model dtype
    w        [V, E]  floating point
    returns  [J, V]  float32
    """
    scores = jax.lax.dot_general(h, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
