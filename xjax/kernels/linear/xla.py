"""Matrix products with weights as XLA's own dots; codes are dequantized inside the jit, block by block."""

import jax
import jax.numpy as jnp

_FEW_ROWS = 128  # up to here the weights go first; measured, docs/performance.md
_BLOCK_WEIGHTS = 1 << 20  # dequantized at a time: a block of float32 stays in a CPU's last cache
_SMALL_WEIGHTS = 1 << 16  # matrices up to this size are dequantized whole


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


def dequantize(
    codes: jax.Array,
    scales: jax.Array,
    minimum: jax.Array | None = None,
    zeros: jax.Array | None = None,
    *,
    dtype: jnp.dtype,
) -> jax.Array:
    """Turn codes into numbers, (codes - zeros) * scales + minimum in float32, then rounded to `dtype`.

    codes    [Out, In]      int8 or float8; or [Out, In / 2] uint8, two 4-bit codes a byte
    scales   [Out, In / g]  floating point
    minimum  [Out, In / g]  floating point, or None
    zeros    [Out, In / g]  int8, or None
    returns  [Out, In]
    """
    num_out, groups = scales.shape
    if codes.dtype == jnp.uint8:
        halves = jnp.stack([codes & jnp.uint8(15), codes >> jnp.uint8(4)], axis=-1)
        codes = halves.astype(jnp.int8).reshape(num_out, -1) - jnp.int8(8)
    values = codes.astype(jnp.float32).reshape(num_out, groups, -1)
    if zeros is not None:
        values = values - zeros.astype(jnp.float32)[:, :, None]
    values = values * scales.astype(jnp.float32)[:, :, None]
    if minimum is not None:
        values = values + minimum.astype(jnp.float32)[:, :, None]
    return values.reshape(num_out, -1).astype(dtype)


def rows_at_a_time(num_out: int, num_in: int) -> int:
    """How many outputs' weights are numbers at a time; all of a small matrix."""
    if num_out * num_in <= _SMALL_WEIGHTS:
        return num_out
    return min(max(_BLOCK_WEIGHTS // num_in, 1), -(-num_out // 2))


def linear_quantized(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    minimum: jax.Array | None = None,
    zeros: jax.Array | None = None,
) -> jax.Array:
    """Multiply rows by transposed weights w = (codes - zeros) * scales + minimum.

    x        [N, In]        model dtype
    codes    [Out, In]      int8 or float8; or [Out, In / 2] uint8, two 4-bit codes a byte
    scales   [Out, In / g]  floating point
    minimum  [Out, In / g]  floating point, or None
    zeros    [Out, In / g]  int8, or None
    returns  [N, Out]       dtype of x

    A loop over blocks of outputs, since the compiler would begin a step with the numbers of every
    matrix: they need nothing that the step computes.
    """
    parts, num_out = (codes, scales, minimum, zeros), codes.shape[0]
    rows = rows_at_a_time(num_out, x.shape[1])
    if rows == num_out:
        return linear(x, dequantize(*parts, dtype=x.dtype))

    def add_block(i: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(i * rows, num_out - rows)  # the last block begins early enough to be whole
        block = [None if part is None else jax.lax.dynamic_slice_in_dim(part, start, rows) for part in parts]
        found = linear(x, dequantize(*block, dtype=x.dtype))  # pyright: ignore[reportArgumentType]
        return jax.lax.dynamic_update_slice_in_dim(out, found, start, axis=1)

    return jax.lax.fori_loop(0, -(-num_out // rows), add_block, jnp.zeros((x.shape[0], num_out), x.dtype))
