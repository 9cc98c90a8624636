"""Pages in host memory: every bit comes back, wherever it was written."""

import ml_dtypes
import numpy as np
import pytest

from xjax.storage.host import HostPages

SHAPES = [(2, 4, 8), (2, 4, 8), (1, 4, 3)]


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Any bits at all: NaN with payloads, infinities, subnormals."""
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


@pytest.mark.parametrize(
    "dtype", [np.float32, np.uint16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8]
)
def test_bits_come_back(dtype):
    rng, dtype = np.random.default_rng(0), np.dtype(dtype)
    host = HostPages(SHAPES, dtype, 30)
    assert host.page_bytes == sum(int(np.prod(shape)) for shape in SHAPES) * dtype.itemsize
    kept: dict[int, list[np.ndarray]] = {}
    for _ in range(40):
        slots = rng.permutation(np.arange(1, 31, dtype=np.int32))[: rng.integers(1, 12)]
        pages = [random_bits(rng, (len(slots), *shape), dtype) for shape in SHAPES]
        host.write(slots, pages)
        kept.update({int(slot): [part[i].copy() for part in pages] for i, slot in enumerate(slots)})
        asked = rng.permutation(np.array(list(kept), np.int32))
        for part, values in enumerate(host.read(asked)):
            assert values.dtype == dtype and values.ctypes.data % 64 == 0
            expected = np.stack([kept[int(slot)][part] for slot in asked])
            assert values.tobytes() == expected.tobytes()


def test_what_was_read_is_a_copy():
    host = HostPages([(2,)], np.float32, 4)
    slots = np.array([3, 1], np.int32)
    host.write(slots, [np.array([[1, 2], [3, 4]], np.float32)])
    (values,) = host.read(slots)
    host.write(slots, [np.zeros((2, 2), np.float32)])
    assert values.tolist() == [[1, 2], [3, 4]]
    values[:] = 9
    assert host.read(slots)[0].tolist() == [[0, 0], [0, 0]]


def test_no_page_is_no_byte():
    host = HostPages([(2, 3)], np.float32, 0)
    none = np.empty(0, np.int32)
    host.write(none, [np.empty((0, 2, 3), np.float32)])
    assert host.read(none)[0].shape == (0, 2, 3)
