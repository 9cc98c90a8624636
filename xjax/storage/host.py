"""Pages in host memory: a slot holds one page of a group, layer by layer as the device has it.

Memory is taken once, as large as the pool, and touched when it is first used. Each slot is written by
one thread and read by another, in an order that its owner sees to.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
_ALIGNMENT = 64  # bytes; what XLA wants of an array that it takes over as it is


class HostPages:
    """Slots 1 .. num_slots of one page group.

    shapes   of a page in each array of the group, k and v of its first layer, of its second, ...
    dtype    of all of them
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: npt.DTypeLike, num_slots: int) -> None:
        self._arrays = [np.empty((num_slots + 1, *shape), dtype) for shape in shapes]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all arrays."""
        return sum(array[0].nbytes for array in self._arrays)

    def write(self, slots: npt.NDArray[np.int32], pages: Sequence[Array]) -> None:
        """Keep pages.

        slots   [n]        int32
        pages   [n, ...]   one array each, in the order of `shapes`
        """
        for array, values in zip(self._arrays, pages, strict=True):
            array[slots] = values

    def read(self, slots: npt.NDArray[np.int32], out: list[Array] | None = None) -> list[Array]:
        """Copy pages out, so that the slots may be written at once.

        slots          [n]        int32
        out, returns   [n, ...]   one array each, in the order of `shapes`; None for new ones
        """
        out = self.staging(len(slots)) if out is None else out
        for array, values in zip(self._arrays, out, strict=True):
            np.take(array, slots, 0, out=values, mode="clip")
        return out

    def staging(self, count: int) -> list[Array]:
        """New memory for `count` pages to be read into, one array each, placed as XLA wants it."""
        return [_aligned((count, *array.shape[1:]), array.dtype) for array in self._arrays]


def _aligned(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    count = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(count + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + count].view(dtype).reshape(shape)
