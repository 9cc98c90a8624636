"""Activation functions of feed-forward networks, by name; computed in float32."""

import jax
import jax.numpy as jnp

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def activate(x: jax.Array, kind: str) -> jax.Array:
    """Apply one of ACTIVATIONS.

    x        [..., F]  any floating dtype
    returns  [..., F]  dtype of x
    """
    wide = x.astype(jnp.float32)
    if kind == "silu":
        return jax.nn.silu(wide).astype(x.dtype)
    return jax.nn.gelu(wide, approximate=kind == "gelu_tanh").astype(x.dtype)


def gate(x: jax.Array, kind: str) -> jax.Array:
    """Activate the gates and multiply the rest by them.

    x        [N, 2 * F]  gates, then the rest
    returns  [N, F]      dtype of x
    """
    half = x.shape[1] // 2
    return activate(x[:, :half], kind) * x[:, half:]
