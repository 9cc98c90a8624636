"""The command line with the default model, from the flags to the last token."""

import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from tests.sources import ROOT

pytestmark = pytest.mark.model

# Greedy continuations in float32, made with transformers from the same file.
SKY = "The answer to this question lies in the intricate dance of light"
FRANCE_IDS = [7042, 30, 198, 198, 504, 2988, 314, 42]
FLAGS = ["--temperature", "0", "--max-num-seqs", "4", "--max-model-len", "256", "--num-pages", "64"]
# The same shapes as by the flags, so that the programs they compiled are used again.
SMALL_LLM = """import functools, xjax
sizes = {"max_num_seqs": 4, "max_model_len": 256, "num_pages": 64, "compile_cache": "auto"}
xjax.LLM = functools.partial(xjax.LLM, **sizes)
"""
PROGRAM = [sys.executable, "-m", "xjax_server.cli"]


@pytest.fixture(scope="module")
def environment(smollm2_path, tmp_path_factory):
    """A cache that holds nothing but the default model, and what the last run compiled.

    Without JAX's own cache of compiled programs, so that ours is what is used.
    """
    home, programs = tmp_path_factory.mktemp("home"), ROOT / ".cache" / "programs"
    (home / "models").mkdir()
    (home / "models" / smollm2_path.name).symlink_to(smollm2_path)
    programs.mkdir(parents=True, exist_ok=True)
    (home / "programs").symlink_to(programs)
    ours = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    return {**ours, "XJAX_HOME": str(home), "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("kernels", ["xla", "auto"])
def test_answer_of_the_default_model(environment, kernels):
    """The reference's words with float32 activations; codes of 8 bits may turn where two are close."""
    command = [*PROGRAM, "generate", "Why is the sky blue?", "--max-tokens", "12", *FLAGS]
    result = subprocess.run([*command, "--kernels", kernels], capture_output=True, text=True, env=environment)
    if kernels == "xla":
        assert result.stdout == SKY + "\n"
    assert len(result.stdout.split()) > 4
    assert result.stderr.splitlines()[-1].endswith("36 prompt tokens (0 cached), 12 new tokens")
    assert result.returncode == 0


def test_results_of_a_file(environment, tmp_path):
    lines = [
        {"prompt": "The capital of France is", "max_tokens": 8},
        {"prompt": [504, 3575, 282, 4649, 314], "max_tokens": 8, "logprobs": 2, "prompt_logprobs": 0},
        {"prompt": "x " * 1000},
        {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stop": " dance"},
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [*PROGRAM, "generate", "--raw", "--input", str(source), "--output", str(output), *FLAGS]
    # The numbers that the file's codes stand for, with float32 activations: what the reference computes.
    subprocess.run([*command, "--kernels", "xla"], check=True, capture_output=True, env=environment)
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [item["index"] for item in found] == [0, 1, 2, 3]
    assert found[0]["outputs"][0]["token_ids"] == FRANCE_IDS
    assert found[1]["outputs"][0]["token_ids"] == FRANCE_IDS
    logprobs = found[1]["outputs"][0]["logprobs"]
    assert logprobs[0]["7042"]["logprob"] == pytest.approx(-0.258062, abs=1e-3)
    assert len(logprobs) == 8
    first, *others = found[1]["prompt_logprobs"]
    assert first is None and [*others[0]] == ["3575"] and len(others) == 4
    assert "prompt_logprobs" not in found[0]
    assert "256" in found[2]["error"]["message"]
    assert found[3]["outputs"][0]["text"] == SKY.removesuffix(" dance of light")
    assert found[3]["outputs"][0]["stop_reason"] == " dance"


def readme_program(word):
    """The one Python program of the README that imports `word`."""
    blocks = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1:]
    (program,) = [text for text in (block.split("```")[0] for block in blocks) if f"import {word}" in text]
    return program


def test_python_of_the_readme(environment, tmp_path):
    program = tmp_path / "readme.py"
    program.write_text(SMALL_LLM + readme_program("xjax"))
    result = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) > 3
    assert 0.3 < float(result.stdout.splitlines()[-1].removeprefix("alike by ")) < 1


def test_script_of_the_readme_against_its_server(environment, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "client.py"
    script.write_text(readme_program("openai").replace(":8000/", f":{port}/"))
    sizes = FLAGS[2:]  # a server has no flags for sampling
    with subprocess.Popen(
        [*PROGRAM, "serve", "--port", str(port), *sizes], stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stderr is not None
        lines = iter(server.stderr.readline, "")
        started = next((line for line in lines if "serving" in line), None)
        assert started is not None
        threading.Thread(target=lambda: list(lines), daemon=True).start()
        result = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, env=environment
        )
        server.terminate()
        assert server.wait(60) == 0
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) > 2
