"""The offline benchmark with engines whose times are known."""

import io
import json
import random
import sys

import pytest
from rich.console import Console

from tests.sources import ROOT
from xjax.errors import EngineError
from xjax_server.bench import compare
from xjax_server.bench.machine import Probe, Work
from xjax_server.bench.offline import report
from xjax_server.bench.offline import run as offline
from xjax_server.bench.offline.cases import Plan, new_prompt
from xjax_server.bench.offline.worker import Worker
from xjax_server.bench.samples import summarize

SMALL = {"rows": (1, 2), "prefill": (10,), "steps": 3, "threads": 1, "repeats": 2, "starts": 0}
PLAN = Plan(**SMALL, peers={"fast": "", "gone": ""})


def _echo(*arguments):
    return [sys.executable, "-m", "tests.bench.offline.echo", *arguments]


@pytest.fixture
def commands(monkeypatch):
    """Let the benchmark start echoes in place of engines; by name: seconds and manner."""
    monkeypatch.chdir(ROOT)
    found = {"xjax": _echo("0.010"), "fast": _echo("0.005")}
    monkeypatch.setattr(offline, "MISSING", {"fast": lambda path: None, "gone": lambda path: "not installed"})

    def command(name, model, *, kernels="auto", **settings):
        asked.append((name, settings))
        return found.get(kernels) or found[name]

    asked: list = []
    found["asked"] = asked
    monkeypatch.setattr(offline.worker, "command", command)
    return found


def _probe():
    probe = Probe(1)
    probe.measure = lambda: None  # the rates below stand for what it would find
    probe.reads, probe.gemms = [1e6], [1e9]
    return probe


def _run(plan=PLAN, extra=None):
    probe = _probe()
    result = offline.run_model("m/a.gguf", plan, extra=extra or {}, probe=probe, say=lambda text: None)
    probe.close()
    return result


def test_medians_ratios_and_floor(commands):
    result = _run(extra={"xjax step alone": _echo("0.008")})
    prefill, two = result["cases"]["prefill 10"], result["cases"]["decode 2"]
    assert prefill["seconds"]["xjax"] == {"median": 0.1, "low": 0.1, "high": 0.1, "count": 2}
    assert prefill["tokens_per_second"]["xjax"] == pytest.approx(100)
    assert prefill["ratio"] == {"fast": pytest.approx(0.5)}
    assert two["seconds"]["xjax"]["count"] == 6
    assert two["seconds"]["xjax step alone"]["median"] == pytest.approx(0.016)
    assert two["tokens_per_second"]["fast"] == pytest.approx(200)
    # Two rows of 64 tokens, 3 numbers of 2 bytes each and 2 of the last 32, and 1000 weights of 4 bytes,
    # at a million bytes a second.
    assert two["read_bytes"]["xjax"] == 4000 + 2 * 2 * (3 * 64 + 2 * 32)
    assert two["floor_seconds"]["xjax"] == pytest.approx(5024 / 1e6)
    assert two["times_the_floor"]["xjax"] == two["times_reading"]["xjax"] == pytest.approx(0.020 / 0.005024)
    assert two["host_seconds"]["median"] == 0.001
    assert result["agrees"] == {"fast": True}
    assert result["skipped"] == {"gone": "not installed"}
    assert result["start"] is None
    assert json.loads(json.dumps(result)) == result


def test_kernels_beside_each_other_have_their_own_bytes(commands):
    commands["numba"] = _echo("0.005", "packed")
    result = _run(Plan(**SMALL, kernels=("xla", "numba")))
    one = result["cases"]["decode 1"]
    assert one["ratio"] == {"xjax numba": pytest.approx(0.5)}
    assert one["read_bytes"] == {"xjax": 4512, "xjax numba": 600 + 512}
    assert one["times_reading"]["xjax numba"] == pytest.approx(0.005 / 0.001112)
    assert result["agrees"] == {"xjax numba": True}
    assert result["told"]["xjax numba"]["read_bytes"] == 600


def test_a_peer_without_tokens_is_not_said_to_agree(commands):
    commands["fast"] = _echo("0.005", "mute")
    result = _run()
    assert result["agrees"] == {}
    assert result["cases"]["decode 1"]["ratio"] == {"fast": pytest.approx(0.5)}


def test_pages_are_those_of_the_largest_case(commands):
    plan = Plan(rows=(1, 16), prefill=(512, 2048), context=64)
    assert plan.most_tokens == 2049
    assert plan.num_pages == 16 * 23 + 1
    assert Plan(rows=(1,), prefill=(2048,)).num_pages == 129 + 1
    _run(PLAN)
    assert commands["asked"][0] == ("xjax", {"threads": 1, "rows": 2, "tokens": 364, "pages": 47})


def test_floor_of_many_rows_is_arithmetic():
    probe = _probe()
    assert probe.floor(Work(1e3, 1e8)) == pytest.approx(0.1)
    probe.reads = []
    assert probe.floor(Work(1e3, 1e8)) is None
    probe.close()


def test_no_sample_is_none(commands):
    result = _run(Plan(rows=(1,), prefill=(10,), repeats=0, starts=0))
    case = result["cases"]["decode 1"]
    assert case["seconds"] == {"xjax": None}
    assert case["tokens_per_second"] == {"xjax": None}
    assert case["times_the_floor"] == {"xjax": None}


def test_a_peer_that_computes_something_else_is_told(commands):
    commands["fast"] = _echo("0.005", "bad")
    result = _run()
    assert result["agrees"] == {"fast": False}
    assert "OTHER TOKENS" in _shown(result)


def test_a_peer_that_cannot_start_is_skipped(commands):
    commands["fast"] = _echo("0.005", "absent")
    result = _run()
    assert result["skipped"]["fast"] == "fast: no weights here"
    assert list(result["cases"]["decode 1"]["seconds"]) == ["xjax"]


def test_a_dying_engine_is_an_error(commands):
    commands["xjax"] = _echo("0.005", "dies")
    with pytest.raises(EngineError, match="xjax ended: something broke"):
        _run()


def test_prompts_are_new():
    source = random.Random(3)
    prompts = [tuple(new_prompt(64, 50000, source)) for _ in range(100)]
    assert len(set(prompts)) == 100
    assert min(map(min, prompts)) >= 300
    assert max(map(max, prompts)) < 50000


def test_worker_refuses_an_unknown_question(monkeypatch):
    monkeypatch.chdir(ROOT)
    child = Worker("echo", _echo("0.1"))
    with pytest.raises(EngineError, match="knows no 'dance'"):
        child.ask("dance")
    assert child.ask("describe")["vocab_size"] == 500
    child.close()


def test_probe_measures_this_machine():
    probe = Probe(2)
    probe.measure()
    assert 1e8 < probe.reads[0] < 1e12
    assert 1e8 < probe.gemms[0] < 1e14
    probe.close()


def _whole(model):
    machine = {
        "processor": "p", "cores": 2, "memory_gb": 8.0, "load": 0.1, "python": "3", "versions": {"jax": "0"},
    }  # fmt: skip
    rates = {"read_bytes_per_second": None, "gemm_flops": None}
    host = {"64": {"host_seconds": summarize([0.001, 0.002, 0.003]), "work_seconds": None}}
    return {"machine": machine, "flags": {"threads": 2}, "rates": rates, "models": [model], "host": host}


def _shown(model):
    out = io.StringIO()
    report.show(_whole(model), Console(file=out, width=140))
    return out.getvalue()


def test_report_names_everything(commands):
    text = _shown(_run())
    for part in (
        "a.gguf",
        "prefill 10",
        "decode 2",
        "fast",
        "gone: skipped: not installed",
        "same greedy tokens",
        "64 rows: 2.000 ms, - ms of work",
    ):
        assert part in text
    assert "0.50" in text


@pytest.mark.parametrize(
    ("load", "peers", "is_told"), [(0.6, {"a": ""}, True), (0.6, {}, False), (0.4, {"a": ""}, False)]
)
def test_a_busy_machine_is_told(commands, load, peers, is_told):
    result, out = _whole(_run()), io.StringIO()
    result["machine"]["load"], result["flags"]["peers"] = load, peers
    report.show(result, Console(file=out, width=140))
    assert ("OTHER WORK WAS RUNNING" in out.getvalue()) is is_told


def test_compare_gives_ratios(commands):
    a, b = _whole(_run()), _whole(_run())
    b["models"][0]["cases"]["decode 1"]["seconds"]["xjax"]["median"] *= 2
    b["models"][0]["cases"]["decode 2"]["seconds"]["xjax"] = None
    b["machine"] = b["machine"] | {"cores": 64}
    out = io.StringIO()
    compare.compare(a, b, report.numbers, Console(file=out, width=140))
    lines = {
        line.rsplit(None, 3)[0]: line.split()[-1] for line in out.getvalue().splitlines() if "xjax" in line
    }
    assert lines["a.gguf: decode 1: xjax: seconds"] == "2.00"
    assert "a.gguf: decode 2: xjax: seconds" not in lines
    assert "not the same machine: cores 2 and 64" in out.getvalue()
