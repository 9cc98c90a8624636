"""The laws of the scheduler over random traces, and builds broken on purpose that must breach them."""

from collections import Counter

import pytest

from tests.fakes import FakeLoop, answer_alone
from tests.scheduler.traces import make_trace, run_trace

NUM_TRACES = 160
PARTS = 4
# Each must happen at least this often over all traces, or they prove less than they say.
MINIMA = {
    "preemptions": 60,
    "recomputed_tokens": 600,
    "chunk_splits": 1000,
    "stalls": 500,
    "bypasses": 60,
    "shared_tokens": 1500,
    "oldest_checked": 5000,
    "refused_requests": 8,
    "text_stops": 60,
    "aborts_queued": 40,
    "aborts_prefilling": 5,
    "aborts_decoding": 25,
    "aborts_preempted": 2,
    "ends_length": 500,
    "ends_stop": 100,
    "ends_abort": 100,
    "ends_error": 150,
}


@pytest.fixture(scope="module")
def totals():
    return Counter()


@pytest.mark.parametrize("part", range(PARTS))
def test_laws_hold(part, totals):
    for seed in range(part, NUM_TRACES, PARTS):
        totals.update(run_trace(make_trace(seed)).counts)
    totals["parts"] += 1


def test_events_were_many(totals):
    if totals["parts"] < PARTS:
        pytest.skip("counts are of all traces; some were not run")
    rare = {name: totals[name] for name, least in MINIMA.items() if totals[name] < least}
    assert rare == {}
