"""Partial swap: what stays, what goes, and that every failure on the way rolls back and ends well."""

from collections import Counter

import pytest

from tests.fakes import COPIES
from tests.scheduler.pages.swapping import SIZE, Play, letters
from tests.scheduler.traces import make_cache_trace, run_trace
from xjax.request import FinishReason
from xjax.scheduler.pages.prefix import NO_MATCH
from xjax.scheduler.pages.swap import SwapBook
from xjax.scheduler.roster import Roster
from xjax.scheduler.sequence import Status


def test_what_stays_was_found_or_is_used_elsewhere_and_all_else_goes(monkeypatch):
    whole, lose, counts, rosters = SwapBook.save, Roster.__init__, Counter(), {}

    def note(self, config):
        lose(self, config)
        rosters[id(self.swap)] = self

    def save(self, sequence):
        groups = range(len(sequence.pages))
        computed = -(-sequence.num_computed // self._book.page_size)
        before = [pages[:computed] for pages in sequence.pages]
        used: list[Counter[int]] = [Counter() for _ in groups]
        for group in rosters[id(self)].groups.values():
            for g in groups:
                used[g].update(group.held_in(g))
                used[g].update(page for item in group.live if item is not sequence for page in item.pages[g])
        stays = 0
        while stays < len(before[0]) and (
            stays < sequence.cache.num_matched
            or (
                any(before[g][stays] for g in groups)
                and all(used[g][before[g][stays]] for g in groups if before[g][stays])
            )
        ):
            stays += 1
        stays *= self._retains
        planned = len(self._planned_saves)
        is_saved = whole(self, sequence)
        if is_saved:
            assert [list(pages) for pages in sequence.pages] == [pages[:stays] for pages in before]
            (transfer,) = self._planned_saves[planned:]
            for g in groups:
                assert transfer.pages[g].tolist() == [page for page in before[g][stays:] if page]
            swapped = sequence.cache.swapped
            assert swapped.first == stays
            for g in groups:
                assert [bool(slot) for slot in swapped.slots[g]] == [bool(page) for page in before[g][stays:]]
                assert swapped.in_group(g) == transfer.slots[g].tolist()
            counts["saves"] += 1
            counts["with pages that stay"] += stays > 0
            counts["stay because used elsewhere"] += stays > sequence.cache.num_matched
            counts["partial last page"] += sequence.num_computed % self._book.page_size > 0
        return is_saved

    monkeypatch.setattr(Roster, "__init__", note)
    monkeypatch.setattr(SwapBook, "save", save)
    for seed in range(200, 230):
        run_trace(make_cache_trace(seed))
    assert counts["saves"] >= 50 and counts["with pages that stay"] >= 15, counts
    assert counts["stay because used elsewhere"] >= 2 and counts["partial last page"] >= 10, counts


def crowd(play: Play) -> tuple[str, str]:
    """Two that fit together at first; the younger has to yield. Each needs up to 16 of 20 pages."""
    old = play.submit(letters("abcd"), 46)
    young = play.submit(letters("wxyz"), 44)
    return old, young


def test_no_byte_more_than_the_private_pages_is_moved():
    play = Play()
    play.submit(letters("abcdef"), 1)
    play.run()
    old, young = play.submit(letters("klmn"), 46), play.submit(letters("abcdefg"), 40)
    play.until(lambda: play.is_swapped(young))
    sequence = play.live(young)
    assert sequence.cache.swapped.first == 6  # what it found
    private = -(-sequence.num_computed // SIZE) - 6
    assert len(sequence.cache.swapped.in_group(0)) == private == play.counts["swap_out_pages"]
    assert [len(pages) for pages in sequence.pages] == [6] and play.counts["retained_pages"] == 6
    play.run()
    assert play.counts["swap_in_pages"] == play.counts["swap_out_pages"] == play.loop.moved_pages / 2
    assert play.counts["recomputed_tokens"] == 0
    assert play.cached(young) == 24 and play.cached(old) == 0


def test_a_swapped_sequence_waits_for_room_and_computes_nothing_twice():
    play = Play()
    old, young = crowd(play)
    play.until(lambda: play.is_swapped(young))
    play.until(lambda: not play.is_swapped(young))
    assert play.live(young).status is Status.RUNNING
    play.run()
    assert play.counts["recomputed_tokens"] == 0
    # Each has its last token sampled and never computed; a row may run ahead of an end that is not foreseen.
    assert play.loop.num_forward == (16 + 46 - 1) + (16 + 44 - 1)


@pytest.mark.parametrize("host", [None, 0, 3])
def test_a_host_pool_that_is_full_or_missing_means_to_compute_again(host):
    play = Play(host=host)
    crowd(play)
    play.run()
    assert play.counts["swap_out_pages"] == 0 and play.counts["recomputed_tokens"] > 0


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_a_save_that_fails_means_to_compute_again(delay):
    play = Play(loop={"broken_moves": lambda serial: serial == 1, "move_delay": lambda serial: delay})
    crowd(play)
    play.run()
    assert play.counts["swap_failures"] == 1 and play.counts["recomputed_tokens"] > 0
    assert len(play.roster.book.index.kept_slots(0)) == 0


@pytest.mark.parametrize("num_broken", [1, 2, 3, 10**6])
def test_a_load_that_fails_is_tried_again_and_not_for_ever(num_broken, monkeypatch):
    whole, loads = SwapBook.end_load, []

    def end_load(self, serial, *, ok):
        loads.append((serial, ok))
        whole(self, serial, ok=ok)

    monkeypatch.setattr(SwapBook, "end_load", end_load)
    play = Play(prefix_cache=False, loop={"broken_moves": lambda serial: 1 < serial <= 1 + num_broken})
    _, young = crowd(play)
    play.until(lambda: play.is_swapped(young))
    held = play.live(young).cache.swapped.in_group(0)
    play.until(lambda: play.counts["swap_failures"] > 0)
    if num_broken < 3:
        assert play.live(young).cache.swapped.in_group(0) == held  # as before
    play.run()
    assert play.counts["swap_failures"] == min(num_broken, 3)
    assert (play.counts["recomputed_tokens"] > 0) == (num_broken >= 3)


def test_a_prefix_on_the_host_that_cannot_be_loaded_is_a_miss():
    play = Play(loop={"broken_moves": lambda serial: serial > 1})
    _, young = crowd(play)
    play.until(lambda: play.is_swapped(young))
    play.steps(2)
    play.loop.abort(young)  # its pages stay on the host, for others
    play.until(lambda: young not in play.roster.groups)
    assert play.roster.book.index.num_on_host > 0
    again = play.submit(letters("wxyz"), 4)
    play.until(lambda: play.loop.is_idle)
    assert play.counts["swap_failures"] == 1 and play.cached(again) == 0
    assert play.counts["prefix_hits"] == play.counts["prefix_host_hit_tokens"] == 0
    assert play.events[again][-1].finish_reason is FinishReason.LENGTH
    last = play.submit(letters("wxyz"), 4)
    play.until(lambda: play.loop.is_idle)
    assert play.cached(last) == 12 and play.counts["prefix_host_hit_tokens"] == 0


def test_a_prefix_on_the_host_is_found_and_comes_back_once():
    play = Play()
    _, young = crowd(play)
    play.until(lambda: play.is_swapped(young))
    play.steps(2)
    play.loop.abort(young)
    again, third = play.submit(letters("wxyzw"), 4), play.submit(letters("wxyz"), 4)
    play.run()
    assert play.cached(again) == 16 and play.counts["prefix_host_hit_tokens"] == 16
    assert play.cached(third) >= 12 and play.counts["swap_failures"] == 0


@pytest.mark.parametrize("state", ["saving", "on the host", "loading", "loaded"])
@pytest.mark.parametrize("way", ["abort", "finish"])
def test_an_end_in_any_state_leaves_nothing(state, way):
    play = Play(loop={"move_delay": lambda serial: 3})
    old, young = crowd(play)
    play.until(lambda: play.is_swapped(young))
    if state == "on the host":
        play.steps(6)
        assert play.roster.swap.is_ready(play.live(young))
    if state.startswith("load"):
        play.until(lambda: not play.is_swapped(young))
        assert play.live(young).cache.is_loading
        play.steps(2 if state == "loaded" else 0)
    if way == "abort":
        play.loop.abort(young)
    else:
        play.loop.finish(young, 0, 2)
    play.run()
    reason = FinishReason.ABORT if way == "abort" else FinishReason.STOP
    assert play.events[young][-1].finish_reason is reason
    assert play.events[old][-1].finish_reason is FinishReason.LENGTH
    play.loop.scheduler.prefix.clear()
    assert all(host.num_free == host.num_usable for host in play.roster.book.hosts)


@pytest.mark.parametrize("rows", [2, 6], ids=["one after the other", "at once"])
def test_copies_that_fail_send_their_sequences_back(rows):
    play = Play(loop={"broken_moves": lambda serial: serial >= COPIES}, rows=rows)
    name = play.submit(letters("xyz")[:-1], 6, n=3)
    play.run()
    assert play.loop.num_failed_copies == 1 and play.counts["page_copies"] > 0  # nobody tries that again
    assert {event.sample_id for event in play.events[name]} == {0, 1, 2}


def test_a_page_whose_copy_was_only_planned_is_not_saved():
    play = Play(rows=2)
    name = play.submit(letters("xyz")[:-1], 6, n=2)
    play.until(lambda: play.roster.groups[name].shared is not None)
    sample = play.roster.groups[name].sequences[1]
    play.roster.admit(sample, 1.0, NO_MATCH)
    assert sample.num_computed == 3 * SIZE - 2 and sample.cache.swapped is None
    play.roster.preempt(sample, swap=True)
    assert play.loop.scheduler.swap.take_moves() is None
    assert sample.status is Status.WAITING and not sample.num_computed
    play.run()
    assert play.counts["swap_out_pages"] == 0


@pytest.mark.parametrize("windows", [(None,), (None, 7), (5,)])
def test_a_sequence_swapped_many_times_finishes(windows):
    play = Play(windows=windows)
    play.submit(letters("abc"), 1)
    play.run()
    long, other = play.submit(letters("abcxy"), 46), play.submit(letters("klm"), 30)
    partial = 0
    for i in range(400):
        play.loop.step()
        if long in play.roster.groups and play.live(long).status is Status.RUNNING and i % 3 == 0:
            partial += play.live(long).num_computed % SIZE > 0
            play.roster.preempt(play.live(long), swap=True)
            assert play.is_swapped(long) and len(play.live(long).pages[0]) == 3
    play.run()
    assert play.counts["swap_out_sequences"] >= 12 and partial >= 8
    assert play.counts["recomputed_tokens"] == 0 and play.cached(long) == 12 and play.cached(other) == 0


@pytest.mark.parametrize("host", [60, 6, None])
def test_two_retained_prefixes_of_sixty_percent_each_make_progress(host):
    play = Play(host=host)
    first, second = letters("abcdefghijkl"), letters("mnopqrstuvwx")  # 12 of 20 pages each
    play.submit(first, 1)
    play.run()
    play.submit(first + [7], 24, priority=2)
    waits = play.submit(first + [8], 24)
    play.until(lambda: play.live(waits).status is Status.RUNNING)
    play.until(lambda: play.live(waits).status is Status.WAITING)
    held = len(play.live(waits).pages[0])
    assert held == (12 if host else 0)
    play.submit(second + [7], 24, priority=1)
    play.submit(second + [8], 24)
    play.submit(first + [9], 20)
    play.run()
    assert play.counts["swap_out_sequences"] >= (host == 60)


def test_many_prefixes_larger_than_the_pool_make_progress():
    for seed, host in enumerate((60, 20, 4, None)):
        play = Play(host=host, loop={"broken_moves": lambda serial, n=seed: n == 1 and serial % 5 == 0})
        prefixes = [letters("abcdefghijkl"), letters("mnopqrstuvwx"), letters("ABCDEFGHIJKL")]
        for i in range(12):
            play.submit(prefixes[i % 3] + [i + 2], 20 + i % 5, priority=i % 3)
            play.steps(i % 4 * 5)
        play.run()


def test_after_a_failed_step_nobody_goes_on_from_what_it_published():
    for is_swapped in (False, True):
        play = Play()
        scheduler = play.loop.scheduler
        play.submit(letters("abcd"), 8)
        first = scheduler.plan(1.0)
        other = play.submit(letters("abcde"), 8)
        second = scheduler.plan(2.0)  # finds what the first step has not computed yet
        sequence = play.live(other)
        assert sequence.cache.num_matched == 4 and sequence.num_computed > 0
        if is_swapped:
            scheduler.cancel(second)
            play.roster.preempt(sequence, swap=True)
            assert len(sequence.pages[0]) == 4
        scheduler.fail(first, "lost")
        if is_swapped:
            assert sequence.status is Status.WAITING and sequence.cache.swapped is None
            assert not any(sequence.pages) and not sequence.num_computed
            scheduler.check()
        assert len(play.roster.book.index) == 0
