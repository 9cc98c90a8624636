"""A matrix of codes on the host, and the view of one that is still in its files.

    tensors of a module -> QuantizedView, one for its weight -> Codes, or float32

The numbers are (codes - zeros) * scales: a difference of whole numbers and a scale, both exact in
float32, multiplied once. Reference packages round the same product to the type of their scales.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from xjax.checkpoints.quantized.packing import (
    Bytes,
    Floats,
    float8_values,
    pack_nibbles,
    unpack_nibbles,
    unpack_words,
)
from xjax.errors import LoadError

NUMBER_TYPES = ("float32", "float16", "bfloat16")  # of scales
_NUMPY_TYPES = {"int64": "<i8", "int32": "<i4", "int8": "i1", "uint8": "u1"}


class Stored(Protocol):
    """What is used of a tensor in a file."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    def raw(self) -> Bytes: ...
    def read(self) -> Floats: ...
    def release(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Codes:
    """A matrix, w[:, order] = (codes - zeros) * scales.

    codes    [Out, In]      int8, or the bytes of 8-bit floats as uint8; of kind "int4" [Out, In / 2]
                            uint8, two a byte, the earlier one low, each with 8 added to it
    scales   [Out, In / g]  float32, g inputs share one
    zeros    [Out, In / g]  int8, or None
    order    [In]           int32, the input that each column of codes belongs to; None: its own
    kind     "int8", "int4", "float8_e4m3fn" or "float8_e5m2"
    """

    codes: npt.NDArray[Any]
    scales: Floats
    zeros: npt.NDArray[np.int8] | None
    order: npt.NDArray[np.int32] | None
    kind: str

    def numbers(self) -> Floats:
        """The matrix itself, [Out, In] float32, columns by input."""
        num_out, groups = self.scales.shape
        if self.kind == "int4":
            values = unpack_nibbles(self.codes).astype(np.float32) - np.float32(8)
        elif self.kind == "int8":
            values = self.codes.astype(np.float32)
        else:
            values = float8_values(self.kind)[self.codes]
        values = values.reshape(num_out, groups, -1)
        with np.errstate(all="ignore"):  # a file may hold any bits; NaN and infinity pass through
            if self.zeros is not None:
                values -= self.zeros.astype(np.float32)[:, :, None]
            values *= self.scales[:, :, None]
        values = values.reshape(num_out, -1)
        if self.order is None:
            return values
        found = np.empty_like(values)
        found[:, self.order] = values
        return found


@dataclass(frozen=True, eq=False)
class QuantizedView:
    """The weight of a module that lies in its files as codes.

    name    "<module>.weight"
    shape   (Out, In)
    dtype   how it is stored, for messages: "gptq"
    parts   all its tensors, that with the codes first
    """

    name: str
    shape: tuple[int, int]
    dtype: str
    parts: tuple[Stored, ...]
    _read: Callable[[], Codes]

    @property
    def file(self) -> str:
        """The file that the codes lie in, for messages."""
        return self.parts[0].file

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_elements(self) -> int:
        """Numbers that it stands for."""
        return self.shape[0] * self.shape[1]

    @property
    def num_columns(self) -> int:
        """Elements of a row."""
        return self.shape[1]

    def read_codes(self) -> Codes:
        """Read the codes, which may lie in the file still; LoadError when their order of inputs is none."""
        return self._read()

    def release(self) -> None:
        """Drop the parts from this process's memory; reading them again maps them again."""
        for part in self.parts:
            part.release()

    def read(self) -> Floats:
        """Return the matrix as numbers.

        returns  [Out, In]  float32, fresh
        """
        values = self._read().numbers()
        self.release()
        return values

    def read_into(self, out: npt.NDArray[Any]) -> None:
        """Write the matrix as numbers.

        out  [Out, In]  written
        """
        out[...] = self.read()


def from_unsigned(
    codes: Bytes,
    zeros: Bytes | None,
    scales: Floats,
    bits: int,
    order: npt.NDArray[np.int32] | None = None,
) -> Codes:
    """Make codes of whole numbers from 0 up to 2 ** bits - 1.

    codes    [In, Out]      uint8
    zeros    [Out, In / g]  uint8, the code that stands for zero; None: the middle one
    scales   [Out, In / g]  float32
    order    [In]           int32, the rows of `codes` in the order in which they are to lie
    """
    middle = np.uint8(1 << (bits - 1))
    if order is not None:
        codes = codes[order]
    if bits == 8 or len(codes) % 2:
        signed = np.ascontiguousarray((codes - middle).T).view(np.int8)
        return Codes(signed, scales, signed_zeros(zeros, bits), order, "int8")
    # Pairs of rows before they are turned: half the bytes to turn.
    packed = np.ascontiguousarray(pack_nibbles(codes + (np.uint8(8) - middle)).T)
    return Codes(packed, scales, signed_zeros(zeros, bits), order, "int4")


def from_words(
    words: npt.NDArray[Any],
    num_in: int,
    zeros: Bytes | None,
    scales: Floats,
    bits: int,
    order: npt.NDArray[np.int32] | None = None,
) -> Codes:
    """Make codes of words that hold an output's codes one behind the other, as `from_unsigned` does.

    words   [Out, In * bits / 32]  int32, contiguous; a last word may be filled up
    """
    data = words.view(np.uint8)
    if bits == 4 and order is None and num_in % 2 == 0:  # as we keep them
        return Codes(data[:, : num_in // 2], scales, signed_zeros(zeros, bits), None, "int4")
    if bits == 8 and order is None:
        signed = (data[:, :num_in] ^ np.uint8(128)).view(np.int8)
        return Codes(signed, scales, signed_zeros(zeros, bits), None, "int8")
    return from_unsigned(unpack_words(words, bits)[:, :num_in].T, zeros, scales, bits, order)


def signed_zeros(zeros: Bytes | None, bits: int) -> npt.NDArray[np.int8] | None:
    """Count zeros from the middle code; None where all are there.

    zeros    [...]  uint8, or None
    returns  [...]  int8, or None
    """
    middle = np.uint8(1 << (bits - 1))
    return None if zeros is None or (zeros == middle).all() else (zeros - middle).view(np.int8)


def inputs_by_group(
    view: Stored, num_groups: int, group_size: int, *, unset: int | None = None
) -> npt.NDArray[np.int32] | None:
    """Read which group each input is in and sort the inputs by it; None where they are sorted already.

    view    [In]   int32; all of the value `unset` where there is no such order
    """
    groups = whole_numbers(view)
    if unset is not None and (groups == unset).any():
        return None
    counts = np.bincount(groups, minlength=num_groups) if groups.min() >= 0 else None
    if counts is None or len(counts) > num_groups or (counts != group_size).any():
        raise LoadError(
            f"{view.file}: tensor {view.name} must put {group_size} inputs into each of {num_groups} groups"
        )
    if (groups == np.repeat(np.arange(num_groups), group_size)).all():
        return None
    return np.argsort(groups, kind="stable").astype(np.int32)


def check(view: Stored, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Stored:
    """Refuse a tensor of another shape or type with a line that says what was expected."""
    where = f"{view.file}: tensor {view.name}"
    if view.dtype not in dtypes:
        raise LoadError(f"{where} must be of type {' or '.join(dtypes)}, found {view.dtype}")
    if view.shape != shape:
        raise LoadError(f"{where} must have shape {shape}, found {view.shape}")
    return view


def whole_numbers(view: Stored) -> npt.NDArray[Any]:
    """Read integers as they are stored.

    returns  [*shape]   of the stored type, a read-only view of the file
    """
    return view.raw().view(_NUMPY_TYPES[view.dtype]).reshape(view.shape)


def scales_by_output(view: Stored) -> Floats:
    """Read scales that lie [In / g, Out].

    returns  [Out, In / g] float32
    """
    return np.ascontiguousarray(view.read().T)
