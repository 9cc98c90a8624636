"""Recurrent state is swapped with its sequence: random traces keep every text, broken builds do not.

The fake's state hashes every token of its sequence, so one that is lost, stale or another's shows in all
that follows.
"""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from tests.fakes import FakeDevice, FakeLoop
from tests.scheduler.traces import expect_breach, make_cache_trace, run_trace
from xjax.cache.host import HostPool
from xjax.scheduler.pages.swap import SwapBook

NUM_TRACES = 80
# Each must happen at least this often over all traces, or they prove less than they say.
MINIMA = {
    "preemptions": 300,
    "swap_out_states": 150,
    "swap_in_states": 120,
    "swap_failures": 15,
    "recomputed_tokens": 1000,
    "aborts_preempted": 10,
    "aborts_decoding": 8,
    "text_stops": 20,
    "ends_error": 30,
}


def make_trace(seed):
    """Room for few states or many, and for all pages of several sequences."""
    few = int(np.random.default_rng([seed, 2]).integers(1, 6))
    trace = make_cache_trace(seed, has_recurrent=True, host_states=few)
    return dataclasses.replace(trace, broken_moves=0.3) if seed % 4 == 0 else trace


def test_laws_hold():
    totals = Counter()
    for seed in range(NUM_TRACES):
        run = run_trace(make_trace(seed))
        totals.update(run.counts)
        assert run.counts["prefix_hits"] == 0
    assert totals["swap_out_states"] == totals["swap_out_sequences"], "pages and state went apart"
    assert totals["swap_in_states"] == totals["swap_in_sequences"]
    assert {name: totals[name] for name, least in MINIMA.items() if totals[name] < least} == {}


# ---- builds that are broken on purpose ---------------------------------------------------


def without_state(transfer):
    return dataclasses.replace(transfer, rows=transfer.rows[:0], states=transfer.states[:0])


def break_no_copy_back(patch):
    whole = FakeDevice.load
    patch.setattr(FakeDevice, "load", lambda self, transfer: whole(self, without_state(transfer)))


def break_no_copy_out(patch):
    whole = FakeDevice.save
    patch.setattr(FakeDevice, "save", lambda self, transfer: whole(self, without_state(transfer)))


def break_back_into_another_row(patch):
    whole = FakeDevice.load

    def load(self, transfer):
        rows = (transfer.rows + 1) % self.config.max_num_seqs
        return whole(self, dataclasses.replace(transfer, rows=rows))

    patch.setattr(FakeDevice, "load", load)


def break_back_into_the_old_row(patch):
    whole, rows = SwapBook.take_moves, {}

    def take_moves(self):
        moves = whole(self)
        if moves is None:
            return None
        for item in moves.saves:
            rows.update(zip(item.states.tolist(), item.rows, strict=True))
        loads = [
            dataclasses.replace(item, rows=np.array([rows[i] for i in item.states.tolist()], np.int32))
            for item in moves.loads
        ]
        return dataclasses.replace(moves, loads=tuple(loads))

    patch.setattr(SwapBook, "take_moves", take_moves)


def break_state_stays_in_its_row(patch):
    whole = SwapBook._move_out
    patch.setattr(SwapBook, "_move_out", lambda self, s, first, pairs, rows: whole(self, s, first, pairs, []))


def break_state_is_given_up_on_the_host(patch):
    whole = SwapBook.save

    def save(self, sequence):
        is_saved = whole(self, sequence)
        if is_saved:
            self._book.states._free.append(sequence.cache.swapped.state)
        return is_saved

    patch.setattr(SwapBook, "save", save)


def break_loads_before_saves(patch):
    whole = FakeLoop._move

    def move(self, moves):
        whole(self, dataclasses.replace(moves, saves=()))
        whole(self, dataclasses.replace(moves, loads=(), sources=(), targets=()))

    patch.setattr(FakeLoop, "_move", move)


def break_load_before_it_landed(patch):
    patch.setattr(HostPool, "is_ready", lambda self, slots: True)


def break_what_came_back_begins_from_nothing(patch):
    whole = FakeDevice.load

    def load(self, transfer):
        is_done = whole(self, transfer)
        self._queue.append(lambda: self.states.__setitem__(transfer.rows, 0))
        return is_done

    patch.setattr(FakeDevice, "load", load)


def break_a_failed_save_is_trusted(patch):
    whole = SwapBook.end_save
    patch.setattr(SwapBook, "end_save", lambda self, serial, *, ok: whole(self, serial, ok=True))
    lost = FakeDevice.save
    patch.setattr(FakeDevice, "save", lambda self, t: lost(self, t) if t.serial % 3 else (lambda: False))


def break_a_failed_load_forgets_the_state(patch):
    whole = SwapBook._undo

    def undo(self, sequence, swapped):
        whole(self, sequence, None if swapped is None else dataclasses.replace(swapped, state=0))

    patch.setattr(SwapBook, "_undo", undo)


BROKEN = [value for name, value in list(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda item: item.__name__)
def test_broken_build_breaches_the_law(broken, monkeypatch):
    """With the scheduler's own checks off: what users see alone must give it away."""
    broken(monkeypatch)
    expect_breach(make_trace, NUM_TRACES)
