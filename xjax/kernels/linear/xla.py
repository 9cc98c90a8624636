"""Matrix products with weights as XLA's own dots; codes are dequantized inside the jit."""

import jax
import jax.numpy as jnp

_FEW_ROWS = 128  # up to here the weights go first; measured, docs/performance.md


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply rows by the transposed weights.

    x        [N, In]
    w        [Out, In]
    returns  [N, Out]  float32

    On a CPU a few rows cost 1.6 times less with the weights as the left operand. The barrier keeps
    the compiler from turning that product around again.
    """
    both_last = (((1,), (1,)), ((), ()))
    if 1 < x.shape[0] <= _FEW_ROWS:
        turned = jax.lax.dot_general(w, x, both_last, preferred_element_type=jnp.float32)
        return jax.lax.optimization_barrier(turned).T
    return jax.lax.dot_general(x, w, both_last, preferred_element_type=jnp.float32)


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply rows by the transposed weights, accumulating in float32.

    x        [N, In]    model dtype
    w        [Out, In]  floating point
    returns  [N, Out]   dtype of x
    """
    return product(x, w).astype(x.dtype)


def dequantize(codes: jax.Array, scales: jax.Array, minimum: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Turn codes into numbers, codes * scales + minimum in float32, then rounded to `dtype`.

    codes    [Out, In]      int8
    scales   [Out, In / g]  floating point
    minimum  [Out, In / g]  floating point, or None
    returns  [Out, In]
    """
    num_out, num_in = codes.shape
    groups = codes.reshape(num_out, scales.shape[1], -1).astype(jnp.float32)
    values = groups * scales.astype(jnp.float32)[:, :, None]
    if minimum is not None:
        values = values + minimum.astype(jnp.float32)[:, :, None]
    return values.reshape(num_out, num_in).astype(dtype)


def linear_quantized(
    x: jax.Array, codes: jax.Array, scales: jax.Array, minimum: jax.Array | None
) -> jax.Array:
    """Multiply rows by transposed weights w = codes * scales + minimum.

    x        [N, In]        model dtype
    codes    [Out, In]      int8
    scales   [Out, In / g]  floating point
    minimum  [Out, In / g]  floating point, or None
    returns  [N, Out]       dtype of x
    """
    return linear(x, dequantize(codes, scales, minimum, x.dtype))
