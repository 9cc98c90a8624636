"""Ctrl-C while modules are imported, while a compiler is busy, and what it may not change."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from xjax_server.interrupts import ending_at_once, is_compiling, was_interrupted

ROOT = Path(__file__).resolve().parent.parent.parent
COMPILING = """
import sys, threading, time
import xjax
from tests.cli.fake_llm import FakeLLM
from xjax_server.cli import main

class Compiling(FakeLLM):
    def stream(self, *arguments, **fields):
        threading.Thread(target=time.sleep, args=(20,), name="xjax-compile").start()
        print("compiling", file=sys.stderr, flush=True)
        time.sleep(20)
        yield

    def __exit__(self, *exception):
        time.sleep(20)

xjax.LLM = Compiling
sys.exit(main())
"""


def test_the_handler_is_back_afterwards():
    before = signal.getsignal(signal.SIGINT)
    with ending_at_once():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


def test_who_ignores_it_goes_on_ignoring_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ending_at_once():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_no_say():
    failures = []

    def enter():
        try:
            with ending_at_once():
                pass
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert failures == []


def test_what_an_exception_began_with():
    with pytest.raises(ImportError) as caught:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("numpy")  # noqa: B904  as an extension module does it
    assert was_interrupted(caught.value)
    assert not was_interrupted(ImportError("numpy"))


def test_threads_inside_a_compiler():
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, name="xjax-compile")
    thread.start()
    assert is_compiling()
    ends.set()
    thread.join()


@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.6, 0.9])
def test_ctrl_c_at_any_time_of_the_start(seconds, tmp_path):
    program = "import sys; from xjax_server.cli import main; import time; sys.exit(main())"
    child = subprocess.Popen(
        [sys.executable, "-c", program, "generate", "hello"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "XJAX_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
    )
    time.sleep(seconds)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=20)
    if b"site" not in said:  # it came before any line of ours ran
        assert child.returncode in (130, -signal.SIGINT), said
        assert b"ImportError" not in said and b"unexpected" not in said


def test_ctrl_c_does_not_wait_for_the_compiler():
    child = subprocess.Popen(
        [sys.executable, "-c", COMPILING, "generate", "hello"], stderr=subprocess.PIPE, cwd=ROOT
    )
    assert child.stderr is not None
    while child.stderr.readline() not in (b"compiling\n", b""):
        pass
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    said = child.stderr.read()
    assert child.wait(10) == 130
    assert time.monotonic() - began < 10
    assert b"Traceback" not in said
    child.stderr.close()
