"""What a chain of products is made of: arrays with what a backend must know of them."""

from dataclasses import dataclass
from typing import NamedTuple

import jax

from xjax.kernels.linear.forms import Form


class Packed(NamedTuple):
    """A packed matrix.

    data      [Nb, record]  uint8
    form      what the records hold
    num_out   how many outputs there are
    """

    data: jax.Array
    form: Form
    num_out: int


@dataclass(frozen=True)
class First:
    """Matrices that multiply the same rows.

    pieces   their inputs are the same
    turns    (piece, number of its next outputs), of one period; periods repeat until all are taken
    """

    pieces: tuple[Packed, ...]
    turns: tuple[tuple[int, int], ...]

    @property
    def num_out(self) -> int:
        """Outputs of all pieces."""
        return sum(piece.num_out for piece in self.pieces)


@dataclass(frozen=True)
class Norm:
    """A norm of rows: RMS, or layer norm where there is a bias.

    weight, bias   [E]   float32
    """

    weight: jax.Array
    bias: jax.Array | None = None


@dataclass(frozen=True)
class Second:
    """What follows on a first product: a bias, an activation, and a product with its result.

    bias         [Out]    of the first product, or None
    activation   one of kernels.activation.ACTIVATIONS
    is_gated     the activation is one of the first half of the outputs, and multiplies the other half
    weight       the matrix
    """

    bias: jax.Array | None
    activation: str
    is_gated: bool
    weight: Packed


@dataclass(frozen=True)
class Finish:
    """What is done to the last product.

    residual    [N, Out]   model dtype, added last
    bias        [Out]      or None
    post_norm   [Out]      float32, of an RMS norm, or None
    scale       what is multiplied before the residual is added
    """

    residual: jax.Array
    bias: jax.Array | None = None
    post_norm: jax.Array | None = None
    scale: float = 1.0
