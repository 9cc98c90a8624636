"""Weights that may be codes: one array type and the one matrix product that models call.

A model says `matmul(x, w)` and does not know whether `w` is an array or codes with scales. What a
kernel does with codes is the business of `kernels/linear`.
"""

import jax
import jax.numpy as jnp
from flax import struct

from xjax.kernels import linear as kernels
from xjax.kernels.linear.xla import dequantize

GROUP_BY_KIND = {"int8": None, "int8_32": 32}


@struct.dataclass
class QuantizedArray:
    """A weight matrix as integer codes, w = codes * scales + minimum.

    codes    [Out, In]      int8
    scales   [Out, In / g]  float32, g inputs share one
    minimum  [Out, In / g]  float32, or None
    kind     "int8": one scale for each output; "int8_32": one for each run of 32 inputs
    shape    (Out, In)
    """

    codes: jax.Array
    scales: jax.Array
    minimum: jax.Array | None
    kind: str = struct.field(pytree_node=False)
    shape: tuple[int, int] = struct.field(pytree_node=False)


Weight = jax.Array | QuantizedArray


def quantize(w: jax.Array, kind: str = "int8_32", *, symmetric: bool = True) -> QuantizedArray:
    """Round a weight matrix to 8-bit codes.

    w   [Out, In] floating point; In a multiple of the kind's group

    Symmetric codes run from -127 to 127 around zero; else a minimum is kept and they use all 256
    values. A group of equal numbers comes back exactly up to the rounding of its scale.
    """
    num_out, num_in = w.shape
    group = GROUP_BY_KIND[kind] or num_in
    values = w.astype(jnp.float32).reshape(num_out, num_in // group, group)
    if symmetric:
        scales, minimum = jnp.abs(values).max(-1) / 127.0, None
        shifted = values
    else:
        low, high = values.min(-1), values.max(-1)
        scales = (high - low) / 255.0
        minimum = low + 128.0 * scales
        shifted = values - minimum[..., None]
    divisor = jnp.where(scales > 0, scales, 1.0)[..., None]
    codes = jnp.clip(jnp.round(shifted / divisor), -128, 127).astype(jnp.int8)
    return QuantizedArray(codes.reshape(num_out, num_in), scales, minimum, kind, (num_out, num_in))


def to_float(w: Weight, dtype: jnp.dtype) -> jax.Array:
    """Return a weight as numbers.

    w        [Out, In]  array or QuantizedArray
    returns  [Out, In]  of `dtype`
    """
    if isinstance(w, QuantizedArray):
        return dequantize(w.codes, w.scales, w.minimum, dtype)
    return w.astype(dtype)


def matmul(x: jax.Array, w: Weight, *, backend: str = "xla") -> jax.Array:
    """Multiply rows by transposed weights, whatever the weights are kept as.

    x        [N, In]    model dtype
    w        [Out, In]  array or QuantizedArray
    returns  [N, Out]   dtype of x, accumulated in float32
    """
    if isinstance(w, QuantizedArray):
        return kernels.linear_quantized(x, w.codes, w.scales, w.minimum, backend=backend)
    return kernels.linear(x, w, backend=backend)
