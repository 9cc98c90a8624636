"""Decoders of the block types whose codes are looked up in a table.

The large grids are data (codebooks.npz, read on first use); small tables are computed or
listed here. Calling convention and equality law are those of dequantize.py.
This module knows no files but its own data, and no tensor names.
"""

import functools
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
# Four-bit floats (one sign, two exponent, one mantissa bit), doubled to be whole numbers.
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], np.uint8)


@functools.cache
def _grid(name: str) -> Floats:
    """Return grid `name` as [entries, 4 or 8] float32."""
    with resources.files("xjax.checkpoints").joinpath("codebooks.npz").open("rb") as file:
        with np.load(file, allow_pickle=False) as grids:
            return grids[name].astype(np.float32)


@functools.cache
def _signs() -> Floats:
    """Return +-1 for each bit of a byte, lowest bit first: [256, 8] float32; a set bit is -1."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return 1 - 2 * bits.astype(np.float32)


@functools.cache
def _even_signs() -> Floats:
    """Signs by a seven-bit code; the eighth sign makes the number of minus signs even."""
    codes = np.arange(128)
    parity = np.array([int(code).bit_count() & 1 for code in codes])
    return _signs()[codes | (parity << 7)]


@functools.cache
def _powers_of_2() -> Floats:
    """Return half of 2 to the power (code - 127) for each byte, subnormals included."""
    codes = np.arange(256, dtype=np.uint32)
    bits = np.where(codes < 2, np.uint32(0x00200000) << (codes & 1), (codes - 1) << 23)
    return bits.astype(np.uint32).view(np.float32)


@functools.cache
def _unsigned_fp8() -> Floats:
    """Return half of the value of each unsigned E4M3 byte; 0x7f, not a number, counts as 0."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    values[[0, 127]] = 0
    return (values / 2).astype(np.float32)


def _half(blocks: Bytes, start: int) -> Floats:
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def _halves(packed: Bytes) -> Bytes:
    """Low and high half of each byte, side by side: [blocks, 2 * bytes]."""
    parts = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return parts.astype(np.uint8, copy=False).reshape(len(packed), -1)


def _fields(
    words: npt.NDArray[np.unsignedinteger], shifts: tuple[int, ...], mask: int
) -> npt.NDArray[np.intp]:
    """Cut one field at each shift out of every word: [blocks, words * fields] indices."""
    parts = words[:, :, None] >> np.array(shifts, words.dtype)
    return (parts & words.dtype.type(mask)).reshape(len(words), -1).astype(np.intp)


def _write(out: Floats, step: npt.NDArray[np.floating[Any]], grid: Floats, signs: Floats) -> None:
    """out = step * grid * signs, with one step for each run of consecutive elements."""
    runs = out.reshape(len(out), step.shape[1], -1)
    np.multiply(grid.reshape(runs.shape), step[:, :, None], out=runs)
    out *= signs.reshape(out.shape)


def iq2_xxs(blocks: Bytes, out: Floats) -> None:
    words = blocks[:, 2:].view("<u4").reshape(len(blocks), 8, 2)
    codes = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    extra = words[:, :, 1]
    step = _half(blocks, 0) * (np.float32(0.5) + (extra >> 28).astype(np.float32)) * np.float32(0.25)
    signs = _even_signs()[_fields(extra, (0, 7, 14, 21), 127)]
    _write(out, step, _grid("iq2_xxs")[codes], signs)


def iq2_xs(blocks: Bytes, out: Floats) -> None:
    codes = blocks[:, 2:66].view("<u2")
    scales = _halves(blocks[:, 66:74]).astype(np.float32)
    step = _half(blocks, 0) * (np.float32(0.5) + scales) * np.float32(0.25)
    _write(out, step, _grid("iq2_xs")[codes & 511], _even_signs()[codes >> 9])


def iq2_s(blocks: Bytes, out: Floats) -> None:
    high = _fields(blocks[:, 66:74], (0, 2, 4, 6), 3)
    codes = blocks[:, 2:34] | (high << 8)
    scales = _halves(blocks[:, 74:82]).astype(np.float32)
    step = _half(blocks, 0) * (np.float32(0.5) + scales) * np.float32(0.25)
    _write(out, step, _grid("iq2_s")[codes], _signs()[blocks[:, 34:66]])


def iq3_xxs(blocks: Bytes, out: Floats) -> None:
    extra = blocks[:, 66:].view("<u4")
    step = _half(blocks, 0) * (np.float32(0.5) + (extra >> 28).astype(np.float32)) * np.float32(0.5)
    signs = _even_signs()[_fields(extra, (0, 7, 14, 21), 127)]
    _write(out, step, _grid("iq3_xxs")[blocks[:, 2:66]], signs)


def iq3_s(blocks: Bytes, out: Floats) -> None:
    high = _fields(blocks[:, 66:74], (0, 1, 2, 3, 4, 5, 6, 7), 1)
    codes = blocks[:, 2:66] | (high << 8)
    step = _half(blocks, 0) * (1 + 2 * _halves(blocks[:, 106:110])).astype(np.float32)
    _write(out, step, _grid("iq3_s")[codes], _signs()[blocks[:, 74:106]])


def _write_shifted(out: Floats, step: Floats, grid: Floats, shift: Floats) -> None:
    """out = step * (grid + shift), each for a run of consecutive elements."""
    runs = out.reshape(len(out), shift.shape[1], -1)
    np.add(grid.reshape(runs.shape), shift[:, :, None], out=runs)
    out.reshape(len(out), step.shape[1], -1)[...] *= step[:, :, None]


def iq1_s(blocks: Bytes, out: Floats) -> None:
    high = blocks[:, 34:].view("<u2")
    step = _half(blocks, 0) * (2 * ((high >> 12) & 7) + 1).astype(np.float32)
    shift = np.where(high & 0x8000, np.float32(-0.125), np.float32(0.125))
    codes = blocks[:, 2:34] | (_fields(high, (0, 3, 6, 9), 7) << 8)
    _write_shifted(out, step, _grid("iq1")[codes], shift)


def iq1_m(blocks: Bytes, out: Floats) -> None:
    words = blocks[:, 48:].view("<u2")
    # The block's float16 scale is spread over the top four bits of the four words.
    bits = (words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    scale = np.bitwise_or.reduce(bits, axis=1, keepdims=True).astype("<u2").view("<f2").astype(np.float32)
    step = scale * (2 * _fields(words, (0, 3, 6, 9), 7) + 1).astype(np.float32)
    high = _fields(blocks[:, 32:48], (0, 4), 15)
    shift = np.where(high & 8, np.float32(-0.125), np.float32(0.125))
    codes = blocks[:, :32] | ((high & 7) << 8)
    _write_shifted(out, step, _grid("iq1")[codes], shift)


def _look_up_halves(table: Floats, packed: Bytes, group: int, out: Floats) -> None:
    """Low halves of each group of bytes, then their high halves, through a table of 16."""
    groups = packed.reshape(len(packed), -1, group)
    parts = out.reshape(len(out), -1, 2, group)
    parts[:, :, 0] = table[groups & 15]
    parts[:, :, 1] = table[groups >> 4]


def iq4_nl(blocks: Bytes, out: Floats) -> None:
    _look_up_halves(NONLINEAR, blocks[:, 2:], 16, out)
    out *= _half(blocks, 0)


def iq4_xs(blocks: Bytes, out: Floats) -> None:
    high = _fields(blocks[:, 2:4].view("<u2"), (0, 2, 4, 6, 8, 10, 12, 14), 3)
    scales = (_halves(blocks[:, 4:8]) | (high << 4)) - 32
    step = _half(blocks, 0) * scales.astype(np.float32)
    _look_up_halves(NONLINEAR, blocks[:, 8:], 16, out)
    out.reshape(len(out), 8, 32)[...] *= step[:, :, None]


def mxfp4(blocks: Bytes, out: Floats) -> None:
    _look_up_halves(_FP4, blocks[:, 1:], 16, out)
    out *= _powers_of_2()[blocks[:, :1]]


def nvfp4(blocks: Bytes, out: Floats) -> None:
    _look_up_halves(_FP4, blocks[:, 4:], 8, out)
    out.reshape(len(out), 4, 16)[...] *= _unsigned_fp8()[blocks[:, :4]][:, :, None]


def tq1_0(blocks: Bytes, out: Floats) -> None:
    start = 0
    # Five three-valued digits a byte, then four: each product's top digit is the value.
    for first, last, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        products = blocks[:, None, first:last] * _POWERS_OF_3[:digits, None]
        values = ((products.astype(np.uint16) * 3) >> 8).astype(np.int8) - np.int8(1)
        stop = start + (last - first) * digits
        out[:, start:stop] = values.reshape(len(out), -1)
        start = stop
    out *= _half(blocks, 52)


def tq2_0(blocks: Bytes, out: Floats) -> None:
    parts = out.reshape(len(out), 2, 4, 32)
    packed = blocks[:, :64].reshape(len(blocks), 2, 32)
    for part in range(4):
        parts[:, :, part] = ((packed >> (2 * part)) & 3).view(np.int8) - np.int8(1)
    out *= _half(blocks, 64)
