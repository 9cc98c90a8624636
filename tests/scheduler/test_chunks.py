"""How prompts share a prefill shape, and which shape is taken."""

import numpy as np
import pytest

from xjax.scheduler.chunks import choose_prefill, divide

SHAPES = ((32, 32), (128, 32), (512, 128))


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([5], [5]),
        ([16, 16], [16, 0]),
        ([5, 3, 9], [5, 3, 4]),  # 2 + 1 tiles, one left
        ([100], [16]),
        ([100, 100], [16, 0]),  # none of the young ones can end: the oldest takes all
        ([100, 4, 4, 4], [8, 4, 4, 0]),  # half for those that can
        ([100, 5], [8, 5]),
        ([100, 90, 3], [12, 0, 3]),
        ([4, 100, 4], [4, 8, 4]),
    ],
)
def test_divide(lengths, counts):
    assert divide(lengths, 16, 4) == counts


def test_divide_keeps_its_promises():
    rng = np.random.default_rng(0)
    for _ in range(500):
        tile = int(rng.choice([1, 2, 8]))
        tokens = tile * int(rng.integers(1, 9))
        lengths = rng.integers(1, 3 * tokens, rng.integers(1, 9)).tolist()
        counts = divide(lengths, tokens, tile)
        assert sum(-(-count // tile) for count in counts) <= tokens // tile
        assert all(0 <= count <= length for count, length in zip(counts, lengths, strict=True))
        assert counts[0] >= min(lengths[0], tokens / 2)


@pytest.mark.parametrize(
    ("lengths", "limit", "shape"),
    [
        ([5], 512, 0),
        ([100], 512, 1),
        ([4000], 512, 2),
        ([4000], 200, 1),
        ([4000], 1, 0),  # the smallest is always allowed
        ([30, 30, 30], 512, 1),
        ([128, 128, 128, 128], 512, 2),
    ],
)
def test_choose_prefill(lengths, limit, shape):
    assert choose_prefill(lengths, SHAPES, limit) == shape
