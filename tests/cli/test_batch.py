"""`xjax generate --input`: one result a line, errors in their place, and going on after a kill."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import xjax
from tests.cli.fake_llm import FakeLLM
from xjax.errors import LoadError
from xjax_server.cli import batch, main

PROGRAM = [sys.executable, str(Path(__file__).with_name("fake_llm.py"))]


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch):
    monkeypatch.setitem(vars(xjax), "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out" / "results.jsonl"


def write_lines(path, lines):
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))


def run(source, output, *more):
    return main(["generate", "--input", str(source), "--output", str(output), *more])


def results(output):
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_every_line_has_its_result_in_order(files, capsys):
    source, output = files
    write_lines(
        source,
        [
            {"prompt": "a"},
            {
                "messages": [{"role": "user", "content": "b"}, {"role": "user", "content": "c"}],
                "id": "x",
                "n": 2,
            },
            b"not json",
            {"prompt": "d", "temprature": 1},
            {"prompt": "e", "max_tokens": 1, "temperature": 0, "logit_bias": {"5": 1.5}},
            {"prompt": "fail", "id": 7},
            b"",
            {"prompt": [4, 5]},
            {"prompt": "f", "top_p": 9},
            {"prompt": 3},
            {"messages": "x"},
            {"prompt": "a", "messages": []},
            b"[1]",
            b"\xff",
            {"prompt": "a", "stop": 1.5},
            {"prompt": "a", "logit_bias": {"9" * 5000: 1}},
            {"prompt": "a", "logit_bias": {"\u00b2": 1}},
            {"prompt": "a", "ignore_eos": "false"},
            b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}",
        ],
    )
    assert run(source, output, "--max-tokens", "2") == 0
    found = results(output)
    assert [item["index"] for item in found] == list(range(19))
    assert found[0]["outputs"][0]["text"] == "1:a 2:a "
    assert found[1]["id"] == "x"
    assert [item["text"] for item in found[1]["outputs"]] == ["1:b|c 2:b|c "] * 2
    assert found[4]["outputs"][0]["text"] == "1:e "
    assert found[5] == {
        "index": 5,
        "input": found[5]["input"],
        "id": 7,
        "error": {
            "message": "messages: cannot be served",
            "type": "RequestError",
            "code": "invalid_value",
            "param": "messages",
        },
    }
    assert found[7]["outputs"][0]["text"] == "1:4|5 2:4|5 "
    failed = {
        2: "not JSON",
        3: "temprature",
        6: "empty",
        8: "top_p",
        9: "text or a list",
        10: "list of messages",
        11: "either",
        12: "not a JSON object",
        13: "not JSON",
        14: "stop:",
        15: "logit_bias:",
        16: "logit_bias:",
        17: "ignore_eos:",
        18: "temperature:",
    }
    for index, text in failed.items():
        assert text in found[index]["error"]["message"]
    *_, failures, last = capsys.readouterr().err.splitlines()
    assert "15 of 19 requests failed" in failures
    assert re.fullmatch(
        r"xjax: TTFT 0\.25 s, [\d.]+ tokens/s, 8 prompt tokens \(4 cached\), 9 new tokens", last
    )
    params = [
        params for prompt, params in FakeLLM.made[0].calls if prompt == [{"role": "user", "content": "e"}]
    ]
    assert (params[0].temperature, params[0].logit_bias) == (0, {5: 1.5})


def test_raw_prompts_and_a_system_text(files):
    source, output = files
    write_lines(source, [{"prompt": "a"}])
    assert run(source, output, "--raw") == 0
    assert FakeLLM.made[-1].calls[0][0] == "a"
    output.unlink()
    assert run(source, output, "--system", "s") == 0
    assert FakeLLM.made[-1].calls[0][0][0] == {"role": "system", "content": "s"}


def test_results_without_an_output_go_to_stdout(files, capsys):
    source, _ = files
    write_lines(source, [{"prompt": "a"}, {"prompt": "b"}])
    assert main(["generate", "--input", str(source)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["outputs"][0]["text"][2] for line in lines] == ["a", "b"]


def test_windows_are_joined(files, monkeypatch):
    monkeypatch.setattr(batch, "WINDOW", 3)
    source, output = files
    write_lines(source, [{"prompt": str(i)} for i in range(10)])
    assert run(source, output) == 0
    assert [item["outputs"][0]["text"].split(":")[1][0] for item in results(output)] == list("0123456789")


@pytest.mark.parametrize("num_kept", range(6))
@pytest.mark.parametrize("cut", [0, 5, 30])
def test_a_started_file_is_continued(files, num_kept, cut):
    source, output = files
    write_lines(source, [{"prompt": str(i)} if i != 2 else {"bad": 1} for i in range(6)])
    assert run(source, output) == 0
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:num_kept]) + lines[num_kept][:cut])
    assert run(source, output) == 0
    assert output.read_bytes() == whole
    asked = [messages[0]["content"] for messages, _ in FakeLLM.made[-1].calls]
    assert asked == [str(i) for i in range(num_kept, 6) if i != 2]


def test_a_finished_file_starts_no_engine(files, capsys):
    source, output = files
    write_lines(source, [{"prompt": "a"}])
    assert run(source, output) == 0
    assert run(source, output) == 0
    assert len(FakeLLM.made) == 1
    assert "already holds all 1 results" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        b"my notes\n",
        b"my notes",
        b"{}\n",
        b'{"index": 0, "input": "0000000000000000"}\n',
        b'{"index": 1, "input": "x"}\n',
    ],
)
def test_another_file_is_left_alone(files, content, capsys):
    source, output = files
    write_lines(source, [{"prompt": "a"}])
    output.parent.mkdir()
    output.write_bytes(content)
    assert run(source, output) == 2
    assert "choose another --output" in capsys.readouterr().err
    assert output.read_bytes() == content


def test_results_of_a_longer_input_are_refused(files, capsys):
    source, output = files
    write_lines(source, [{"prompt": "a"}, {"prompt": "b"}])
    assert run(source, output) == 0
    write_lines(source, [{"prompt": "a"}])
    assert run(source, output) == 2
    assert "line 2 of" in capsys.readouterr().err


def test_input_as_output_is_refused(files, capsys):
    source, _ = files
    write_lines(source, [{"prompt": "a"}])
    assert run(source, source) == 2
    assert "choose another" in capsys.readouterr().err


def test_output_that_cannot_be_written(files, capsys, tmp_path):
    source, _ = files
    write_lines(source, [{"prompt": "a"}])
    (tmp_path / "file").write_text("")
    assert run(source, tmp_path / "file" / "out.jsonl") == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_killed_run_is_continued(files):
    source, output = files
    write_lines(source, [b"bad"] + [{"prompt": "slow" if i == 3 else str(i)} for i in range(1, 6)])
    command = [*PROGRAM, "generate", "--raw", "--input", str(source), "--output", str(output)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 20
        while not (output.exists() and output.read_bytes().count(b"\n")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    assert [item["index"] for item in results(output)] == [0]
    write_lines(source, [b"bad"] + [{"prompt": "slow" if i == 3 else str(i)} for i in range(1, 6)])
    assert run(source, output, "--raw", "--max-tokens", "1") == 0
    assert [item["index"] for item in results(output)] == list(range(6))


def test_an_input_that_can_be_read_once_only_is_refused(tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["generate", "--input", str(pipe)]) == 2
    assert "is no regular file" in capsys.readouterr().err


def test_an_input_that_is_not_there_is_one_line(files, capsys):
    source, output = files
    output.parent.mkdir()
    output.touch()
    assert run(source, output) == 2
    assert capsys.readouterr().err == f"xjax: error: cannot read {source}: No such file or directory\n"


def test_an_empty_input_loads_no_model(files, capsys):
    source, _ = files
    source.touch()
    assert main(["generate", "--input", str(source)]) == 0
    assert not FakeLLM.made


def test_a_byte_order_mark_is_no_part_of_the_request(files):
    source, output = files
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}')
    assert run(source, output) == 0
    assert [line["outputs"][0]["text"][:3] for line in results(output)] == ["1:a", "1:b"]


@pytest.mark.parametrize("name", [True, 1.5, float("nan"), [1], {"a": 1}])
def test_an_id_is_a_text_or_a_whole_number(name, files):
    source, output = files
    write_lines(source, [{"id": name, "prompt": "a"}])
    assert run(source, output) == 0
    assert results(output)[0]["error"]["param"] == "id"


def test_two_runs_do_not_share_an_output(files, capsys):
    source, output = files
    write_lines(source, [{"prompt": "a"}])
    first, second = batch.Work(source, output), batch.Work(source, output)
    with first.open_results():
        with pytest.raises(LoadError, match="being written by another run"):
            second.open_results()
        output.write_text("more")
    with pytest.raises(LoadError, match="has changed since|no file of results"):
        second.open_results()
    assert output.read_text() == "more"


def test_a_full_disk_is_one_line(files):
    source, output = files
    write_lines(source, [{"prompt": "a"}])
    command = ["generate", "--input", str(source), "--output", str(output)]
    result = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *PROGRAM, *command],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "xjax: error: cannot write the results: File too large"
    assert output.read_bytes() == b""


def test_an_output_that_is_no_file_is_refused(files, capsys):
    source, _ = files
    write_lines(source, [{"prompt": "a"}])
    assert run(source, "/dev/full") == 2
    assert "/dev/full is no regular file" in capsys.readouterr().err
