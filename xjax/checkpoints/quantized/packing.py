"""Codes inside 32-bit words, and what an 8-bit float stands for: arrays in, arrays out; no names or files."""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# exponent bits, mantissa bits, whether the highest exponent stands for infinities and NaN alone
_FLOAT8 = {"float8_e4m3fn": (4, 3, False), "float8_e5m2": (5, 2, True)}


def unpack_words(words: npt.NDArray[Any], bits: int) -> Bytes:
    """Take codes out of words, the lowest bits first; a code may go on in the next word.

    words    [R, C]              int32
    returns  [R, C * 32 / bits]  uint8
    """
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    if bits in (2, 4):
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return ((data[:, :, None] >> shifts) & np.uint8(2**bits - 1)).reshape(len(data), -1)
    digits = np.unpackbits(data, axis=1, bitorder="little")
    usable = digits.shape[1] // bits * bits
    digits = digits[:, :usable].reshape(len(data), -1, bits)
    return np.bitwise_or.reduce(digits << np.arange(bits, dtype=np.uint8), axis=2).astype(np.uint8)


def unpack_nibbles(data: Bytes) -> Bytes:
    """Take two codes out of each byte, the low one first.

    data     [R, C]      uint8
    returns  [R, 2 * C]  uint8, below 16
    """
    out = np.empty((len(data), data.shape[1], 2), np.uint8)
    out[:, :, 0], out[:, :, 1] = data & 15, data >> 4
    return out.reshape(len(data), -1)


def pack_nibbles(codes: Bytes) -> Bytes:
    """Put the codes of two rows into each byte, those of the earlier one low.

    codes    [R, C]      uint8, below 16; R even
    returns  [R / 2, C]  uint8
    """
    return codes[::2] | (codes[1::2] << np.uint8(4))


def unpack_rows(words: npt.NDArray[Any], bits: int) -> Bytes:
    """Take codes out of words that hold those of neighbouring rows, the lowest bits first.

    words    [R * bits / 32, C]  int32
    returns  [R, C]              uint8
    """
    if 32 % bits:
        return unpack_words(np.ascontiguousarray(words.T), bits).T
    # Bytes first: arithmetic on them is four times that on words.
    data = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    out = np.empty((len(words), 32 // bits, words.shape[1]), np.uint8)
    for i in range(32 // bits):
        byte, shift = divmod(bits * i, 8)
        out[:, i] = (data[:, :, byte] >> np.uint8(shift)) & np.uint8(2**bits - 1)
    return out.reshape(-1, words.shape[1])


@functools.cache
def float8_values(kind: str) -> Floats:
    """What each of the 256 codes of an 8-bit float type stands for.

    returns  [256] float32
    """
    exponent_bits, mantissa_bits, has_infinity = _FLOAT8[kind]
    codes = np.arange(256)
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = (codes >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = codes & (2**mantissa_bits - 1)
    whole = mantissa + (exponent > 0).astype(np.int64) * 2**mantissa_bits
    table = np.ldexp(whole.astype(np.float32), np.maximum(exponent, 1) - bias - mantissa_bits)
    if has_infinity:
        top = exponent == 2**exponent_bits - 1
        table[top] = np.where(mantissa[top] > 0, np.nan, np.inf)
    else:
        table[codes & 127 == 127] = np.nan
    table[128:] = -table[128:]
    table.flags.writeable = False  # it is kept for every caller
    return table
