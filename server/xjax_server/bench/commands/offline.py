"""`xjax bench offline`: from flags to a saved result and tables."""

from collections.abc import Sequence
from pathlib import Path

from xjax.errors import RequestError
from xjax_server.bench.commands.loads import numbers
from xjax_server.bench.commands.results import check_path, finish
from xjax_server.bench.models import find_models
from xjax_server.bench.offline import report, run

TORCH = "transformers"


def offline(
    models: Sequence[str],
    *,
    rows: str,
    prefill: int,
    threads: int,
    repeats: int,
    starts: int,
    peers: str,
    path: Path | None,
    say: run.Say,
) -> None:
    """Time prefill, decode and start of the engine."""
    check_path(path)
    names = [name for name in peers.split(",") if name]
    unknown = next((name for name in names if name != TORCH), None)
    if unknown is not None:
        raise RequestError(f"no peer is called {unknown!r}; expected {TORCH}", param="peers")
    plan = run.Plan(
        rows=tuple(sorted(numbers(rows, int, "--rows"))),
        prefill=prefill,
        threads=threads,
        repeats=repeats,
        starts=starts,
        peers=tuple(names),
    )
    finish(run.run(find_models(models), plan, extra=lambda _: {}, say=say), path, report.show)
