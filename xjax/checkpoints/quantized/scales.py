"""Codes that lie as the matrix does, one byte each, and scales of a tensor, of outputs, groups or blocks.

codes    [Out, In]                      int8 or 8-bit floats
scales   [], [1] or [1, 1]              of the whole tensor
         [Out] or [Out, 1]              of each output
         [Out, In / g]                  of groups
         [Out / rows, In / columns]     of blocks, rounded up
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from xjax.checkpoints.quantized.codes import NUMBER_TYPES, Codes, Stored, check, whole_numbers
from xjax.checkpoints.quantized.packing import Floats, pack_nibbles
from xjax.errors import LoadError

FLOAT8_TYPES = ("float8_e4m3fn", "float8_e5m2")


def matrix_shape(view: Stored, dtypes: tuple[str, ...]) -> tuple[int, int]:
    """Shape of a matrix of codes; LoadError when it is none."""
    where = f"{view.file}: tensor {view.name}"
    if view.dtype not in dtypes:
        raise LoadError(f"{where} must be of type {' or '.join(dtypes)}, found {view.dtype}")
    if len(view.shape) != 2 or not all(view.shape):
        raise LoadError(f"{where} must be a matrix, found shape {view.shape}")
    return view.shape[0], view.shape[1]


def check_scales(
    view: Stored,
    shape: tuple[int, int],
    block: tuple[int, int],
    dtypes: tuple[str, ...] = NUMBER_TYPES,
) -> None:
    """Refuse scales that are not those of a matrix.

    block   outputs and inputs that share one; a tensor's is `shape`, an output's is (1, In)
    """
    wanted = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    if wanted[1] == 1 and view.shape in ((wanted[0],), *(((), (1,)) if wanted[0] == 1 else ())):
        wanted = view.shape
    check(view, wanted, dtypes)


def by_group(scales: npt.NDArray[Any], shape: tuple[int, int], block: tuple[int, int]) -> npt.NDArray[Any]:
    """Repeat scales or zeros of blocks until each output has its own, of groups that divide the inputs.

    scales   as `check_scales` lets them pass
    returns  [Out, In / g], g what block and inputs have in common
    """
    num_out, num_in = shape
    grid = scales.reshape(-(-num_out // block[0]), -(-num_in // block[1]))
    group = math.gcd(num_in, block[1])
    rows = np.repeat(grid, block[0], axis=0)[:num_out] if block[0] > 1 else grid
    columns = np.arange(0, num_in, group) // block[1]
    return np.ascontiguousarray(rows[:, columns])


def read_scales(view: Stored, shape: tuple[int, int], block: tuple[int, int]) -> Floats:
    """Read scales.

    returns  [Out, In / g]  float32; bytes are powers of two
    """
    values = view.read()
    if view.dtype == "uint8":
        values = np.ldexp(np.float32(1), whole_numbers(view).astype(np.int32) - 127)
    return by_group(values, shape, block)


def read_matrix(view: Stored) -> tuple[npt.NDArray[Any], str]:
    """Read codes.

    returns  [Out, In] and their kind: int8, or uint8 for the bytes of 8-bit floats
    """
    if view.dtype in FLOAT8_TYPES:
        return view.raw().reshape(view.shape), view.dtype
    return whole_numbers(view), "int8"


def narrowed(codes: Codes, bits: int) -> Codes:
    """Put codes of few bits that lie a byte each two into a byte.

    Codes that do not fit after all, and rows of odd length, are let be.
    """
    values = codes.codes
    if codes.kind != "int8" or bits > 4 or values.shape[1] % 2 or values.min() < -8 or values.max() > 7:
        return codes
    packed = np.ascontiguousarray(pack_nibbles((values + np.int8(8)).view(np.uint8).T).T)
    return Codes(packed, codes.scales, codes.zeros, codes.order, "int4")
