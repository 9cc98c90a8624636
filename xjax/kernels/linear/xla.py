"""Matrix products with weights as XLA's own dots; codes are dequantized inside the jit, block by block."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

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
    code_type: str,
    dtype: jnp.dtype,
) -> jax.Array:
    """Turn codes into numbers, (codes - zeros) * scales + minimum in float32, then rounded to `dtype`.

    codes    [Out, In]      of `code_type`; "int4": [Out, In / 2]
    scales   [Out, In / g]  floating point
    minimum  [Out, In / g]  floating point, or None
    zeros    [Out, In / g]  int8, or None
    returns  [Out, In]
    """
    if code_type == "int4":
        values = jnp.stack(_halves(codes), axis=-1).reshape(len(codes), -1)
    else:
        values = _values(codes, code_type)
    return _scaled(values, scales, minimum, zeros).astype(dtype)


def _halves(codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes of even and of odd inputs: [Out, In / 2] uint8 -> two int8 of that shape."""
    low, high = codes & jnp.uint8(15), codes >> jnp.uint8(4)
    return low.astype(jnp.int8) - jnp.int8(8), high.astype(jnp.int8) - jnp.int8(8)


def _values(codes: jax.Array, code_type: str) -> jax.Array:
    """What codes of a byte stand for before they are scaled: [Out, In] -> float32."""
    if code_type == "int8":
        return codes.astype(jnp.float32)
    # Bytes and a table: the compiler's own arrays of 8-bit floats are ten times slower on a CPU.
    table = np.arange(256, dtype=np.uint8).view(jnp.dtype(code_type)).astype(np.float32)
    return jnp.take(jnp.asarray(table), codes.astype(jnp.int32), mode="clip")


def _scaled(
    values: jax.Array, scales: jax.Array, minimum: jax.Array | None, zeros: jax.Array | None
) -> jax.Array:
    """The numbers, float32, of values [Out, columns] that run through all groups."""
    groups = values.astype(jnp.float32).reshape(*scales.shape, -1)
    if zeros is not None:
        groups = groups - zeros.astype(jnp.float32)[:, :, None]
    groups = groups * scales.astype(jnp.float32)[:, :, None]
    if minimum is not None:
        groups = groups + minimum.astype(jnp.float32)[:, :, None]
    return groups.reshape(values.shape)


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
    *,
    code_type: str,
) -> jax.Array:
    """Multiply rows by transposed weights w = (codes - zeros) * scales + minimum.

    x        [N, In]        model dtype
    codes    [Out, In]      of `code_type`; "int4": [Out, In / 2]
    scales   [Out, In / g]  floating point
    minimum  [Out, In / g]  floating point, or None
    zeros    [Out, In / g]  int8, or None
    returns  [N, Out]       dtype of x

    A loop over blocks of outputs, since the compiler would begin a step with the numbers of every
    matrix: they need nothing that the step computes.
    """
    parts, num_out, num_in = (codes, scales, minimum, zeros), codes.shape[0], x.shape[1]
    multiply = functools.partial(_product_of_codes, (x,), code_type=code_type)
    if code_type == "int4" and num_in // scales.shape[1] % 2 == 0:
        # Two products cost less than laying the codes of even and of odd inputs side by side.
        multiply = functools.partial(_product_of_codes, (x[:, ::2], x[:, 1::2]), code_type=code_type)
    rows = rows_at_a_time(num_out, num_in)
    if rows == num_out:
        return multiply(*parts)

    def add_block(i: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(i * rows, num_out - rows)  # the last block begins early enough to be whole
        block = jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, start, rows), parts)
        return jax.lax.dynamic_update_slice_in_dim(out, multiply(*block), start, axis=1)

    return jax.lax.fori_loop(0, -(-num_out // rows), add_block, jnp.zeros((x.shape[0], num_out), x.dtype))


def _product_of_codes(
    inputs: tuple[jax.Array, ...],
    codes: jax.Array,
    scales: jax.Array,
    minimum: jax.Array | None,
    zeros: jax.Array | None,
    *,
    code_type: str,
) -> jax.Array:
    """The product of all rows with some outputs; `inputs` is x, or its even and its odd columns."""
    dtype = inputs[0].dtype
    if len(inputs) == 1:
        return linear(inputs[0], dequantize(codes, scales, minimum, zeros, code_type=code_type, dtype=dtype))
    halves = (_scaled(half, scales, minimum, zeros).astype(dtype) for half in _halves(codes))
    even, odd = (product(x, w) for x, w in zip(inputs, halves, strict=True))
    return (even + odd).astype(dtype)
