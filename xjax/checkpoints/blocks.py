"""Take the blocks of a GGUF type apart without turning codes into numbers: codes, scales, steps.

`BlockParts` are what the bytes say, by row of the tensor; what is made of them is known elsewhere. The
numbers that they stand for are those of dequantize.py, to the bit:

    (code - offset) * scale, or code * scale + minimum
    nested: scale = d * step, minimum = -(dmin * minimum step)

This module knows no files and no tensor names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xjax.checkpoints.codebooks import NONLINEAR
from xjax.checkpoints.dequantize import (
    BLOCK_TYPES,
    bit_planes,
    group_steps,
    nibbles,
    pairs,
    scale_steps,
    third_bits,
    with_fifth_bit,
)

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class BlockParts:
    """Rows of a tensor taken apart; a block has 32 columns, or of nested types 256.

    codes           [rows, columns]       uint8, unsigned
    scales          [rows, blocks]        float16
    minimums        [rows, blocks]        float16, or None; nested: what is taken away
    steps           [rows, groups]        of nested types: uint8, or int8 of q6_k; else None
    minimum_steps   [rows, groups]        uint8, or None
    """

    codes: Bytes
    scales: Array
    minimums: Array | None = None
    steps: Array | None = None
    minimum_steps: Array | None = None


Splitter = Callable[[Bytes], BlockParts]


def split(data: Bytes, dtype: str, num_columns: int) -> BlockParts:
    """Take rows apart.

    data   [bytes]  uint8, whole rows of a type of `SPLITTERS`, contiguous
    """
    block = BLOCK_TYPES[dtype]
    found = SPLITTERS[dtype](data.reshape(-1, block.num_bytes))
    num_rows = found.codes.size // num_columns

    def by_row(part: Array | None) -> Any:
        return None if part is None else part.reshape(num_rows, -1)

    return BlockParts(
        by_row(found.codes),
        by_row(found.scales),
        by_row(found.minimums),
        by_row(found.steps),
        by_row(found.minimum_steps),
    )


def _half(blocks: Bytes, start: int) -> Array:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")


def _q8_0(blocks: Bytes) -> BlockParts:
    return BlockParts(blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0))


def _q4_0(blocks: Bytes) -> BlockParts:
    return BlockParts(nibbles(blocks[:, 2:], 16), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> BlockParts:
    return BlockParts(nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> BlockParts:
    return BlockParts(with_fifth_bit(blocks[:, 2:6], nibbles(blocks[:, 6:], 16)), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> BlockParts:
    codes = with_fifth_bit(blocks[:, 4:8], nibbles(blocks[:, 8:], 16))
    return BlockParts(codes, _half(blocks, 0), _half(blocks, 2))


def _q4_k(blocks: Bytes) -> BlockParts:
    codes = nibbles(blocks[:, 16:], 32)
    return BlockParts(codes, _half(blocks, 0), _half(blocks, 2), *scale_steps(blocks[:, 4:16]))


def _q5_k(blocks: Bytes) -> BlockParts:
    codes = nibbles(blocks[:, 48:], 32)
    codes |= bit_planes(blocks[:, 16:48]).reshape(codes.shape) << np.uint8(4)
    return BlockParts(codes, _half(blocks, 0), _half(blocks, 2), *scale_steps(blocks[:, 4:16]))


def _q6_k(blocks: Bytes) -> BlockParts:
    codes = nibbles(blocks[:, :128], 64)
    codes |= pairs(blocks[:, 128:192], 32) << np.uint8(4)
    return BlockParts(codes, _half(blocks, 208), None, blocks[:, 192:208].view(np.int8))


def _q3_k(blocks: Bytes) -> BlockParts:
    """As q6_k: a code of three bits and 28 is one of six, of which 32 stands for zero."""
    codes = pairs(blocks[:, 32:96], 32)
    codes += np.uint8(32)
    codes -= third_bits(blocks[:, :32])
    return BlockParts(codes, _half(blocks, 108), None, group_steps(blocks[:, 96:108]))


def _iq4_nl(blocks: Bytes) -> BlockParts:
    """As q8_0: the table holds whole numbers of 8 bits."""
    return BlockParts(_NONLINEAR_CODES[nibbles(blocks[:, 2:], 16)], _half(blocks, 0))


_NONLINEAR_CODES = (NONLINEAR + 128).astype(np.uint8)

SPLITTERS: dict[str, Splitter] = {
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
    "q3_k": _q3_k, "iq4_nl": _iq4_nl,
}  # fmt: skip
