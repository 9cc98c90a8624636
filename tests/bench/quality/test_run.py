"""Perplexity and agreement of configurations whose answers are known."""

import json
import math
import sys

import pytest
from rich.console import Console

from tests.sources import ROOT
from xjax.errors import EngineError, RequestError
from xjax_server.bench.quality import report, run

# A subject that knows every token but each third, by how much its options say, and another best token
# at each place that they name.
CHILD = """
import json, sys
from xjax_server.bench.offline.worker import serve
options = json.loads(sys.argv[2])

class Fake:
    def close(self):
        pass

def answer(subject, question):
    do = question.pop("do")
    if do == "describe":
        return {"weights_bytes": options.get("bytes", 400), "options": {"kernels": "x"}}
    if do == "encode":
        return {"ids": list(range(10, 10 + question["num_tokens"])), "prefix": [1] * options["prefix"]}
    if do == "score":
        given, found = question["num_given"], {"logprobs": [], "best": [], "margins": []}
        for window in question["windows"]:
            ids = window[given:]
            assert 1 not in ids
            found["logprobs"].append([-1.0 - options.get("off", 0.0)] * len(ids))
            found["best"].append([token + (token in options.get("wrong", [])) for token in ids])
            found["margins"].append([token / 100 for token in ids])
        return found
    return {"ids": [[5] * options.get("same", question["num_tokens"]) +
                    [6] * (question["num_tokens"] - options.get("same", question["num_tokens"]))
                    for _ in question["prompts"]]}

serve(Fake(), answer)
"""


@pytest.fixture
def subject(monkeypatch, tmp_path):
    """Let the benchmark start fakes in place of engines."""
    (tmp_path / "fake.py").write_text(CHILD)
    real = run.Worker
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        run,
        "Worker",
        lambda name, command: real(name, [sys.executable, str(tmp_path / "fake.py"), *command[-2:]]),
    )


def _result(candidate, tmp_path, *, prefix=0):
    text = tmp_path / "text.txt"
    text.write_text("some words")
    plan = run.Plan(
        reference={"prefix": prefix}, candidates=({"prefix": prefix, **candidate},), tokens=40, window=16,
        prompts=3, answer=10,
    )  # fmt: skip
    result = run.run(["m/a.gguf"], text, plan, lambda _: None)
    assert json.loads(json.dumps(result)) == result
    return result


@pytest.mark.parametrize(("prefix", "scored"), [(0, 37), (1, 40)])
def test_the_same_agrees(subject, tmp_path, prefix, scored):
    model = _result({}, tmp_path, prefix=prefix)["models"][0]
    assert model["tokens"] == scored  # without a prefix nothing stands before the first of a window
    assert model["reference"]["perplexity"] == pytest.approx(math.e)
    case = next(iter(model["candidates"].values()))
    assert (case["ratio"], case["is_within"], case["agreement"], case["margin_of_others"]) == (
        1,
        True,
        1,
        None,
    )
    assert (case["same_tokens"], case["whole_answers"], case["answers"]) == (10, 3, 3)


@pytest.mark.parametrize(
    ("off", "within"), [(0.0049, True), (0.0051, False), (-0.0049, True), (-0.0051, False)]
)
def test_the_bar_is_half_a_percent(subject, tmp_path, off, within):
    result = _result({"off": off}, tmp_path)
    case = next(iter(result["models"][0]["candidates"].values()))
    assert case["ratio"] == pytest.approx(math.exp(off))
    assert case["is_within"] is within
    assert case["mean_difference"] == pytest.approx(abs(off))


def test_differences_are_counted(subject, tmp_path):
    result = _result({"wrong": [12, 20, 40], "same": 4, "bytes": 100}, tmp_path, prefix=1)
    case = next(iter(result["models"][0]["candidates"].values()))
    assert case["agreement"] == pytest.approx(1 - 3 / 40)
    assert case["margin_of_others"] == pytest.approx(0.20)
    assert (case["same_tokens"], case["whole_answers"], case["weights_bytes"]) == (4, 0, 100)
    with (tmp_path / "out").open("w") as out:
        report.show(result, Console(file=out, width=220))
    shown = (tmp_path / "out").read_text()
    for part in ("a.gguf, 40 tokens scored", "2.7183", "92.50%", "0 of 3", "yes"):
        assert part in shown
    assert any(name.endswith("agreement") for name in report.numbers(result))


def test_other_tokens_are_no_comparison():
    with pytest.raises(RequestError, match="other tokens"):
        run.against({"ids": [1]}, {"ids": [2]})


def test_options():
    assert run.options_of("kernels=numba,threads=2,disable_prefix_cache=true") == {
        "kernels": "numba", "threads": 2, "disable_prefix_cache": True,
    }  # fmt: skip
    assert run.name_of(run.options_of("")) == "defaults"
    for wrong in ("kernels", "kernels="):
        with pytest.raises(RequestError, match="NAME=VALUE"):
            run.options_of(wrong)


@pytest.mark.parametrize("sizes", [{"window": 3}, {"tokens": 100}, {"prompts": 0}, {"answer": 0}])
def test_plan_is_checked(sizes):
    with pytest.raises(RequestError):
        run.Plan(reference={}, candidates=(), **sizes)


def test_a_failing_configuration_says_which(subject, tmp_path):
    with pytest.raises(EngineError, match="prefix=0, off=no ended: TypeError"):
        _result({"off": "no"}, tmp_path)
