"""Figures from outcomes that were made by hand."""

import json

import numpy as np
import pytest

from xjax_server.bench.samples import nearest_rank, percentiles
from xjax_server.bench.serving.client import Outcome
from xjax_server.bench.serving.load import Load, Repetition
from xjax_server.bench.serving.measure import Slo, figures

LOAD = Load(2)
ANY = Slo()


def _outcome(ttft, tpot, count, *, due=10.0, prompt=5, error=None):
    first = due + ttft
    last = first + tpot * (count - 1)
    return Outcome(
        due, first, last, last, [tpot] * (count - 1), prompt_tokens=prompt, output_tokens=count, error=error
    )


def _figures(outcomes, seconds=2.0, slo=ANY, output_len=None, client=None):
    return figures(LOAD, [Repetition(outcomes, seconds, client)], slo, output_len=output_len)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 99, 100, 101, 257])
def test_nearest_rank_is_what_numpy_calls_inverted_cdf(count):
    samples = np.random.default_rng(count).normal(size=count)
    for percent in (1, 10, 50, 90, 99, 100):
        expected = np.percentile(samples, percent, method="inverted_cdf")
        assert nearest_rank(sorted(samples), percent) == expected
    found = percentiles(samples.tolist())
    assert found["p99"] == np.percentile(samples, 99, method="inverted_cdf")
    assert found["count"] == count and found["mean"] == pytest.approx(samples.mean())


def test_a_percentile_is_a_sample():
    assert [nearest_rank([1, 2, 3, 4], percent) for percent in (25, 50, 75, 76, 99)] == [1, 2, 3, 4, 4]


def test_rates_and_times():
    found = _figures([_outcome(0.2, 0.01, 11), _outcome(0.4, 0.03, 21)], client=0.016)
    assert found["output_tokens_per_second"]["median"] == 32 / 2
    assert found["total_tokens_per_second"]["median"] == (32 + 10) / 2
    assert found["requests_per_second"]["median"] == 1.0
    assert found["ttft"]["p50"] == pytest.approx(0.2) and found["ttft"]["p90"] == pytest.approx(0.4)
    assert found["tpot"]["p99"] == pytest.approx(0.03)
    assert found["e2e"]["high"] == pytest.approx(0.4 + 0.6)
    assert found["itl"]["count"] == 30
    assert found["client_seconds_per_token"]["median"] == pytest.approx(0.0005)
    assert found["client_share"]["median"] == pytest.approx(0.008)
    assert found["goodput"] is None
    assert json.loads(json.dumps(found)) == found


def test_failures_are_apart():
    bad = [_outcome(9.0, 9.0, 99, error="HTTP 503: loading"), Outcome(10.0, error="HTTP 503: loading")]
    alone, mixed = _figures([_outcome(0.2, 0.01, 11)]), _figures([_outcome(0.2, 0.01, 11), *bad])
    assert (mixed["completed"], mixed["failed"]) == (1, 2)
    assert mixed["errors"] == {"HTTP 503: loading": 2}
    for name in ("ttft", "tpot", "itl", "e2e", "output_tokens_per_second", "requests_per_second"):
        assert mixed[name] == alone[name]


@pytest.mark.parametrize("outcomes", [[], [Outcome(10.0, error="x")]])
def test_no_sample_is_none_and_never_zero(outcomes):
    found = _figures(outcomes)
    for name in (
        "ttft", "tpot", "itl", "e2e", "output_tokens_per_second", "total_tokens_per_second",
        "requests_per_second", "goodput", "prompt_tokens", "output_tokens", "client_seconds_per_token",
    ):  # fmt: skip
        assert found[name] is None, name


def test_one_answer_without_usage_leaves_the_rate_open():
    silent = _outcome(0.2, 0.01, 11)
    silent.output_tokens = silent.prompt_tokens = None
    found = _figures([_outcome(0.2, 0.01, 11), silent])
    assert found["output_tokens_per_second"] is None
    assert found["requests_per_second"]["median"] == 1.0
    assert found["tpot"]["count"] == 1 and found["ttft"]["count"] == 2


def test_goodput_counts_requests_that_keep_everything():
    outcomes = [
        _outcome(0.1, 0.01, 11),
        _outcome(0.3, 0.01, 11),  # late
        _outcome(0.1, 0.05, 11),  # slow
        _outcome(0.1, 0.01, 91),  # long
        _outcome(0.1, 0.0, 1),  # one token has no TPOT to keep
        _outcome(0.1, 0.01, 11, error="failed"),
    ]
    slo = Slo(ttft=0.2, tpot=0.02, e2e=0.5)
    assert [slo.is_met(outcome) for outcome in outcomes] == [True, False, False, False, True, False]
    assert _figures(outcomes, slo=slo)["goodput"]["median"] == 2 / 2.0
    assert _figures(outcomes[1:2], slo=slo)["goodput"]["median"] == 0.0


def test_an_unknown_time_is_not_kept():
    silent = _outcome(0.1, 0.01, 11)
    silent.output_tokens = None
    assert not Slo(tpot=1.0).is_met(silent)
    assert Slo(ttft=1.0).is_met(silent)


def test_other_lengths_are_told():
    assert _figures([_outcome(0.1, 0.01, 11), _outcome(0.1, 0.01, 12)], output_len=12)["other_length"] == 1
    assert _figures([_outcome(0.1, 0.01, 11)])["other_length"] == 0


def test_repetitions_have_a_rate_each_and_times_together():
    repetitions = [Repetition([_outcome(0.1, 0.01, 11)], 1.0), Repetition([_outcome(0.3, 0.01, 11)], 2.0)]
    found = figures(LOAD, repetitions, Slo(), output_len=None)
    assert found["output_tokens_per_second"] == {"median": 8.25, "low": 5.5, "high": 11.0, "count": 2}
    assert found["ttft"]["count"] == 2
