"""Norms of rows in JAX's own operations; computed in float32."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Divide by the root mean square of the last axis and multiply by a factor.

    x        [..., E]  any floating dtype
    weight   [E]       float32
    returns  [..., E]  dtype of x
    """
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (scaled * weight.reshape((1,) * (x.ndim - 1) + weight.shape)).astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Subtract the mean of the last axis, divide by its deviation, multiply and add.

    x              [..., E]  any floating dtype
    weight, bias   [E]       float32
    returns        [..., E]  dtype of x
    """
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    last = (1,) * (x.ndim - 1) + weight.shape
    return (scaled * weight.reshape(last) + bias.reshape(last)).astype(x.dtype)
