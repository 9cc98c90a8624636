"""Halves of a layer as chains of packed products: fewer, larger calls where the kernels have them."""

import jax

from xjax.kernels import chain
from xjax.kernels.linear import PACKED_BACKENDS
from xjax.state.packed import JoinedArray, PackedArray
from xjax.state.quantized import Weight


def first_of(weight: Weight, backend: str) -> chain.First | None:
    """Take a weight for the first product of a chain; None where there is no chain of it.

    weight   [Out, In]   packed, or of packed pieces
    """
    if backend not in PACKED_BACKENDS or not isinstance(weight, PackedArray | JoinedArray):
        return None
    pieces = (weight,) if isinstance(weight, PackedArray) else weight.pieces
    turns = ((0, weight.shape[0]),) if isinstance(weight, PackedArray) else weight.turns
    if not all(isinstance(piece, PackedArray) for piece in pieces):
        return None
    return chain.First(tuple(_packed(piece) for piece in pieces), turns)


def second_of(
    weight: Weight, bias: jax.Array | None, *, activation: str, is_gated: bool
) -> chain.Second | None:
    """Take a weight for the second product of a chain; None where there is no chain of it.

    weight   [Out, In]   packed
    bias     [In]        of the first product, twice as many where it is gated; or None
    """
    if not isinstance(weight, PackedArray):
        return None
    return chain.Second(bias, activation, is_gated, _packed(weight))


def norm_of(weight: jax.Array | None, bias: jax.Array | None) -> chain.Norm | None:
    """Take the weights of a norm, if there is one.

    weight, bias   [E]   float32, or None
    """
    return None if weight is None else chain.Norm(weight, bias)


def _packed(weight: PackedArray) -> chain.Packed:
    return chain.Packed(weight.data, weight.form, weight.shape[0])
