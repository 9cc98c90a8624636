"""How requests come: so many at once, or at the times of a rate."""

import asyncio
import math
import random
import time

import pytest

from tests.bench.serving.fake_server import Reply, finish, serving, text
from xjax_server.bench.serving.client import Endpoint
from xjax_server.bench.serving.load import Load, arrivals, run_load

STEPS = [(0.05, text("a")), (0.0, finish(1, 1, is_chat=False))]


def _run(load, count, steps=STEPS):
    done = []
    with serving(lambda asked: Reply(steps)) as fake:
        endpoint = Endpoint(url=fake.url, model="m")
        bodies = [endpoint.body({"prompt": [i], "max_tokens": 1}) for i in range(count)]
        began = time.perf_counter()
        found = asyncio.run(run_load(endpoint, bodies, load, source=random.Random(0), on_done=done.append))
        assert found.seconds <= time.perf_counter() - began
    assert all(outcome.error is None for outcome in found.outcomes)
    assert done == found.outcomes and len(done) == count
    assert sorted(asked.body["prompt"][0] for asked in fake.asked) == list(range(count))
    return found, fake


@pytest.mark.parametrize("streams", [1, 3])
def test_a_closed_load_keeps_so_many_under_way(streams):
    found, fake = _run(Load(streams), 9)
    assert fake.most_at_once == streams
    assert found.seconds >= 9 / streams * 0.05
    assert 0 < found.client_seconds < 2


def test_an_open_load_does_not_wait_for_answers():
    found, fake = _run(Load(rate=200.0), 20, [(0.5, text("a")), (0, finish(1, 1, is_chat=False))])
    assert fake.most_at_once > 10
    dues = [outcome.due for outcome in sorted(found.outcomes, key=lambda outcome: outcome.due)]
    assert [due - dues[0] for due in dues] == pytest.approx(arrivals(20, 200.0, random.Random(0)), abs=1e-6)


def test_time_that_a_request_waits_for_its_turn_counts():
    found, fake = _run(Load(1, rate=1000.0), 6, [(0.1, text("a")), (0, finish(1, 1, is_chat=False))])
    assert fake.most_at_once == 1
    assert max(outcome.ttft for outcome in found.outcomes) > 0.5


def test_arrivals_have_the_rate():
    dues = arrivals(20_000, 50.0, random.Random(1))
    gaps = [b - a for a, b in zip(dues, dues[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    assert dues[0] == 0.0 and mean == pytest.approx(1 / 50, rel=0.03)
    # Of an exponential distribution the deviation is the mean.
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(mean, rel=0.05)
    assert arrivals(3, math.inf, random.Random(1)) == [0.0, 0.0, 0.0]


def test_names_tell_loads_apart():
    loads = [Load(1), Load(2), Load(2, 4.0), Load(rate=4.0), Load()]
    assert [load.name for load in loads] == [
        "1 stream", "2 streams", "4 requests/s, 2 streams", "4 requests/s", "all at once",
    ]  # fmt: skip
