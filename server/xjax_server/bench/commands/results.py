"""Saved results and their tables: what every command of `xjax bench` ends with, and comparing two."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from xjax.errors import RequestError
from xjax_server.bench import compare as results
from xjax_server.bench.cache import report as cache_report
from xjax_server.bench.loading import report as loading_report
from xjax_server.bench.offline import report as offline_report
from xjax_server.bench.quality import report as quality_report
from xjax_server.bench.serving import report as serving_report

KINDS: dict[str, results.Numbers] = {
    "cache": cache_report.numbers,
    "loading": loading_report.numbers,
    "offline": offline_report.numbers,
    "quality": quality_report.numbers,
    "serving": serving_report.numbers,
}
_WIDTH = 190  # of tables that go into a file


def tables() -> Console:
    """Where tables go."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_WIDTH)


def finish(result: dict[str, Any], path: Path | None, show: Callable[[Any, Console], None]) -> None:
    """Show a result, and save it where a path is given."""
    show(result, tables())
    if path is not None:
        results.save(result, path)


def check_path(path: Path | None) -> None:
    """Raise RequestError where a result could not be saved, before it takes minutes to measure."""
    if path is None:
        return
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise RequestError(f"the result cannot be written to {path}: {error.strerror}") from error


def compare(a: Path, b: Path) -> None:
    """Show two saved results side by side. Raises RequestError where they are not of one kind."""
    first, second = results.load(a, KINDS), results.load(b, KINDS)
    if first["kind"] != second["kind"]:
        raise RequestError(
            f"{a} is of kind {first['kind']}, {b} of kind {second['kind']}: not to be compared"
        )
    results.compare(first, second, KINDS[first["kind"]], tables())
