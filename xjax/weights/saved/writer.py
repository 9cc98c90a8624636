"""A thread that writes, which is at rest when its owner goes on, however often Ctrl-C is pressed.

The pools and `join` of the standard library give up waiting at the first interrupt, and what is written then
outlives whoever would clean up behind it. Knows nothing of what is written.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType


def finish(action: Callable[[], object]) -> None:
    """Do something to its end, which may be repeated; an interrupt is raised behind it."""
    interrupt = None
    while True:
        try:
            action()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


class Writer:
    """Does one thing after another in a thread of its own; leaving it waits for the last.

    An interrupt ends `do` at once, and leaving when what was begun has ended.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._has_ended = threading.Event()
        # A daemon: one that was interrupted while it started has nothing to do, ever.
        self._thread = threading.Thread(target=self._run, name="xjax-write", daemon=True)

    def __enter__(self) -> "Writer":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.put(None)
        finish(self._has_ended.wait)

    def do(self, job: Callable[[], None]) -> None:
        """Do something and wait for it; raises what it raises."""
        future: Future[None] = Future()
        self._jobs.put((job, future))
        future.result()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                _do(*job)
        finally:
            self._has_ended.set()


def _do(job: Callable[[], None], future: Future[None]) -> None:
    try:
        job()
    except BaseException as error:  # noqa: BLE001
        future.set_exception(error)
    else:
        future.set_result(None)
