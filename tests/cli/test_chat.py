"""`xjax chat` in a real pseudo-terminal: turns, commands, Ctrl-C and Ctrl-D."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

import xjax
from tests.cli.fake_llm import FakeLLM
from xjax_server.cli import main

PROGRAM = [sys.executable, str(Path(__file__).with_name("fake_llm.py"))]
SECONDS = 60


class Terminal:
    """A program in a pseudo-terminal, with all it wrote so far."""

    def __init__(self, *arguments):
        self.text = ""
        self.descriptor, inner = pty.openpty()
        # A fork of this process, which has JAX's threads, is warned of: the new one takes the terminal.
        take = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", take, *PROGRAM, *arguments],
            stdin=inner,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(inner)

    def read_until(self, text):
        """Wait until `text` was written after what was waited for before."""
        deadline, seen = time.monotonic() + SECONDS, ""
        while text not in seen:
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self.descriptor], [], [], left)[0]
            assert ready, f"no {text!r} in {seen!r}"
            seen += self._read()
        self.text += seen
        return seen

    def _read(self):
        try:
            return os.read(self.descriptor, 4096).decode()
        except OSError:  # the other end was closed
            raise AssertionError(f"ended early: {self.text!r}") from None

    def type(self, text):
        os.write(self.descriptor, text.encode())

    def wait(self):
        """Read what is left and return the exit code."""
        try:
            while data := os.read(self.descriptor, 4096):
                self.text += data.decode()
        except OSError:
            pass
        os.close(self.descriptor)
        return self._process.wait()


@pytest.fixture
def chat():
    terminal = Terminal("chat")
    terminal.read_until(">>> ")
    return terminal


def test_each_turn_sends_the_whole_history(chat):
    chat.type("one\n")
    assert "1:one 2:one 3:one" in chat.read_until(">>> ")
    chat.type("two\n")
    assert "1:one|1:one 2:one 3:one |two " in chat.read_until(">>> ")
    chat.type("\x04")
    assert chat.wait() == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(chat):
    chat.type("slow\n")
    chat.read_until("2:slow")
    chat.type("\x03")
    assert "xjax: stopped" in chat.read_until(">>> ")
    chat.type("two\n")
    answer = chat.read_until(">>> ")
    assert "1:slow|0:slow 1:slow 2:slow " in answer
    assert "|two " in answer
    chat.type("/exit\n")
    assert chat.wait() == 0
    assert "Traceback" not in chat.text


def test_ctrl_c_at_the_prompt_asks_again(chat):
    chat.type("half a li")
    chat.read_until("half a li")
    time.sleep(0.2)  # the echo comes just before the line editor waits for keys
    chat.type("\x03")
    chat.read_until(">>> ")
    chat.type("one\n")
    assert "1:one 2:one" in chat.read_until(">>> ")
    chat.type("\x04")
    assert chat.wait() == 0


def test_commands(chat):
    chat.type("/system be brief\n")
    chat.read_until(">>> ")
    chat.type("one\n")
    assert "1:be brief|one " in chat.read_until(">>> ")
    chat.type("/clear\n")
    chat.read_until(">>> ")
    chat.type("two\n")
    assert "1:be brief|two " in chat.read_until(">>> ")
    chat.type("/nonsense\n")
    assert "/exit" in chat.read_until(">>> ")
    chat.type("/exit\n")
    assert chat.wait() == 0


def test_a_failed_turn_leaves_the_history(chat):
    chat.type("one\n")
    chat.read_until(">>> ")
    chat.type("fail\n")
    chat.read_until(">>> ")
    chat.type("/clear\n")
    chat.read_until(">>> ")
    chat.type("fail\n")
    assert "xjax: error: messages: cannot be served" in chat.read_until(">>> ")
    chat.type("two\n")
    assert "1:two " in chat.read_until(">>> ")
    chat.type("\x04")
    assert chat.wait() == 0


def test_a_failed_step_ends_the_answer_and_keeps_the_chat(chat):
    chat.type("one\n")
    chat.read_until(">>> ")
    chat.type("/clear\n")
    chat.read_until(">>> ")
    chat.type("break\n")
    assert "xjax: error: the step failed: made up" in chat.read_until(">>> ")
    chat.type("two\n")
    assert "1:two " in chat.read_until(">>> ")
    chat.type("\x04")
    assert chat.wait() == 0


@pytest.fixture
def fake_engine(monkeypatch):
    monkeypatch.setitem(vars(xjax), "LLM", FakeLLM)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "base"], "no chat template"),
        (["--n", "2"], "--n cannot be used in a chat"),
        (["--temperature", "-1"], "temperature: must be"),
    ],
)
def test_error_before_the_first_turn(fake_engine, arguments, text, capsys):
    assert main(["chat", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_lines_of_a_pipe_are_turns(fake_engine, monkeypatch, capsys):
    lines = iter(["one", "", "two"])

    def read(prompt):
        assert prompt == ""
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat"]) == 0
    assert capsys.readouterr().out == (
        "1:one 2:one 3:one \n" + "".join(f"{i}:one|1:one 2:one 3:one |two " for i in (1, 2, 3)) + "\n"
    )
