"""Random models of every form are what they say, and a case is sampled in processes of its own."""

import json
import sys

import numpy as np
import pytest
from rich.console import Console

from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.errors import EngineError
from xjax_server.bench.loading import report, run
from xjax_server.bench.loading.files import FORMATS, Shape, files_of, write_model

TINY = Shape(layers=2, embed=256, ffn=512, heads=4, kv_heads=2, vocab=320, tied=False)
# Says what it was asked to load, as the real child does, with a peak that argument 1 names.
CHILD = """
import json, sys
print(json.dumps({"seconds": 0.5, "work_seconds": 1.0, "peak_bytes": int(sys.argv[1]), "before_bytes": 10,
                  "parameter_bytes": 1000, "largest_bytes": 100}))
"""


@pytest.mark.parametrize("form", FORMATS)
def test_models_hold_sane_numbers(form, tmp_path):
    path = write_model(tmp_path, form, TINY)
    checkpoint = open_checkpoint(path)
    assert checkpoint.architecture in ("llama", "LlamaForCausalLM")
    assert sum(file.stat().st_size for file in files_of(path)) > sum(
        view.num_bytes for view in checkpoint.tensors.values()
    )
    assert sum(int(np.prod(view.shape)) for view in checkpoint.tensors.values()) == (
        2 * 320 * 256 + 256 + 2 * (3 * 256 * 512 + 256 * (256 + 2 * 128 + 256) + 2 * 256)
    )
    assert len(files_of(path)) == (4 if "sharded" in form else 1)
    for view in checkpoint.tensors.values():
        values = view.read()
        assert np.isfinite(values).all()
        assert 0 < values.std() < 1
    assert write_model(tmp_path, form, TINY) == path


@pytest.mark.parametrize(("peak", "kept"), [(run.SLACK + 1100, True), (run.SLACK + 1101, False)])
def test_result(peak, kept, tmp_path):
    plan = run.Plan(
        child=(sys.executable, "-c", CHILD, str(peak)),
        folder=tmp_path,
        shape=TINY,
        forms=("gguf-q4_k",),
        dtypes=("bfloat16",),
        repeats=2,
    )
    result = json.loads(json.dumps(run.run(plan, lambda _: None)))
    case = result["models"][0]["cases"]["gguf-q4_k as bfloat16"]
    assert case["is_bounded"] is kept
    assert case["seconds"]["count"] == 2
    assert case["cold_seconds"]["count"] == 1
    assert not list(tmp_path.rglob("*.gguf"))
    assert report.numbers(result)["gguf-q4_k as bfloat16: peak_bytes"] == peak
    report.show(result, Console(width=160))


def test_failure_says_why(tmp_path):
    with pytest.raises(EngineError, match=r"m\.gguf ended with code 1: no memory"):
        run.load_once((sys.executable, "-c", "raise SystemExit('no memory')"), tmp_path / "m.gguf", "float32")
