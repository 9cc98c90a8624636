"""Matrix products with weights: the contracts that every backend fulfils.

    linear(x, w)                                         weights as floating-point numbers
    linear_quantized(x, codes, scales, minimum, zeros)   weights as codes

    x        [N, In]        model dtype
    w        [Out, In]      floating point
    codes    [Out, In]      of a code type:
                              int8                         int8
                              float8_e4m3fn, float8_e5m2   uint8, the bytes of 8-bit floats
                              int4                         [Out, In / 2] uint8: two codes a byte, the
                                                           earlier one low, each with 8 added to it
    scales   [Out, In / g]  float; one for each run of g inputs, g = In for one a channel
    minimum  [Out, In / g]  float, added after scaling, or None
    zeros    [Out, In / g]  int8, subtracted before scaling, or None
    returns  [N, Out]       dtype of x, accumulated in float32

(codes - zeros) * scales is one product of two numbers that float32 holds exactly, rounded once.
Weights lie [Out, In]: a row of results is a run of memory, which one-row products read at the
memory's rate. The array type that hides the difference from models is `state.quantized`.
"""

from collections.abc import Callable

import jax

from xjax.kernels.linear import xla

# The others have no forms of their own yet.
_NAMES = ("xla", "accelerator", "numba")
_LINEAR: dict[str, Callable[..., jax.Array]] = dict.fromkeys(_NAMES, xla.linear)
_QUANTIZED: dict[str, Callable[..., jax.Array]] = dict.fromkeys(_NAMES, xla.linear_quantized)


def linear(x: jax.Array, w: jax.Array, *, backend: str = "xla") -> jax.Array:
    """Multiply rows by the transposed weights.

    x        [N, In]    model dtype
    w        [Out, In]  floating point
    returns  [N, Out]   dtype of x
    """
    return _LINEAR[backend](x, w)


def linear_quantized(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    minimum: jax.Array | None = None,
    zeros: jax.Array | None = None,
    *,
    code_type: str = "int8",
    backend: str = "xla",
) -> jax.Array:
    """Multiply rows by transposed weights w = (codes - zeros) * scales + minimum.

    x        [N, In]        model dtype
    codes    [Out, In]      of `code_type`; "int4": [Out, In / 2]
    scales   [Out, In / g]  floating point
    minimum  [Out, In / g]  floating point, or None
    zeros    [Out, In / g]  int8, or None
    returns  [N, Out]       dtype of x
    """
    return _QUANTIZED[backend](x, codes, scales, minimum, zeros, code_type=code_type)
