"""A quantized folder through the whole engine and command line: the text of the numbers it stands for."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.engine.tiny_folder import write_folder
from tests.sources import ROOT
from xjax import LLM, SamplingParams
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.engine.build import widened_bytes
from xjax.kernels.linear import xla
from xjax.state.quantized import is_quantized

pytestmark = pytest.mark.device

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OPTIONS = {"max_num_seqs": 4, "page_size": 8, "prefill_chunk_size": 32, "num_pages": 120}
PROMPTS = ["Hello there", "The quick brown fox jumps over the lazy dog", "x"]
GROUP = 16


def quantize_folder(folder, bits):
    """Turn the projections of a folder into packed codes in groups, without zeros; the others stay."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        w = tensors.pop(name)
        groups = w.reshape(len(w), -1, GROUP)
        scales = (np.abs(groups).max(-1) / (2 ** (bits - 1) - 1)).astype(np.float16)
        codes = np.round(groups / scales.astype(np.float32)[:, :, None]).astype(np.int64).reshape(w.shape)
        per_word, shifts = 32 // bits, np.arange(0, 32, bits)
        words = ((codes + 2 ** (bits - 1)).reshape(len(w), -1, per_word) << shifts).sum(-1)
        tensors |= {
            f"{name}_packed": words.astype(np.uint32).view(np.int32),
            f"{name}_scale": scales,
            f"{name}_shape": np.array(w.shape, np.int64),
        }
    save_file(tensors, folder / "model.safetensors")
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_numbers(source, folder):
    """Write the model that a quantized folder stands for."""
    write_folder(folder)
    tensors = {name: np.array(view.read()) for name, view in open_checkpoint(source).tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return quantize_folder(write_folder(tmp_path_factory.mktemp("codes")), 4)


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    """What the numbers answer, and the bytes that they take."""
    with LLM(write_numbers(folder, tmp_path_factory.mktemp("numbers")), **OPTIONS) as llm:
        texts = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY)]
        return texts, llm.plan.memory.weights


def test_answers_and_memory(folder, expected):
    with LLM(folder, **OPTIONS) as llm:
        found = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY)]
        leaves = jax.tree.leaves(llm.model.params, is_leaf=is_quantized)
        memory = llm.plan.memory
    assert found == expected[0]
    coded = [leaf for leaf in leaves if is_quantized(leaf)]
    assert {leaf.kind for leaf in coded} == {"int4_16"} and len(coded) == 8
    saved = sum(4 * leaf.shape[0] * leaf.shape[1] - leaf.nbytes for leaf in coded)
    assert memory.weights == expected[1] - saved
    assert all(leaf.nbytes < leaf.shape[0] * leaf.shape[1] for leaf in coded)  # 4 bits and a scale for 16


def test_blocks_pass_the_audit(folder, expected, monkeypatch):
    """Matrices in loops over their outputs, which the tiny model's are too small for."""
    monkeypatch.setattr(xla, "_SMALL_WEIGHTS", 0)
    monkeypatch.setattr(xla, "_BLOCK_WEIGHTS", 256)
    jax.clear_caches()  # a layer was traced without loops
    with LLM(folder, **OPTIONS) as llm:
        found = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY)]
        assert widened_bytes(llm.model, "cpu") == widened_bytes(llm.model, "gpu") == 2 * 4 * 256
    jax.clear_caches()
    assert found == expected[0]


def test_command_line(tmp_path):
    folder = quantize_folder(write_folder(tmp_path / "model"), 8)
    program = [sys.executable, "-m", "xjax_server.cli", "generate", "Hello", "--model", str(folder)]
    flags = ["--temperature", "0", "--max-tokens", "8", "--max-num-seqs", "1", "--num-pages", "20", "--json"]
    result = subprocess.run(
        [*program, *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"XJAX_HOME": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["usage"]["completion_tokens"] >= 1


def test_command_line_refuses_a_method(tmp_path):
    folder = write_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    program = [sys.executable, "-m", "xjax_server.cli", "generate", "Hello", "--model", str(folder)]
    environment = os.environ | {"XJAX_HOME": str(tmp_path)}
    result = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert "bitsandbytes" in line and "GGUF" in line
