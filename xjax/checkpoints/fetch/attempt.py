"""Run one download in a process of its own, and give up when it no longer moves.

    start -> bytes or output grow -> ... -> exit 0: its output
                 | nothing for STALL_SECONDS, or interrupted: its process group is killed
Also here: the lock that keeps two processes from fetching the same model at once.
Knows no model and no protocol.
"""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from xjax.errors import LoadError

ProgressSink = Callable[[int, int | None, str], None]
"""Called as progress(done_bytes, total_bytes or None, label)."""

STALL_SECONDS = 10.0
_POLL_SECONDS = 0.05
_REASON = re.compile(r"^(ERROR: |[\w.]*(Error|Exception|Enabled)\b)")


class AttemptError(Exception):
    """An attempt that brought nothing, with the reason in one line; another may follow."""


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder that may be changing meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _reason(output: str) -> str:
    """Pick the line of a program's complaints that says most: its last error line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if _REASON.match(line)]
    line = (errors or lines or ["it failed without a message"])[-1]
    return line.removeprefix("ERROR: ")[:300]


def _kill(process: subprocess.Popen[bytes]) -> None:
    # The whole group: pip and the hub client start helpers of their own.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(
    command: Sequence[str],
    *,
    folder: Path,
    watch: Callable[[], int],
    on_bytes: Callable[[int], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a command and return its standard output.

    `watch` returns the bytes that arrived; while these or the output grow, the command may
    go on. Output goes to files in `folder`. Raises AttemptError when it fails or stalls.
    """
    with tempfile.TemporaryFile(dir=folder) as out, tempfile.TemporaryFile(dir=folder) as err:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise AttemptError(f"{command[0]}: {error.strerror}") from error
        try:
            _wait(
                process,
                lambda: (watch(), os.fstat(out.fileno()).st_size, os.fstat(err.fileno()).st_size),
                on_bytes,
            )
        finally:
            _kill(process)
        out.seek(0)
        err.seek(0)
        output = out.read().decode(errors="replace")
        if process.returncode:
            raise AttemptError(_reason(output + "\n" + err.read().decode(errors="replace")))
        return output


def _wait(
    process: subprocess.Popen[bytes],
    measure: Callable[[], tuple[int, int, int]],
    on_bytes: Callable[[int], None] | None,
) -> None:
    seen, moved = measure(), time.monotonic()
    while process.poll() is None:
        time.sleep(_POLL_SECONDS)
        now = measure()
        if now != seen:
            if on_bytes and now[0] != seen[0]:
                on_bytes(now[0])
            seen, moved = now, time.monotonic()
        elif time.monotonic() - moved > STALL_SECONDS:
            raise AttemptError(f"no progress for {STALL_SECONDS:g} s")


@contextlib.contextmanager
def locked(path: Path, label: str, progress: ProgressSink | None) -> Generator[None]:
    """Hold the lock file `path`; wait while another process has it. A dead one holds nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise LoadError(f"{path}: cannot be written: {error.strerror}") from error
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if progress:
                    progress(0, None, f"waiting for another process that fetches {label}")
                time.sleep(0.1)
        yield
