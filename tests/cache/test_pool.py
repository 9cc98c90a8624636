"""The page pool: exact references, no page twice, misuse seen."""

import numpy as np
import pytest

from xjax.cache.pool import PagePool


def test_pages_are_handed_out_once_and_come_back():
    pool = PagePool(8)
    assert (pool.num_free, pool.num_usable) == (7, 7)
    first, second = pool.allocate(3), pool.allocate(4)
    assert sorted(first + second) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.allocate(0) == []
    with pytest.raises(AssertionError, match="beyond"):
        pool.allocate(1)
    pool.retain(first[:1])
    pool.release(first)
    assert pool.num_free == 2
    assert [pool.refs(page) for page in first] == [1, 0, 0]
    pool.check([first[:1], second])


def test_misuse_is_seen():
    pool = PagePool(4)
    (page,) = pool.allocate(1)
    pool.release([page])
    for call in (pool.release, pool.retain):
        with pytest.raises(AssertionError):
            call([page])
    with pytest.raises(AssertionError):
        pool.release([0])
    with pytest.raises(AssertionError):
        PagePool(1)


@pytest.mark.parametrize("holders", [[], [[1]], [[1], [1], [1]], [[1, 2], [1]]])
def test_check_sees_a_wrong_count(holders):
    pool = PagePool(4)
    pages = pool.allocate(1)
    pool.retain(pages)
    pool.check([pages, [0, *pages]])
    with pytest.raises(AssertionError):
        pool.check([[pages[0] if page == 1 else 3 for page in line] for line in holders])


def test_random_use_against_a_plain_count():
    rng, pool = np.random.default_rng(3), PagePool(20)
    holders: list[list[int]] = []
    for _ in range(2000):
        kind = rng.integers(3)
        if kind == 0 and pool.num_free:
            holders.append(pool.allocate(int(rng.integers(1, pool.num_free + 1))))
        elif kind == 1 and holders:
            pages = holders[rng.integers(len(holders))][:2]
            pool.retain(pages)
            holders.append(list(pages))
        elif holders:
            pool.release(holders.pop(rng.integers(len(holders))))
        pool.check(holders)
    assert pool.num_free == 19 - len({page for pages in holders for page in pages})
