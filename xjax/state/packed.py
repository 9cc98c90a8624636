"""Weight matrices as a file's own codes in records, and matrices made of several kinds of rows.

    PackedArray   [Out, In] in records of 16 outputs: xjax.kernels.linear.forms
    JoinedArray   rows of several arrays in turn: a fused matrix whose tensors are not of one form

For one device: records are not split over a mesh.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from xjax.kernels import linear as kernels
from xjax.kernels.linear.forms import Form


@struct.dataclass
class PackedArray:
    """A weight matrix as codes with their scales, 16 outputs side by side.

    data     [Nb, record]  uint8
    form     what the records hold
    shape    (Out, In)
    dtype    name of the numbers that it stands for to models
    """

    data: jax.Array
    form: Form = struct.field(pytree_node=False)
    shape: tuple[int, int] = struct.field(pytree_node=False)
    dtype: str = struct.field(pytree_node=False, default="float32")

    @property
    def nbytes(self) -> int:
        """Bytes of the records."""
        return self.data.nbytes


@struct.dataclass
class JoinedArray:
    """A weight matrix whose rows come from several, each in its own order.

    pieces   [rows, In] each, PackedArrays or arrays of numbers
    turns    (piece, number of its next rows), of one period; periods repeat until all rows are taken
    shape    (Out, In)
    """

    pieces: tuple[Any, ...]
    turns: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)
    shape: tuple[int, int] = struct.field(pytree_node=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.pieces))


def forms_in(tree: Any) -> set[Form]:
    """Forms of the packed weights in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, PackedArray))
    return {leaf.form for leaf in leaves if isinstance(leaf, PackedArray)}


def multiply(x: jax.Array, w: PackedArray | JoinedArray, *, backend: str = "xla") -> jax.Array:
    """Multiply rows by transposed weights.

    x        [N, In]    model dtype
    w        [Out, In]  PackedArray or JoinedArray
    returns  [N, Out]   dtype of x
    """
    if isinstance(w, PackedArray):
        return kernels.linear_packed(x, w.data, form=w.form, num_out=w.shape[0], backend=backend)
    outs = [
        multiply(x, piece, backend=backend)
        if isinstance(piece, PackedArray)
        else kernels.linear(x, piece, backend=backend)
        for piece in w.pieces
    ]
    return _take_turns(w, outs, axis=1)


def numbers(w: PackedArray | JoinedArray, dtype: jnp.dtype) -> jax.Array:
    """Return packed weights as numbers, those that the file's own types stand for.

    w        [Out, In]  PackedArray or JoinedArray
    returns  [Out, In]  of `dtype`
    """
    if isinstance(w, PackedArray):
        every = jnp.arange(w.shape[0], dtype=jnp.int32)
        return kernels.rows_packed(every, w.data, form=w.form, num_in=w.shape[1], dtype=dtype)
    rows = [
        numbers(piece, dtype) if isinstance(piece, PackedArray) else piece.astype(dtype) for piece in w.pieces
    ]
    return _take_turns(w, rows, axis=0)


def look_up(token_id: jax.Array, w: PackedArray, *, backend: str = "xla") -> jax.Array:
    """Take rows; ids beyond the last one take that.

    token_id   [N]        int32
    w          [V, E]     PackedArray
    returns    [N, E]     of the dtype that w stands for
    """
    ids = jnp.clip(token_id, 0, w.shape[0] - 1)
    return kernels.rows_packed(
        ids, w.data, form=w.form, num_in=w.shape[1], dtype=jnp.dtype(w.dtype), backend=backend
    )


def _take_turns(w: JoinedArray, parts: list[jax.Array], *, axis: int) -> jax.Array:
    """Put together what the pieces gave, along the axis of outputs."""
    if len(parts) == 1:
        return parts[0]
    period = sum(count for _, count in w.turns)
    num_periods = w.shape[0] // period

    def split(part: jax.Array) -> jax.Array:
        return part.reshape(*part.shape[:axis], num_periods, -1, *part.shape[axis + 1 :])

    periods = [split(part) for part in parts]
    strips = [
        jax.lax.slice_in_dim(periods[piece], first, first + count, axis=axis + 1)
        for piece, first, count in _strips(w.turns)
    ]
    joined = jnp.concatenate(strips, axis=axis + 1)
    return joined.reshape(*joined.shape[:axis], w.shape[0], *joined.shape[axis + 2 :])


def _strips(turns: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """Piece, first row within its part of a period, and number of rows of each turn."""
    taken: dict[int, int] = {}
    for piece, count in turns:
        first = taken.get(piece, 0)
        yield piece, first, count
        taken[piece] = first + count
