"""A thread that is at rest when its owner goes on."""

import os
import signal
import threading
import time

import pytest

from xjax.weights.saved.writer import Writer, finish


def test_things_are_done_in_order():
    seen, threads = [], set()
    with Writer() as writer:
        for i in range(3):
            writer.do(lambda i=i: (seen.append(i), threads.add(threading.current_thread()))[0])
    assert seen == [0, 1, 2]
    assert threading.current_thread() not in threads and len(threads) == 1
    time.sleep(0.05)
    assert not threads.pop().is_alive()


def test_what_is_raised_comes_out():
    with Writer() as writer:
        with pytest.raises(ValueError, match="no"):
            writer.do(lambda: int("no"))
        writer.do(lambda: None)


@pytest.mark.parametrize("times", [1, 3])
def test_interrupts_wait_for_what_was_begun(times):
    ended = []

    def job():
        for _ in range(times):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.05)
        time.sleep(0.1)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        with Writer() as writer:
            writer.do(job)
    assert ended == [True]


def test_finish_repeats_and_then_raises():
    tries = []

    def action():
        tries.append(None)
        if len(tries) < 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        finish(action)
    assert len(tries) == 3
