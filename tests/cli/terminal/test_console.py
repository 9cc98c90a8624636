"""Progress bars on a terminal, and the last line of a run."""

import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from xjax_server.cli import main
from xjax_server.cli.app import app
from xjax_server.cli.terminal.console import ProgressBar, set_up_logging, stats_line

PROGRAM = [sys.executable, str(Path(__file__).parent.with_name("fake_llm.py"))]


def test_bar_is_drawn_on_a_terminal_and_keeps_off_stdout():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        [*PROGRAM, "generate", "hi"], stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        assert process.stdout.read() == b"1:hi 2:hi 3:hi \n"
        seen = b""
        try:
            while data := os.read(ours, 4096):
                seen += data
        except OSError:
            pass
    os.close(ours)
    text = seen.decode()
    assert "loading weights" in text
    assert "2 / 2" in text
    assert "xjax: TTFT" in text.splitlines()[-1]


def test_each_stage_is_one_line_elsewhere(capsys):
    with ProgressBar() as progress:
        for done in range(3):
            progress("load", done, 3)
        progress("compile", 0, 1)
        progress.pause()
        progress("answering", 1, 0)  # an answer is being written
        progress.resume()
        progress("load", 3, 3)  # said already
        progress("last", 1, 0)
    expected = ["loading weights", "compiling for this machine", "last"]
    assert capsys.readouterr().err == "".join(f"xjax: {stage}\n" for stage in expected)


@pytest.mark.parametrize(
    ("ttft", "speed", "text"),
    [
        (0.123, 45.67, "xjax: TTFT 0.12 s, 45.7 tokens/s, 3 prompt tokens (1 cached), 9 new tokens"),
        (None, None, "xjax: 3 prompt tokens (1 cached), 9 new tokens"),
    ],
)
def test_last_line(ttft, speed, text):
    assert stats_line(ttft=ttft, speed=speed, prompt=3, cached=1, new=9) == text


def test_log_lines_go_to_stderr_when_asked_for(capsys):
    set_up_logging(False)
    logging.getLogger("xjax.engine").info("a detail")
    logging.getLogger("xjax.engine").warning("a warning")
    set_up_logging(True)
    logging.getLogger("xjax.engine").info("another detail")
    set_up_logging(False)
    assert capsys.readouterr().err == "xjax: a warning\nxjax: another detail\n"


FULL = "xjax: error: cannot write to standard output: No space left on device"


def run_redirected(arguments, redirection, stdin=""):
    command = f'exec "$@" {redirection}'
    return subprocess.run(
        ["/bin/sh", "-c", command, "sh", *PROGRAM, *arguments],
        capture_output=True, text=True, input=stdin, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "redirection", "line"),
    [
        (["generate", "hi"], ">/dev/full", FULL),
        (["--version"], ">/dev/full", FULL),
        (["generate", "hi"], ">&-", "xjax: error: cannot write the answer: standard output is closed"),
        (["generate"], "<&-", "xjax: error: no prompt is given and standard input is closed"),
    ],
)  # fmt: skip
def test_a_standard_stream_that_cannot_be_used_is_one_line(arguments, redirection, line):
    result = run_redirected(arguments, redirection)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == line
    assert result.stderr.count("error") == 1


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_an_answer_needs_no_standard_error(redirection):
    result = run_redirected(["generate", "hi"], redirection)
    assert (result.returncode, result.stdout, result.stderr) == (0, "1:hi 2:hi 3:hi \n", "")


def test_a_prompt_that_is_no_text_is_refused_before_the_model_is_loaded():
    result = subprocess.run([*PROGRAM, "generate", b"a\xff"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "xjax: error: the prompt is not UTF-8 text\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["bogus"], "No such command 'bogus' (see `xjax --help`)"),
        (["pull", "--bogus"], "No such option: --bogus (see `xjax pull --help`)"),
        (
            ["generate", "--output", "x", "hi"],
            "--output needs --input; a single answer goes to standard output (see `xjax generate --help`)",
        ),
    ],
)
def test_a_wrong_command_line_says_where_the_right_one_is_found(capsys, arguments, line):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"xjax: error: {line}\n"


def test_help_shows_no_value_for_a_switch():
    program = get_command(app)
    params = [param for command in (program, *program.commands.values()) for param in command.params]
    switches = {param.opts[0]: param.metavar for param in params if getattr(param, "is_flag", False)}
    assert {"--debug", "--raw", "--json", "--verbose", "--ignore-eos"} <= switches.keys()
    assert set(switches.values()) == {""}


@pytest.mark.parametrize("verbose", [False, True])
def test_the_trace_of_a_logged_error_is_for_who_asks_for_details(verbose, capsys):
    set_up_logging(verbose)
    try:
        raise ValueError("inside")
    except ValueError:
        logging.getLogger("xjax.engine").exception("step %d failed", 3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "xjax: step 3 failed"
    assert ("Traceback" in "".join(lines[1:])) == verbose
