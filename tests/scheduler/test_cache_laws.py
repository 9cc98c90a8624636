"""The laws of shared prefixes and of swap over random traces, and builds broken on purpose."""

import dataclasses
from collections import Counter

import pytest

from tests.fakes import FakeDevice, FakeLoop
from tests.scheduler.traces import expect_breach, make_cache_trace, run_trace
from xjax.cache.host import HostPool
from xjax.cache.index import PrefixIndex, Record
from xjax.cache.keys import KeyChain
from xjax.cache.pool import PagePool
from xjax.scheduler.pages.prefix import PrefixCache
from xjax.scheduler.pages.swap import SwapBook
from xjax.scheduler.roster import Roster
from xjax.scheduler.scheduler import Scheduler

NUM_TRACES = 160
PARTS = 4
# Each must happen at least this often over all traces, or they prove less than they say.
MINIMA = {
    "prefix_hits": 600,
    "prefix_hit_tokens": 6000,
    "prefix_host_hit_tokens": 100,
    "prefix_waits": 40,
    "prefix_misses_window": 20,
    "preemptions": 500,
    "swap_out_sequences": 300,
    "swap_out_pages": 4000,
    "swap_in_sequences": 250,
    "swap_in_pages": 4000,
    "swap_failures": 40,
    "retained_pages": 1000,
    "page_copies": 30,
    "recomputed_tokens": 2000,
    "text_stops": 50,
    "aborts_preempted": 30,
    "aborts_decoding": 20,
    "ends_error": 100,
}


@pytest.fixture(scope="module")
def totals():
    return Counter()


@pytest.mark.parametrize("part", range(PARTS))
def test_laws_hold(part, totals):
    for seed in range(part, NUM_TRACES, PARTS):
        totals.update(run_trace(make_cache_trace(seed)).counts)
    totals["parts"] += 1


def test_events_were_many(totals):
    if totals["parts"] < PARTS:
        pytest.skip("counts are of all traces; some were not run")
    rare = {name: totals[name] for name, least in MINIMA.items() if totals[name] < least}
    assert rare == {}


# ---- builds that are broken on purpose ---------------------------------------------------


def break_no_copy_back(patch):
    patch.setattr(FakeDevice, "load", lambda self, transfer: lambda: True)


def break_no_copy_out(patch):
    patch.setattr(FakeDevice, "save", lambda self, transfer: lambda: True)


def break_no_copy_on_the_device(patch):
    patch.setattr(FakeDevice, "copy", lambda self, moves: None)


def break_loads_before_saves(patch):
    whole = FakeLoop._move

    def move(self, moves):
        whole(self, dataclasses.replace(moves, saves=()))
        whole(self, dataclasses.replace(moves, loads=(), sources=(), targets=()))

    patch.setattr(FakeLoop, "_move", move)


def break_save_after_the_step(patch):
    whole = FakeLoop._move

    def move(self, moves):
        if self._pending_moves:
            whole(self, self._pending_moves)
        self._pending_moves = moves

    patch.setattr(FakeLoop, "_pending_moves", None, raising=False)
    patch.setattr(FakeLoop, "_move", move)


def break_match_one_page_too_many(patch):
    whole = PrefixCache.adopt

    def adopt(self, sequence, match, step_id):
        away = whole(self, sequence, match, step_id)
        sequence.num_computed += self._book.page_size * bool(match.records)
        return away

    patch.setattr(PrefixCache, "adopt", adopt)


def break_keys_forget_the_page_before(patch):
    whole = KeyChain.next
    patch.setattr(KeyChain, "next", lambda self, parent, tokens, salt=b"": whole(self, None, tokens, salt))
    patch.setattr(Record, "is_page", lambda self, parent, tokens: self.tokens == tokens)


def break_tokens_are_not_compared(patch):
    whole = KeyChain.next
    patch.setattr(
        KeyChain, "next", lambda self, parent, tokens, salt=b"": whole(self, parent, bytes(len(tokens)), salt)
    )
    patch.setattr(Record, "is_page", lambda self, parent, tokens: True)


def break_window_pages_are_not_needed(patch):
    patch.setattr(PrefixIndex, "first_page", lambda self, group, num_pages: num_pages * (group > 0))


def break_publish_too_early(patch):
    whole = PrefixCache.publish

    def publish(self, sequence, num_tokens, step_id=None):
        more = min(num_tokens + self._book.page_size, sequence.num_tokens)
        most = min((len(pages) for pages in sequence.pages), default=0) * self._book.page_size
        whole(self, sequence, min(more, most), step_id)

    patch.setattr(PrefixCache, "publish", publish)


def break_failed_steps_stay_published(patch):
    whole = PrefixCache.end_step
    patch.setattr(PrefixCache, "end_step", lambda self, step_id, *, ok: whole(self, step_id, ok=True))
    patch.setattr(PrefixCache, "clear", lambda self: 0)


def break_lost_pages_stay_known(patch):
    patch.setattr(Roster, "forget_all", lambda self: None)


def break_load_before_it_landed(patch):
    patch.setattr(HostPool, "is_ready", lambda self, slots: True)
    patch.setattr(SwapBook, "is_ready", lambda self, sequence: True)


def break_retained_pages_have_no_reference(patch):
    whole = SwapBook.save

    def save(self, sequence):
        is_saved = whole(self, sequence)
        if is_saved:
            for group, pages in enumerate(sequence.pages):
                self._book.pools[group].release(page for page in pages if page)
        return is_saved

    def release(self, pages):
        for page in pages:
            if self._refs[page] > 0:
                given_back(self, [page])

    given_back = PagePool.release
    patch.setattr(SwapBook, "save", save)
    patch.setattr(PagePool, "release", release)


def break_partial_page_stays_behind(patch):
    whole = SwapBook.private_pages

    def private_pages(self, sequence):
        first, private = whole(self, sequence)
        full = sequence.num_computed // self._book.page_size
        return first, [[(i, page) for i, page in part if i < full] for part in private]

    patch.setattr(SwapBook, "private_pages", private_pages)


def break_failed_save_is_trusted(patch):
    whole = SwapBook.end_save
    patch.setattr(SwapBook, "end_save", lambda self, serial, *, ok: whole(self, serial, ok=True))
    lost = FakeDevice.save

    def save(self, transfer):
        if transfer.serial % 3 == 0:
            return lambda: False
        return lost(self, transfer)

    patch.setattr(FakeDevice, "save", save)


def break_failed_load_is_trusted(patch):
    whole = SwapBook.end_load
    patch.setattr(SwapBook, "end_load", lambda self, serial, *, ok: whole(self, serial, ok=True))


def break_starts_on_what_was_taken_back(patch):
    whole = Scheduler.fail

    def fail(self, plan, message):
        for sequence in self._roster.running:
            sequence.cache.matched_step = -1
        return whole(self, plan, message)

    patch.setattr(Scheduler, "fail", fail)
    patch.setattr(Scheduler, "preempt_all", lambda self: None)


BROKEN = [value for name, value in list(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda item: item.__name__)
def test_broken_build_breaches_the_law(broken, monkeypatch):
    """With the scheduler's own checks off: what users see alone must give it away."""
    broken(monkeypatch)
    expect_breach(make_cache_trace, NUM_TRACES)
