"""The cache benchmark with subjects whose times are known, and its real subject with a tiny model."""

import io
import json
import sys

import pytest
from rich.console import Console

from tests.engine.tiny_folder import write_folder
from tests.sources import ROOT
from xjax.errors import EngineError
from xjax_server.bench.cache import report, run
from xjax_server.bench.cache.subject import CacheEngine, answer
from xjax_server.bench.commands.results import compare as compare_files

PLAN = run.Plan(lengths=(40, 64), repeats=2, sequences=3, shared=32, own=16, answer=8, pool=0.5, rounds=2)


@pytest.fixture
def measure(monkeypatch):
    """Run the benchmark with stubs; "wrong": one setting answers otherwise."""
    monkeypatch.chdir(ROOT)

    def measure(manner="right"):
        monkeypatch.setattr(
            run,
            "command",
            lambda model, options: [
                sys.executable, "-m", "tests.bench.cache.stub", json.dumps(options), manner
            ],
        )  # fmt: skip
        return json.loads(json.dumps(run.run(["m/a.gguf"], PLAN, lambda text: None)))

    return measure


def _shown(result):
    text = io.StringIO()
    report.show(result, Console(file=text, width=200))
    return text.getvalue()


def test_ratios(measure, tmp_path, capsys):
    result = measure()
    (model,) = result["models"]
    forty, four = model["hits"]["40"], model["hits"]["64"]
    assert (forty["cached"], four["cached"]) == (32, 48)
    assert forty["seconds"]["cold"] == {"median": 0.04, "low": 0.04, "high": 0.04, "count": 2}
    assert four["seconds"]["hit"]["median"] == four["seconds"]["rest"]["median"] == pytest.approx(0.016)
    assert four["against_rest"] == 1 and four["against_cold"] == pytest.approx(4)
    assert model["sizes"]["pages"] == 6  # half of 3 x 4
    shared, apart = model["work"]["shared"], model["work"]["apart"]
    assert shared["against_partial"] == {"partial swap": 1.0, "whole swap": 1.5, "recompute": 2.0}
    assert apart["against_partial"] == {"partial swap": 1.0, "whole swap": 1.0, "recompute": 2.0}
    assert shared["work_seconds"]["recompute"]["median"] == 4
    assert shared["tokens_per_second"]["whole swap"] == pytest.approx(3 * 8 / 1.5)
    assert shared["agrees"] and shared["counts"]["recompute"]["steps"] == 3
    assert "DIFFERENT" not in _shown(result)
    result["moves"] = _moves()
    assert "ratio" in _shown(result)
    found = report.numbers(result)
    assert found["a.gguf, shared, whole swap: tokens/s"] == pytest.approx(16)
    assert found["load of 4 pages / copy"] == 2.0
    path = tmp_path / "a.json"
    path.write_text(json.dumps(result), encoding="utf-8")
    compare_files(path, path)
    assert "hit of 64: cold / hit" in capsys.readouterr().out


def _moves():
    kinds = ("save", "save_engine", "save_copy", "load", "load_engine", "load_copy")
    case = {name: {"median": 1e-4, "low": 1e-4, "high": 1e-4, "count": 1} for name in kinds}
    return {"page_bytes": 9, "compile": 1.0, "pages": {"4": {**case, "save_ratio": 1.0, "load_ratio": 2.0}}}


def test_different_answers_are_told(measure):
    result = measure("wrong")
    assert not result["models"][0]["work"]["shared"]["agrees"]
    assert "DIFFERENT answers" in _shown(result)


@pytest.mark.device
def test_the_subject_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("XJAX_HOME", str(tmp_path / "home"))
    folder = write_folder(tmp_path / "model")
    options = {
        "max_num_seqs": 2, "max_model_len": 64, "num_pages": 9, "page_size": 8, "preemption_mode": "swap",
        "cpu_mem_fold": 4.0,
    }  # fmt: skip
    subject = CacheEngine(str(folder), options)
    try:
        assert answer(subject, {"do": "describe"})["host_pages"] == 32
        prompt = list(range(5, 30))
        cold, hit = (answer(subject, {"do": "first", "prompt": prompt}) for _ in range(2))
        assert (cold["cached"], hit["cached"]) == (0, 24)
        answer(subject, {"do": "clear"})
        done = answer(subject, {"do": "work", "prompts": [prompt[:12], prompt[12:24]], "num_tokens": 40})
        assert done["counts"]["swap_in_pages"] == done["counts"]["swap_out_pages"] > 0
        with pytest.raises(EngineError, match="knows no 'dance'"):
            answer(subject, {"do": "dance"})
    finally:
        subject.close()
