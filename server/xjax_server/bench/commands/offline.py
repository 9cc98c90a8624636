"""`xjax bench offline`: from flags to a saved result and tables."""

from collections.abc import Sequence
from pathlib import Path

from xjax.config import KERNELS
from xjax.errors import RequestError
from xjax_server.bench.commands.loads import numbers
from xjax_server.bench.commands.models import find_models
from xjax_server.bench.commands.results import check_path, finish
from xjax_server.bench.offline import report, run
from xjax_server.bench.offline.cases import Plan
from xjax_server.bench.offline.peers import peers_of


def plan_of(
    *,
    rows: str,
    prefill: str,
    context: int,
    threads: int,
    repeats: int,
    starts: int,
    kernels: str,
    peers: str,
) -> Plan:
    """What the flags ask for. Raises RequestError."""
    names = tuple(dict.fromkeys(name for name in kernels.split(",") if name))
    if unknown := next((name for name in names if name not in KERNELS), None):
        raise RequestError(f"--kernels takes {', '.join(KERNELS)}, got {unknown!r}", param="kernels")
    return Plan(
        rows=tuple(sorted(numbers(rows, int, "--rows"))),
        prefill=tuple(sorted(numbers(prefill, int, "--prefill"))),
        context=context,
        threads=threads,
        repeats=repeats,
        starts=starts,
        kernels=names or ("auto",),
        peers=peers_of(peers),
    )


def offline(models: Sequence[str], plan: Plan, *, path: Path | None, say: run.Say) -> None:
    """Time prefill, decode and start of the engine."""
    check_path(path)
    finish(run.run(find_models(models), plan, extra=lambda _: {}, say=say), path, report.show)
