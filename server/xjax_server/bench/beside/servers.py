"""Servers as child processes: started, waited for, watched and stopped.

    Server(command) ── wait() ──> answers ── settle() ──> idle ── stop()

Knows processes and addresses; which command starts what is `peers`' business.
"""

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from xjax.errors import EngineError

_POLL = 0.1
_IDLE_SHARE, _IDLE_SECONDS = 0.05, 2  # of one processor, in so many seconds on end


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def ending_children() -> Generator[None]:
    """Let a request to terminate this process unwind it, so that what it started is stopped."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def processes(pid: int) -> Iterator[Path]:
    """Folders in /proc of a process and of what it started; none where the system has no /proc."""
    waiting = [pid]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        try:
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue
        yield folder


def work_seconds(pid: int) -> float | None:
    """Processor time so far of a process and of what it started; None where the system does not tell."""
    ticks = 0
    for folder in processes(pid):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


def settle(pid: int, seconds: float) -> None:
    """Wait, no longer than that, until a process does nothing: programs may still be compiled behind."""
    until, num_idle, before = time.monotonic() + seconds, 0, work_seconds(pid)
    while before is not None and num_idle < _IDLE_SECONDS and time.monotonic() < until:
        time.sleep(1)
        now = work_seconds(pid)
        num_idle = num_idle + 1 if now is not None and now - before < _IDLE_SHARE else 0
        before = now


class Server:
    """One child process that serves on a port of this machine.

    ready   path that answers 200 once requests are answered
    """

    def __init__(self, name: str, command: Sequence[str], *, port: int, ready: str) -> None:
        self.name, self.command = name, list(command)
        self.url = f"http://127.0.0.1:{port}"
        self._ready = ready
        self._log = tempfile.TemporaryFile()
        try:
            self._child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise EngineError(f"{name} cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        """Number of the child."""
        return self._child.pid

    def wait(self, seconds: float) -> None:
        """Wait until it answers. Raises EngineError, with its last line, when it ends before that."""
        until = time.monotonic() + seconds
        while not self._answers():
            if self._child.poll() is not None:
                raise EngineError(
                    f"{self.name} ended with code {self._child.returncode}: {self._last_line()}"
                )
            if time.monotonic() > until:
                raise EngineError(f"{self.name} did not answer within {seconds:g} s: {self._last_line()}")
            time.sleep(_POLL)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self._ready, timeout=5) as reply:
                return reply.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def settle(self, seconds: float) -> None:
        """Wait, no longer than that, until it does nothing."""
        settle(self._child.pid, seconds)

    def log(self) -> str:
        """What it has written so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _last_line(self) -> str:
        return (self.log().strip().splitlines() or ["it wrote nothing"])[-1]

    def peak_bytes(self) -> int | None:
        """Most memory it has held, with its own children; None where the system does not tell."""
        total = 0
        for folder in processes(self._child.pid):
            try:
                lines = (folder / "status").read_text().splitlines()
            except OSError:
                continue
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        return total or None

    def stop(self) -> None:
        """End it, by force when it does not go."""
        if self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._child.pid, signal.SIGKILL)
                self._child.wait()
        self._log.close()
