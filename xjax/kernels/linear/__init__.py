"""Matrix products with weights: the contracts that every backend fulfils.

    linear(x, w)                                         weights as floating-point numbers
    linear_quantized(x, codes, scales, minimum, zeros)   weights as codes
    linear_packed(x, data, form, num_out)                weights as records, activations as int8 codes
    rows_packed(token_id, data, form, num_in, dtype)     some of those weights, as numbers

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
    data     [Nb, record]   uint8, blocks of 16 outputs as `forms` lays them out
    returns  [N, Out]       dtype of x, accumulated in float32

(codes - zeros) * scales is one product of two numbers that float32 holds exactly, rounded once.
Weights lie [Out, In]: a row of results is a run of memory, which one-row products read at the
memory's rate.

Packed weights are multiplied by x rounded to int8, 32 inputs to a scale: s = max|x| / 127, q = round(x / s),
t = sum of q. For each group of inputs in rising order, in float32,

    sum = fma(float(dot(q, codes) - offset * t), scale * s, sum), then with a minimum
    sum = fma(minimum, s * t, sum)

Dots are exact, so there is one result, to the bit, at any number of rows and on any processor (`numba`),
or up to the rounding of a product before it is added (the others). The array types that hide the
difference from models are in `state.quantized`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from xjax.kernels.linear import packed, xla
from xjax.kernels.linear.forms import Form


def _numba_linear(*arguments: Any) -> jax.Array:
    from xjax.kernels.linear import numba

    return numba.linear_packed(*arguments)


def _numba_rows(*arguments: Any) -> jax.Array:
    from xjax.kernels.linear import lookup

    return lookup.rows_packed(*arguments)


# Backends that packed weights are for: with others they are loaded as numbers.
PACKED_BACKENDS = frozenset({"numba"})

# The others have no forms of their own yet.
_NAMES = ("xla", "accelerator", "numba")
_LINEAR: dict[str, Callable[..., jax.Array]] = dict.fromkeys(_NAMES, xla.linear)
_QUANTIZED: dict[str, Callable[..., jax.Array]] = dict.fromkeys(_NAMES, xla.linear_quantized)
_PACKED = {"xla": packed.linear_packed, "accelerator": packed.linear_packed, "numba": _numba_linear}
_ROWS = {"xla": packed.rows_packed, "accelerator": packed.rows_packed, "numba": _numba_rows}


def prepare(backend: str, forms: Iterable[Form]) -> None:
    """Make known to XLA what a backend's programs call for packed weights; before one is loaded."""
    if backend == "numba":
        from xjax.kernels.linear import lookup

        for form in forms:
            lookup.register(form)


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


def linear_packed(
    x: jax.Array, data: jax.Array, *, form: Form, num_out: int, backend: str = "xla"
) -> jax.Array:
    """Multiply rows, as int8 codes, by transposed packed weights.

    x        [N, In]       model dtype
    data     [Nb, record]  uint8
    returns  [N, Out]      dtype of x

    A row with a number that is not finite becomes NaN; no other does. Has no gradient.
    """
    if data.shape != form.shape(num_out, x.shape[1]):
        raise ValueError(f"{form.name}: records {data.shape} are not {form.shape(num_out, x.shape[1])}")
    return _PACKED[backend](x, data, form, num_out)


def rows_packed(
    token_id: jax.Array,
    data: jax.Array,
    *,
    form: Form,
    num_in: int,
    dtype: jnp.dtype,
    backend: str = "xla",
) -> jax.Array:
    """Look up rows of packed weights, as an embedding does.

    token_id  [N]           int32; one that no row has is taken for the nearest that has
    data      [Nb, record]  uint8
    returns   [N, In]       `dtype`, rounded from the exact float32
    """
    return _ROWS[backend](token_id, data, form, num_in, dtype)
