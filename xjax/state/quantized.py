"""Weights that may be codes: one array type and the one matrix product that models call.

A model says `matmul(x, w)` and does not know whether `w` is an array or codes with scales, here or
packed as in packed.py. What a kernel does with codes is the business of `kernels/linear`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xjax.kernels import linear as kernels
from xjax.kernels.linear.xla import dequantize, rows_at_a_time
from xjax.state.mesh import TENSOR_AXIS, whole
from xjax.state.packed import JoinedArray, PackedArray, multiply, numbers

CODE_TYPES = ("int8", "int4", "float8_e4m3fn", "float8_e5m2")
GROUP_BY_KIND = {"int8": None, "int8_32": 32}


@struct.dataclass
class QuantizedArray:
    """A weight matrix as codes, w[:, order] = (codes - zeros) * scales + minimum.

    codes    [Out, In]      int8, or the bytes of 8-bit floats as uint8; of 4 bits [Out, In / 2] uint8,
                            two a byte, the earlier one low, each with 8 added to it
    scales   [Out, In / g]  float32, g inputs share one
    minimum  [Out, In / g]  float32, or None
    zeros    [Out, In / g]  int8, or None
    order    [In]           int32, the input that each column of codes belongs to; None: its own
    kind     what a code is, "int8", "int4", "float8_e4m3fn" or "float8_e5m2", and g, as in
             "int4_128"; no g: one scale for each output
    shape    (Out, In)
    """

    codes: jax.Array
    scales: jax.Array
    minimum: jax.Array | None = None
    zeros: jax.Array | None = None
    order: jax.Array | None = None
    kind: str = struct.field(pytree_node=False, default="int8")
    shape: tuple[int, int] = struct.field(pytree_node=False, default=(0, 0))

    @property
    def code_type(self) -> str:
        """What a code is."""
        return next(name for name in CODE_TYPES if self.kind.startswith(name))

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in jax.tree.leaves(self))


Codes = QuantizedArray | PackedArray | JoinedArray
Weight = jax.Array | Codes


def is_quantized(leaf: object) -> bool:
    """Tell jax.tree functions to take codes with their scales as one leaf."""
    return isinstance(leaf, Codes)


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
    return QuantizedArray(codes.reshape(num_out, num_in), scales, minimum, kind=kind, shape=(num_out, num_in))


def to_float(w: Weight, dtype: jnp.dtype) -> jax.Array:
    """Return a weight as numbers.

    w        [Out, In]  array or codes
    returns  [Out, In]  of `dtype`, columns by input
    """
    if isinstance(w, PackedArray | JoinedArray):
        return numbers(w, dtype)
    if not isinstance(w, QuantizedArray):
        return w.astype(dtype)
    values = dequantize(w.codes, w.scales, w.minimum, w.zeros, code_type=w.code_type, dtype=dtype)
    return values if w.order is None else jnp.zeros_like(values).at[:, w.order].set(values)


def matmul(
    x: jax.Array, w: Weight, *, backend: str = "xla", mesh: Mesh | None = None, split: int = 0
) -> jax.Array:
    """Multiply rows by transposed weights, whatever the weights are kept as.

    x        [N, In]    model dtype
    w        [Out, In]  array or codes
    mesh     devices that share it, or None
    split    its dimension that is split over the mesh. 0: so is the result; 1: sums are added up
    returns  [N, Out]   dtype of x, accumulated in float32
    """
    if isinstance(w, PackedArray | JoinedArray):
        assert mesh is None, "packed weights are for one device"
        return multiply(x, w, backend=backend)
    if not isinstance(w, QuantizedArray):
        out = kernels.linear(x, w, backend=backend)
        return whole(out, mesh) if split == 1 else out
    if mesh is not None:
        return _matmul_on(mesh, x, w, split, backend)
    if w.order is not None:
        x = jnp.take(x, w.order, axis=1, mode="clip")
    return kernels.linear_quantized(
        x, w.codes, w.scales, w.minimum, w.zeros, code_type=w.code_type, backend=backend
    )


def _matmul_on(mesh: Mesh, x: jax.Array, w: QuantizedArray, split: int, backend: str) -> jax.Array:
    """The same where each device multiplies the codes that it holds: a loop over blocks cannot be divided."""
    product = partial(matmul, backend=backend)
    if w.shape[split] % mesh.size:
        return product(x, w)
    axes = (TENSOR_AXIS, None) if split == 0 else (None, TENSOR_AXIS)
    placed = spread(w, NamedSharding(mesh, PartitionSpec(*axes)))
    if TENSOR_AXIS not in placed.codes.spec:  # pyright: ignore[reportAttributeAccessIssue]
        return product(whole(x, mesh), w)
    specs = jax.tree.map(lambda sharding: sharding.spec, placed)

    def run(x: jax.Array, w: QuantizedArray) -> jax.Array:
        out = product(x, w)
        return out if split == 0 else jax.lax.psum(out, TENSOR_AXIS)

    x_axes, out_axes = ((), (None, TENSOR_AXIS)) if split == 0 else ((None, TENSOR_AXIS), ())
    in_specs = (PartitionSpec(*x_axes), specs)
    return jax.shard_map(
        run, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec(*out_axes), check_vma=False
    )(x, w)


def working_bytes(arrays: Sequence[Weight]) -> int:
    """Bytes of numbers that a step's products hold at once: of small matrices all, of others a block.

    Of packed ones none: their kernels take codes as they are.
    """
    whole, block = 0, 0
    for array in arrays:
        if not isinstance(array, QuantizedArray):
            continue
        num_out, num_in = array.shape
        rows = rows_at_a_time(num_out, num_in)
        if rows == num_out:
            whole += 4 * num_out * num_in
        else:
            block = max(block, 4 * rows * num_in)
    return 2 * (whole + block)  # in the model dtype, and as what the compiler multiplies


def spread(array: Any, sharding: Any) -> Any:
    """Say where each part of an array lies when the whole has a sharding.

    array      QuantizedArray, PackedArray or JoinedArray; its parts may be of numpy or abstract
    sharding   of [Out, In], or what `jax.device_put` takes for anything; packed weights are never split

    Outputs are split as they are for an array of numbers. Inputs are split only where every device
    gets whole groups, or all have one, and the inputs are in their own order.
    """
    if not isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda _: sharding, array)
    if not isinstance(array, QuantizedArray):
        return jax.tree.map(lambda _: NamedSharding(sharding.mesh, PartitionSpec()), array)
    out_axis, in_axis = (*sharding.spec, None, None)[:2]
    groups, width = array.scales.shape[1], array.codes.shape[1]
    size = 1 if in_axis is None else sharding.mesh.shape[in_axis]
    if array.order is not None or width % size or (groups > 1 and groups % size):
        in_axis = None
    by_group = in_axis if groups > 1 else None

    def placed(*axes: Any) -> NamedSharding:
        return NamedSharding(sharding.mesh, PartitionSpec(*axes))

    scales = placed(out_axis, by_group)
    return array.replace(  # pyright: ignore[reportAttributeAccessIssue]
        codes=placed(out_axis, in_axis),
        scales=scales,
        minimum=None if array.minimum is None else scales,
        zeros=None if array.zeros is None else scales,
        order=None if array.order is None else placed(),
    )
