"""`xjax generate` with one prompt: what goes to which stream, and how errors look."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import xjax
from tests.cli.fake_llm import FakeLLM
from xjax_server.cli import main
from xjax_server.cli.generate import Tally

PROGRAM = [sys.executable, str(Path(__file__).with_name("fake_llm.py"))]


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch):
    monkeypatch.setitem(vars(xjax), "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])


@pytest.fixture
def give_stdin(monkeypatch):
    def give(data: bytes):
        stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stream)

    return give


def last_call():
    (llm,) = FakeLLM.made
    return llm.calls[-1]


def test_answer_goes_to_stdout_and_the_rest_to_stderr(capsys):
    assert main(["generate", "hi"]) == 0
    out, err = capsys.readouterr()
    assert out == "1:hi 2:hi 3:hi \n"
    first, last = err.splitlines()
    assert first == "xjax: loading weights"
    assert last.startswith("xjax: TTFT 0.")
    assert last.endswith("7 prompt tokens (4 cached), 3 new tokens")
    assert FakeLLM.made[0].is_closed


def test_prompt_is_a_user_message_after_the_system_text():
    assert main(["generate", "hi", "--system", "be brief"]) == 0
    assert last_call()[0] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize("arguments", [["--raw"], ["--model", "base"]])
def test_raw_prompt_is_sent_as_it_is(arguments):
    assert main(["generate", " hi ", *arguments]) == 0
    assert last_call()[0] == " hi "


@pytest.mark.parametrize("arguments", [["--raw"], ["--model", "base"]])
def test_system_text_needs_a_template(arguments, capsys):
    assert main(["generate", "hi", "--system", "x", *arguments]) == 2
    assert "--system cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_prompt_from_stdin(arguments, give_stdin):
    give_stdin("Grüße \n\n".encode())
    assert main(["generate", *arguments]) == 0
    assert last_call()[0][0]["content"] == "Grüße \n"


def test_raw_prompt_from_stdin_keeps_its_end(give_stdin):
    give_stdin(b"A:\n")
    assert main(["generate", "--raw"]) == 0
    assert last_call()[0] == "A:\n"


@pytest.mark.parametrize(("data", "text"), [(b"", "the prompt is empty"), (b"\xff", "not UTF-8")])
def test_bad_stdin(data, text, give_stdin, capsys):
    give_stdin(data)
    assert main(["generate"]) == 2
    assert text in capsys.readouterr().err
    assert FakeLLM.made == []


def test_flags_lie_over_the_defaults_of_the_model():
    arguments = "--max-tokens 2 --top-p 0.9 --top_k=5 --seed 3 --stop a --stop b --ignore-eos --min-p 0.1"
    assert main(["generate", "hi", *arguments.split(), "--repetition-penalty", "1.1"]) == 0
    params = last_call()[1]
    assert (params.temperature, params.max_tokens, params.top_p, params.top_k) == (0.5, 2, 0.9, 5)
    assert (params.seed, params.stop, params.ignore_eos, params.min_p) == (3, ("a", "b"), True, 0.1)
    assert params.repetition_penalty == 1.1


def test_engine_flags_and_their_aliases():
    arguments = [
        "--max_num_seqs",
        "4",
        "--block-size=8",
        "--gpu_memory_utilization",
        "0.5",
        "--dtype",
        "float32",
    ]
    assert main(["generate", "hi", *arguments, "--compile-cache", "none", "--revision", "r"]) == 0
    llm = FakeLLM.made[0]
    assert llm.options == {
        "max_num_seqs": 4, "page_size": 8, "kv_fraction": 0.5, "dtype": "float32", "compile_cache": "none"
    }  # fmt: skip
    assert llm.revision == "r"


def test_compiled_programs_are_kept_by_default():
    assert main(["generate", "hi"]) == 0
    assert FakeLLM.made[0].options == {"compile_cache": "auto", "max_num_seqs": 1}


def test_the_engine_has_room_for_the_samples_there_are(tmp_path):
    assert main(["generate", "hi", "--n", "3"]) == 0
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n' * 40)
    assert main(["generate", "--input", str(source)]) == 0
    assert main(["generate", "hi", "--max-num-seqs", "9"]) == 0
    assert [llm.options["max_num_seqs"] for llm in FakeLLM.made] == [4, 32, 9]


def test_json_object(capsys):
    assert main(["generate", "hi", "--json", "--logprobs", "2", "--n", "2"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err.splitlines()[-1].endswith("2 prompt tokens (1 cached), 6 new tokens")
    assert found["prompt"] == "hi"
    assert [output["text"] for output in found["outputs"]] == ["1:hi 2:hi 3:hi "] * 2
    assert found["usage"] == {"prompt_tokens": 2, "cached_tokens": 1, "completion_tokens": 6}
    assert found["metrics"] == {"first_token_seconds": 0.25, "total_seconds": 1.25, "tokens_per_second": 5.0}
    assert last_call()[1].logprobs == 2


def test_several_answers(capsys):
    assert main(["generate", "hi", "--n", "2", "--max-tokens", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == "1:hi \n---\n1:hi \n"
    last = "xjax: TTFT 0.25 s, 1.0 tokens/s, 2 prompt tokens (1 cached), 2 new tokens"
    assert err.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["generate", "hi", "--temperature", "nan"], "temperature: must be a number from 0 to 100"),
        (["generate", "hi", "--top-p", "2"], "top_p: must be"),
        (["generate", "hi", "--max-tokens", "0"], "max_tokens: must be"),
        (["generate", "hi", "--max-tokens", "x"], "'--max-tokens'"),
        (["generate", "hi", "--page-size", "0"], "--page-size must be from 1 to 1024"),
        (["generate", "hi", "--dtype", "int3"], "--dtype must be one of auto, float32"),
        (["generate", "hi", "--frobnicate"], "--frobnicate"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "hi", "--logprobs", "2"], "--logprobs are shown with --json"),
        (["generate", "hi", "--output", "x"], "--output needs --input"),
        (["generate", "hi", "--input", "x"], "not both"),
        (["generate", "--input", "/nowhere/x.jsonl"], "cannot read /nowhere/x.jsonl"),
        (["generate", "hi", "--model", "missing"], "no model named 'missing'"),
        (["generate", "fail"], "messages: cannot be served"),
        (["generate", "fail", "--json"], "messages: cannot be served"),
        (["frobnicate"], "frobnicate"),
        (
            ["generate", "hi", *[word for i in range(1000) for word in ("--stop", f"s{i}")]],
            "at most 64 strings",
        ),
    ],
)
def test_error_is_one_line_and_exit_2(arguments, text, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line != "xjax: loading weights"]
    assert line.startswith("xjax: error: ")
    assert text in line
    assert out == ""


def test_defect_is_one_line_with_a_hint(capsys):
    assert main(["generate", "defect"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "xjax: error: unexpected ZeroDivisionError: a defect (--debug shows the trace)"
    assert main(["generate", "defect", "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "xjax: error: unexpected ZeroDivisionError: a defect"


def test_prompt_behind_two_dashes(capsys):
    assert main(["generate", "--", "--debug"]) == 0
    assert capsys.readouterr().out.startswith("1:--debug ")


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"xjax {xjax.__version__}\n"
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out


def test_speed_is_of_the_tokens_after_the_first(monkeypatch):
    clock = iter([12.0, 12.5, 13.0])
    monkeypatch.setattr("xjax_server.cli.generate.time", SimpleNamespace(monotonic=lambda: next(clock)))
    tally = Tally(started=10.0)
    for _ in range(3):
        tally.add(SimpleNamespace(token_ids=(1,), num_prompt_tokens=5, num_cached_tokens=0))
    assert tally.line() == "xjax: TTFT 2.00 s, 2.0 tokens/s, 5 prompt tokens (0 cached), 3 new tokens"


def test_help_is_quick_and_loads_no_engine():
    code = (
        "import sys, io, contextlib\nfrom xjax_server.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): main(['generate', '--help'])\n"
        "print(sorted({'jax', 'flax', 'huggingface_hub', 'tokenizers', 'torch'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def start(*arguments):
    return subprocess.Popen([*PROGRAM, *arguments], bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_broken_pipe_is_quiet():
    with start("generate", "slow") as process:
        assert process.stdout.read(7) == b"0:slow "
        process.stdout.close()
        assert process.wait(timeout=20) == 141
        assert process.stderr.read() == b"xjax: loading weights\n"


def test_ctrl_c_keeps_what_was_printed():
    with start("generate", "slow") as process:
        assert process.stdout.read(7) == b"0:slow "
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 130
        assert out.endswith(b"\n")
        assert err == b"xjax: loading weights\n"


def test_output_is_utf8_in_a_plain_locale():
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    result = subprocess.run([*PROGRAM, "generate", "é☃"], capture_output=True, env=environment)
    assert result.stdout.decode("utf-8").startswith("1:é☃ ")
    assert result.returncode == 0
