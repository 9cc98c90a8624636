"""What the user sees: answers on standard output, everything else on standard error.

Progress is a bar on a terminal and one line a stage elsewhere. Knows no command and no engine.
"""

import logging
import os
import sys
import threading
from types import TracebackType
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

PIPE_CLOSED = 141  # as a shell reports a program that SIGPIPE ended
_STAGES = {"load": "loading weights", "save": "writing weights", "compile": "compiling for this machine"}
_BYTES_FROM = 10**6  # totals from here on are bytes, smaller ones are counts


def set_up_streams() -> None:
    """Make every text printable: UTF-8 into pipes and files, replacements on odd terminals."""
    _take_missing_descriptors()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is None:
            continue
        if stream.isatty():
            reconfigure(errors="replace")
        else:
            reconfigure(encoding="utf-8", errors="replace")


def _take_missing_descriptors() -> None:
    """Let no file that is opened later get the number of a standard stream that the caller closed."""
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(nowhere)


def drop(stream: TextIO) -> None:
    """Send what a stream still holds nowhere, or the interpreter fails on it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def write(text: str) -> None:
    """Write to standard output at once.

    Ends the program when that fails: quietly when nobody reads it any more, else with a line.
    """
    # A standard stream is None when the caller closed it.
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # said once
        print_error("cannot write the answer: standard output is closed")
        raise typer.Exit(2)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        drop(sys.stdout)
        raise typer.Exit(PIPE_CLOSED) from None
    except OSError as error:
        drop(sys.stdout)
        print_error(f"cannot write to standard output: {error.strerror}")
        raise typer.Exit(2) from error


def flush() -> None:
    """Write what others left in standard output; ends the program as `write` does."""
    if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison]
        write("")


def note(text: str) -> None:
    """Write one line to standard error, if it can be written to: an answer goes on without."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        return
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    except OSError:
        drop(sys.stderr)


def print_error(text: str) -> None:
    """Write the one line of an error."""
    note("xjax: error: " + " ".join(text.split()))


class _Line(logging.Formatter):
    """A log line without the trace of its exception, which is for those who ask for details."""

    def format(self, record: logging.LogRecord) -> str:
        return f"xjax: {record.getMessage()}"


class _StderrHandler(logging.StreamHandler[Any]):
    """Writes to whatever standard error is now, so that lines pass above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def set_up_logging(verbose: bool) -> None:
    """Send our log lines to standard error: all of them, or warnings only."""
    logger = logging.getLogger("xjax")
    if not logger.handlers:
        logger.addHandler(_StderrHandler())
        logger.propagate = False
    for handler in logger.handlers:
        handler.setFormatter(logging.Formatter("xjax: %(message)s") if verbose else _Line())
    logger.setLevel(logging.INFO if verbose else logging.WARNING)


def _amount(done: int, total: int | None) -> str:
    if (total or done) >= _BYTES_FROM:
        whole = f" / {total / 1e6:.0f}" if total else ""
        return f"{done / 1e6:.0f}{whole} MB"
    return f"{done} / {total}" if total else str(done)


class ProgressBar:
    """Receives `(label, done, total)` from any thread; a new label starts a new bar.

    Shows nothing until the first call, and leaves nothing behind on a terminal. `pause` gives the
    terminal to an answer: calls show nothing until `resume`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_paused = False
        self._said: set[str] = set()
        self._console = Console(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._label: str | None = None

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()

    def pause(self) -> None:
        """Take the bar away and show nothing."""
        with self._lock:
            self._is_paused = True
            if self._progress is not None:
                self._progress.stop()
                self._progress = self._task = None

    def resume(self) -> None:
        """Show what is told from now on."""
        with self._lock:
            self._is_paused = False

    def __call__(self, label: str, done: int, total: int | None) -> None:
        """Show that `done` of `total` (None or 0: unknown) of the stage `label` is behind us."""
        with self._lock:
            if not self._is_paused:
                self._show(_STAGES.get(label, label), done, total or None)

    def _show(self, label: str, done: int, total: int | None) -> None:
        if not self._console.is_terminal:
            if label not in self._said:
                note(f"xjax: {label}")
            self._said.add(label)
            return
        if self._progress is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[amount]}"),
                TimeElapsedColumn(),
            )
            self._progress = Progress(*columns, console=self._console, transient=True, redirect_stdout=False)
            self._progress.start()
        amount = _amount(done, total)
        if label != self._label or self._task is None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(label, total=total, completed=done, amount=amount)
            self._label = label
        else:
            self._progress.update(self._task, total=total, completed=done, amount=amount)


def stats_line(*, ttft: float | None, speed: float | None, prompt: int, cached: int, new: int) -> str:
    """The last line of a run; `ttft` in seconds, `speed` in tokens a second, the rest in tokens."""
    parts = [f"TTFT {ttft:.2f} s"] if ttft is not None else []
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    parts.append(f"{prompt} prompt tokens ({cached} cached)")
    parts.append(f"{new} new tokens")
    return "xjax: " + ", ".join(parts)
