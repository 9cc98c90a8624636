"""A file mapped into memory and the named tensors inside it.

Nothing is read before it is asked for, and pages of the file that were read are given back,
so opening a model costs no memory. Knows no file format.
"""

import math
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xjax.checkpoints.blocks import BlockParts, split
from xjax.checkpoints.dequantize import BLOCK_TYPES, dequantize, dequantize_into, num_bytes
from xjax.errors import LoadError

_PART = 1 << 22  # elements read between two releases of the file's pages


class MappedFile:
    """The bytes of a file, read-only.

    path     as given
    data     [size]  uint8; views of it keep the mapping alive
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
                raise LoadError(f"{path}: cannot be read: not a regular file")
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size == 0:
                    raise LoadError(f"{path}: the file is empty")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
        self.data: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.data)

    def buffer(self) -> memoryview:
        """Return the bytes without numpy, for struct."""
        return memoryview(self._map)

    def release(self, start: int, count: int) -> None:
        """Drop these bytes from this process's memory; reading them again maps them again."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, start + count - first)


@dataclass(frozen=True, eq=False)
class TensorView:
    """One tensor of a checkpoint, still in its file.

    shape    numpy order, the fastest dimension last ([out, in] for a matrix)
    dtype    "float32", "bfloat16", "q4_1", ...: a key of `dequantize.BLOCK_TYPES`
    file     name of the file it lies in, for messages
    start    byte at which it begins in `mapped`; the reader has checked that it ends inside
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    mapped: MappedFile
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes it takes in the file."""
        return num_bytes(self.dtype, self.shape)

    @property
    def num_elements(self) -> int:
        """Numbers it holds."""
        return math.prod(self.shape)

    @property
    def num_columns(self) -> int:
        """Elements of a row: the last axis."""
        return self.shape[-1] if self.shape else 1

    def raw(self) -> npt.NDArray[np.uint8]:
        """Return the stored bytes.

        returns  [bytes]  uint8, a read-only view of the file
        """
        return self.mapped.data[self.start : self.start + self.num_bytes]

    def read(self) -> npt.NDArray[np.float32]:
        """Return the tensor as numbers.

        returns  [*shape]  float32, fresh, or a read-only view of the file if stored so

        Raises LoadError for a type that has no decoder.
        """
        self._check_decodable()
        values = dequantize(self.raw(), self.dtype, self.shape)
        self.release()
        return values

    def read_into(self, out: npt.NDArray[Any]) -> None:
        """Write the tensor as numbers into an array, without a copy of the whole on the way.

        out  [*shape]  written; C-contiguous, float32 or what float32 can be cast to

        Raises LoadError for a type that has no decoder.
        """
        assert out.shape == self.shape, (out.shape, self.shape)
        rows = out.reshape(-1, self.num_columns)
        step = max(1, _PART // self.num_columns)
        for first in range(0, len(rows), step):
            self.read_rows(rows[first : first + step], first)

    def read_rows(self, out: npt.NDArray[Any], first: int) -> None:
        """Write some rows as numbers, all axes but the last counted as one.

        out    [rows, num_columns]  written; as for `read_into`
        first  row of the tensor that goes into out[0]

        Safe in several threads at once. Raises LoadError for a type that has no decoder.
        """
        self._check_decodable()
        start, size = self._place_of(first, len(out))
        dequantize_into(self.mapped.data[start : start + size], self.dtype, out)
        self.mapped.release(start, size)

    def split_rows(self, first: int, count: int) -> BlockParts:
        """Take some rows of blocks apart, all axes but the last counted as one.

        Safe in several threads at once. Only for types of `blocks.SPLITTERS`. Drops nothing from memory.
        """
        start, size = self._place_of(first, count)
        return split(self.mapped.data[start : start + size], self.dtype, self.num_columns)

    def release_rows(self, first: int, count: int) -> None:
        """Drop some rows from this process's memory, as `release` does; many at once, or others come back."""
        self.mapped.release(*self._place_of(first, count))

    def _place_of(self, first: int, count: int) -> tuple[int, int]:
        """First byte in the file, and number, of the bytes of some rows."""
        size = num_bytes(self.dtype, (count, self.num_columns))
        start = self.start + first * num_bytes(self.dtype, (self.num_columns,))
        assert start + size <= self.start + self.num_bytes, (first, count, self.shape)
        return start, size

    def release(self) -> None:
        """Drop its bytes from this process's memory; reading them again maps them again."""
        self.mapped.release(self.start, self.num_bytes)

    def _check_decodable(self) -> None:
        if BLOCK_TYPES[self.dtype].decode is None:
            raise LoadError(
                f"{self.file}: tensor {self.name} is stored as {self.dtype}, which cannot be read; "
                "use another conversion of this model"
            )
