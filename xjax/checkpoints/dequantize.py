"""Turn the bytes of a quantized tensor into float32, one block type a function.

A decoder gets whole blocks as rows of bytes and writes float32 into the array it is given,
with the same operations in the same order as the format's reference, so that results are
equal to the bit. The types that look values up in a table are in codebooks.py.
This module knows no files and no tensor names.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xjax.checkpoints import codebooks
from xjax.errors import LoadError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Decoder = Callable[[Bytes, Floats], None]

# Output elements decoded at a time: a slab and its temporaries stay in the second-level cache.
SLAB = 1 << 16


@dataclass(frozen=True)
class BlockType:
    """One storage type: `block_size` elements take `num_bytes` bytes; None: cannot be decoded."""

    name: str
    block_size: int
    num_bytes: int
    decode: Decoder | None


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor; LoadError when its rows are not whole blocks."""
    block = BLOCK_TYPES[dtype]
    row = shape[-1] if shape else 1
    if row % block.block_size:
        raise LoadError(
            f"rows of {row} elements cannot be stored as {dtype}, in blocks of {block.block_size}"
        )
    return math.prod(shape) // block.block_size * block.num_bytes


def dequantize(data: Bytes, dtype: str, shape: tuple[int, ...]) -> Floats:
    """Decode a whole tensor.

    data     [bytes]   uint8, contiguous, as many as `num_bytes` says
    returns  [*shape]  float32; a read-only view of `data` when that is float32 already
    """
    if dtype == "float32" and data.ctypes.data % 4 == 0:
        return data.view("<f4").reshape(shape)
    out = np.empty(shape, np.float32)
    dequantize_into(data, dtype, out)
    return out


def dequantize_into(data: Bytes, dtype: str, out: npt.NDArray[Any]) -> None:
    """Decode a whole tensor into an array that is there, slab by slab, with no copy of the whole.

    data  [bytes]   uint8, contiguous, as many as `num_bytes` says
    out   [*shape]  written; C-contiguous, float32 or what float32 can be cast to
    """
    block = BLOCK_TYPES[dtype]
    if block.decode is None:
        raise LoadError(f"tensors of type {dtype} cannot be read; convert the model to another type")
    assert out.flags.c_contiguous and out.size * block.num_bytes == len(data) * block.block_size
    if out.dtype.name == dtype:  # bfloat16 too, which numpy has from elsewhere
        np.copyto(out.reshape(-1).view(np.uint8), data)
        return
    if dtype in _NUMPY_NAMES:
        with np.errstate(all="ignore"):
            np.copyto(out.reshape(-1), data.view(_NUMPY_NAMES[dtype]), casting="unsafe")
        return
    blocks, targets = data.reshape(-1, block.num_bytes), out.reshape(-1, block.block_size)
    rows = max(1, SLAB // block.block_size)
    slab = (
        None if out.dtype == np.float32 else np.empty((min(rows, len(blocks)), block.block_size), np.float32)
    )
    with np.errstate(all="ignore"):  # a file may hold any bits; NaN and infinity pass through
        for start in range(0, len(blocks), rows):
            source, target = blocks[start : start + rows], targets[start : start + rows]
            if slab is None:
                block.decode(source, target)
            else:
                block.decode(source, slab[: len(source)])
                target[...] = slab[: len(source)]


def _half(blocks: Bytes, start: int) -> Floats:
    """Return the float16 at byte `start` of each block as [blocks, 1] float32."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


_NUMPY_NAMES = {
    "float32": "<f4", "float64": "<f8", "int8": "<i1", "int16": "<i2", "int32": "<i4",
    "int64": "<i8", "uint8": "<u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8", "bool": "?",
}  # fmt: skip


def _plain(dtype: str) -> Decoder:
    def decode(blocks: Bytes, out: Floats) -> None:
        np.copyto(out, blocks.view(dtype), casting="unsafe")

    return decode


def _float16(blocks: Bytes, out: Floats) -> None:
    """Widen by integer operations: numpy's own conversion takes three times as long."""
    bits = out.view(np.int32)
    np.copyto(bits, blocks.view("<i2"))  # the sign goes up to bit 31
    bits <<= 13
    bits &= np.int32(~0x7000_1FFF)
    out *= np.float32(2.0**112)  # the exponent counts from 15 there, from 127 here
    if out.max() >= 65536 or out.min() <= -65536:  # infinity and NaN, which have no exponent
        np.copyto(out, blocks.view("<f2"))


def _bfloat16(blocks: Bytes, out: Floats) -> None:
    bits = out.view(np.uint32)
    np.copyto(bits, blocks.view("<u2"))
    bits <<= 16


def nibbles(packed: Bytes, group: int) -> Bytes:
    """Split bytes into the low then the high halves of each `group` of them: [blocks, 2 * bytes]."""
    packed = packed.reshape(len(packed), -1, group)
    out = np.empty((len(packed), packed.shape[1], 2, group), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, :, 0])
    np.right_shift(packed, 4, out=out[:, :, 1])
    return out.reshape(len(packed), -1)


def pairs(packed: Bytes, group: int) -> Bytes:
    """Split bytes into their four two-bit parts, group by group: [blocks, 4 * bytes]."""
    packed = packed.reshape(len(packed), -1, group)
    out = np.empty((len(packed), packed.shape[1], 4, group), np.uint8)
    for part in range(4):
        np.right_shift(packed, 2 * part, out=out[:, :, part])
    out &= 3
    return out.reshape(len(packed), -1)


def bit_planes(packed: Bytes) -> Bytes:
    """Bit i of every byte becomes row i: [blocks, 8, bytes], each 0 or 1."""
    out = np.empty((len(packed), 8, packed.shape[1]), np.uint8)
    for bit in range(8):
        np.right_shift(packed, bit, out=out[:, bit])
    out &= 1
    return out


def _q4_0(blocks: Bytes, out: Floats) -> None:
    codes = nibbles(blocks[:, 2:], 16).view(np.int8)
    codes -= 8
    np.copyto(out, codes)
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    np.copyto(out, nibbles(blocks[:, 4:], 16))
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def with_fifth_bit(high: Bytes, codes: Bytes) -> Bytes:
    """Add to codes of 4 bits [blocks, 32] their fifth ones [blocks, 4], in place."""
    bits = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    bits <<= 4
    codes |= bits
    return codes


def _q5_0(blocks: Bytes, out: Floats) -> None:
    codes = with_fifth_bit(blocks[:, 2:6], nibbles(blocks[:, 6:], 16)).view(np.int8)
    codes -= 16
    np.copyto(out, codes)
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    np.copyto(out, with_fifth_bit(blocks[:, 4:8], nibbles(blocks[:, 8:], 16)))
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.copyto(out, blocks[:, 2:].view(np.int8))
    out *= _half(blocks, 0)


def _q2_k(blocks: Bytes, out: Floats) -> None:
    scales = blocks[:, :16]
    step = _half(blocks, 80) * (scales & 15).astype(np.float32)
    low = _half(blocks, 82) * (scales >> 4).astype(np.float32)
    np.copyto(out, pairs(blocks[:, 16:80], 32))
    groups = out.reshape(len(out), 16, 16)
    groups *= step[:, :, None]
    groups -= low[:, :, None]


def group_steps(packed: Bytes) -> npt.NDArray[np.int8]:
    """Unpack twelve bytes into sixteen signed steps of six bits: [blocks, 16]."""
    steps = nibbles(packed[:, :8], 8) | (pairs(packed[:, 8:], 4) << 4)
    return steps.view(np.int8) - np.int8(32)


def third_bits(packed: Bytes) -> Bytes:
    """What is taken from codes of two bits [blocks, 256], 0 or 4: a third bit [blocks, 32] that is clear."""
    missing = bit_planes(packed).reshape(len(packed), 256)
    missing ^= 1
    missing <<= 2
    return missing


def _q3_k(blocks: Bytes, out: Floats) -> None:
    step = _half(blocks, 108) * group_steps(blocks[:, 96:108]).astype(np.float32)
    codes = pairs(blocks[:, 32:96], 32)
    codes -= third_bits(blocks[:, :32])
    np.copyto(out, codes.view(np.int8))
    out.reshape(len(out), 16, 16)[...] *= step[:, :, None]


def scale_steps(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack twelve bytes into eight six-bit scales and eight six-bit minimums: [blocks, 8] each."""
    scales, mins = np.empty((len(packed), 8), np.uint8), np.empty((len(packed), 8), np.uint8)
    first, second, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales[:, :4], scales[:, 4:] = first & 63, (last & 15) | ((first >> 2) & 48)
    mins[:, :4], mins[:, 4:] = second & 63, (last >> 4) | ((second >> 2) & 48)
    return scales, mins


def _scale_and_shift(blocks: Bytes, out: Floats) -> None:
    steps = scale_steps(blocks[:, 4:16])
    scales, mins = (step.astype(np.float32) for step in steps)
    scales *= _half(blocks, 0)
    mins *= _half(blocks, 2)
    groups = out.reshape(len(out), 8, 32)
    groups *= scales[:, :, None]
    groups -= mins[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    np.copyto(out, nibbles(blocks[:, 16:], 32))
    _scale_and_shift(blocks, out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    codes = nibbles(blocks[:, 48:], 32)
    fifth = bit_planes(blocks[:, 16:48]).reshape(len(out), 256)
    fifth <<= 4
    codes |= fifth
    np.copyto(out, codes)
    _scale_and_shift(blocks, out)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    codes = nibbles(blocks[:, :128], 64)
    high = pairs(blocks[:, 128:192], 32)
    high <<= 4
    codes |= high
    codes -= 32
    np.copyto(out, codes.view(np.int8))
    step = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    out.reshape(len(out), 16, 16)[...] *= step[:, :, None]


_TYPES = (
    BlockType("float32", 1, 4, _plain("<f4")),
    BlockType("float16", 1, 2, _float16),
    BlockType("bfloat16", 1, 2, _bfloat16),
    BlockType("float64", 1, 8, _plain("<f8")),
    BlockType("int8", 1, 1, _plain("<i1")),
    BlockType("int16", 1, 2, _plain("<i2")),
    BlockType("int32", 1, 4, _plain("<i4")),
    BlockType("int64", 1, 8, _plain("<i8")),
    BlockType("uint8", 1, 1, _plain("<u1")),
    BlockType("uint16", 1, 2, _plain("<u2")),
    BlockType("uint32", 1, 4, _plain("<u4")),
    BlockType("uint64", 1, 8, _plain("<u8")),
    BlockType("bool", 1, 1, _plain("?")),
    BlockType("float8_e4m3fn", 1, 1, None),
    BlockType("float8_e5m2", 1, 1, None),
    BlockType("q4_0", 32, 18, _q4_0),
    BlockType("q4_1", 32, 20, _q4_1),
    BlockType("q5_0", 32, 22, _q5_0),
    BlockType("q5_1", 32, 24, _q5_1),
    BlockType("q8_0", 32, 34, _q8_0),
    BlockType("q8_1", 32, 40, None),
    BlockType("q2_k", 256, 84, _q2_k),
    BlockType("q3_k", 256, 110, _q3_k),
    BlockType("q4_k", 256, 144, _q4_k),
    BlockType("q5_k", 256, 176, _q5_k),
    BlockType("q6_k", 256, 210, _q6_k),
    BlockType("q8_k", 256, 292, None),
    BlockType("q1_0", 128, 18, None),
    BlockType("iq1_s", 256, 50, codebooks.iq1_s),
    BlockType("iq1_m", 256, 56, codebooks.iq1_m),
    BlockType("iq2_xxs", 256, 66, codebooks.iq2_xxs),
    BlockType("iq2_xs", 256, 74, codebooks.iq2_xs),
    BlockType("iq2_s", 256, 82, codebooks.iq2_s),
    BlockType("iq3_xxs", 256, 98, codebooks.iq3_xxs),
    BlockType("iq3_s", 256, 110, codebooks.iq3_s),
    BlockType("iq4_nl", 32, 18, codebooks.iq4_nl),
    BlockType("iq4_xs", 256, 136, codebooks.iq4_xs),
    BlockType("tq1_0", 256, 54, codebooks.tq1_0),
    BlockType("tq2_0", 256, 66, codebooks.tq2_0),
    BlockType("mxfp4", 32, 17, codebooks.mxfp4),
    BlockType("nvfp4", 64, 36, codebooks.nvfp4),
)
BLOCK_TYPES = {block.name: block for block in _TYPES}
