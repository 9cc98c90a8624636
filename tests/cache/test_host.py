"""Host slots: held by the mover while bytes move, and never handed out before it is done."""

from collections import Counter

import numpy as np
import pytest

from xjax.cache.host import HostPool


def test_a_slot_that_is_given_up_while_bytes_land_is_not_handed_out():
    host = HostPool(3)
    slots = host.allocate(2)
    assert not host.is_ready(slots) and host.is_ready([3]) and host.num_free == 1
    host.release(slots)
    assert host.num_free == 1
    with pytest.raises(AssertionError, match="beyond"):
        host.allocate(2)
    host.end_save(slots)
    assert host.num_free == 3 and host.is_ready(slots)
    host.check([])


def test_a_slot_that_is_given_up_while_it_is_read_is_not_handed_out():
    host = HostPool(2)
    slots = host.allocate(2)
    with pytest.raises(AssertionError, match="before its bytes"):
        host.begin_load(slots)
    host.end_save(slots)
    host.begin_load(slots)
    host.begin_load(slots[:1])  # a second reader
    host.release(slots)
    assert host.num_free == 0
    host.end_load(slots)
    assert host.num_free == 1
    host.check(host.busy)
    host.end_load(slots[:1])
    assert host.num_free == 2


def test_there_may_be_none():
    host = HostPool(0)
    assert host.allocate(0) == [] and host.num_available == 0
    host.check([])


def test_random_use_against_a_plain_count():
    rng, host = np.random.default_rng(1), HostPool(12)
    owners: list[list[int]] = []
    saving: list[list[int]] = []
    loading: list[list[int]] = []
    kept: set[int] = set()
    for _ in range(1500):
        kind = rng.integers(7)
        if kind == 0 and host.num_free:
            slots = host.allocate(int(rng.integers(1, host.num_free + 1)))
            assert not {*sum(owners + saving + loading, [])} & {*slots} and not kept & {*slots}
            owners.append(slots)
            saving.append(slots)
        elif kind == 1 and saving:
            host.end_save(saving.pop(rng.integers(len(saving))))
        elif kind == 2 and owners:
            slots = owners[rng.integers(len(owners))]
            if host.is_ready(slots):
                host.begin_load(slots)
                loading.append(slots)
        elif kind == 3 and loading:
            host.end_load(loading.pop(rng.integers(len(loading))))
        elif kind == 4 and owners:
            host.release(owners.pop(rng.integers(len(owners))))
        elif kind == 5 and owners:
            for slot in owners[rng.integers(len(owners))]:
                if slot not in kept:
                    host.keep(slot)
                    kept.add(slot)
        elif kept:
            slot = sorted(kept)[rng.integers(len(kept))]
            host.drop(slot)
            kept.remove(slot)
        host.check([*owners, *saving, *loading], kept)
        busy = Counter(sum(host.busy, []))
        assert busy == Counter(sum(saving + loading, []))
        held = {*sum(owners + saving + loading, [])}
        assert host.num_free == 12 - len(held | kept) and host.num_idle == len(kept - held)
