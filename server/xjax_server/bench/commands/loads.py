"""`xjax bench serve`, `serving` and `client`: from flags to saved results and tables."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

from rich.table import Table

from xjax.errors import RequestError
from xjax_server.bench import machine
from xjax_server.bench.beside import run as beside
from xjax_server.bench.beside.peers import check_peer
from xjax_server.bench.beside.servers import ending_children
from xjax_server.bench.commands.flags import LoadFlags
from xjax_server.bench.commands.models import find_models
from xjax_server.bench.commands.results import check_path, finish, tables
from xjax_server.bench.samples import median, shown
from xjax_server.bench.serving import report, run
from xjax_server.bench.serving.client import Endpoint
from xjax_server.bench.serving.cost import CostPlan, measure_cost
from xjax_server.bench.serving.load import Load
from xjax_server.bench.serving.measure import Slo
from xjax_server.bench.serving.prompts import FilePrompts, IdPrompts, Prompts, Shape, TextPrompts

T = TypeVar("T")


def numbers(text: str, kind: Callable[[str], T], flag: str) -> list[T]:
    """Numbers above 0 with commas between them. Raises RequestError."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise RequestError(f"{flag} takes numbers with commas between them, got {text!r}") from error
    if not all(cast(float, number) > 0 for number in found):
        raise RequestError(f"{flag} takes numbers above 0, got {text!r}")
    return found


def loads_of(concurrency: str | None, request_rate: str) -> tuple[Load, ...]:
    """Every rate with every number of streams; at a rate, any number of them unless one is given."""
    found: list[Load] = []
    for rate in numbers(request_rate, float, "--request-rate"):
        given = concurrency or ("1,4,8,16" if math.isinf(rate) else None)
        streams = [None] if given is None else numbers(given, int, "--concurrency")
        found += [Load(count, rate) for count in streams]
    return tuple(found)


def plan_of(flags: LoadFlags) -> run.Plan:
    """What the flags ask for. Raises RequestError."""
    limits = (flags.slo_ttft, flags.slo_tpot, flags.slo_e2e)
    ttft, tpot, e2e = (None if limit is None else limit / 1e3 for limit in limits)
    return run.Plan(
        loads=loads_of(flags.concurrency, flags.request_rate),
        shape=Shape(
            input_len=flags.input_len, output_len=flags.output_len, shared_prefix=flags.shared_prefix
        ),
        num_prompts=flags.num_prompts,
        repeats=flags.repeats,
        warmup=flags.warmup,
        slo=Slo(ttft=ttft, tpot=tpot, e2e=e2e),
        seed=flags.seed,
        nonce=flags.nonce,
    )


def json_object(text: str | None) -> dict[str, Any]:
    """The object that --extra gives. Raises RequestError."""
    try:
        found: Any = json.loads(text or "{}")
    except ValueError as error:
        raise RequestError(f"--extra takes a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise RequestError("--extra takes a JSON object such as '{\"top_k\": 20}'")
    return cast("dict[str, Any]", found)


def serve(
    endpoint: Endpoint,
    flags: LoadFlags,
    *,
    dataset: Path | None,
    is_text: bool,
    path: Path | None,
    progress: run.Progress,
) -> None:
    """Put a running server under load; `endpoint` without a model: the first that it lists."""
    check_path(path)
    if not endpoint.url.startswith(("http://", "https://")):
        raise RequestError(f"--url {endpoint.url}: a URL begins with http:// or https://", param="url")
    plan, shape = plan_of(flags), plan_of(flags).shape
    plan = replace(plan, has_fixed_length=endpoint.ignore_eos and dataset is None)
    prompts: Prompts
    if dataset is not None:
        prompts = FilePrompts(dataset, shape, is_chat=endpoint.is_chat)
    elif endpoint.is_chat or is_text:
        prompts = TextPrompts(shape, seed=flags.seed, is_chat=endpoint.is_chat)
    else:
        prompts = IdPrompts(shape, seed=flags.seed, vocab_size=flags.vocab_size)
    finish(run.run_url(run.with_model(endpoint), prompts, plan, progress), path, report.show)


def peers_of(text: str) -> dict[str, str]:
    """Paths by name of `name=path,name=path`. Raises RequestError."""
    parts = [part.partition("=") for part in text.split(",") if part]
    for name, _, path in parts:
        if not path:
            raise RequestError(f"--peers takes NAME=PATH with commas between them, got {name!r}")
        check_peer(name)
    return {name: path for name, _, path in parts}


def serving(
    models: Sequence[str],
    flags: LoadFlags,
    *,
    peers: Mapping[str, str],
    threads: int,
    has_engine: bool,
    path: Path | None,
    progress: run.Progress,
) -> None:
    """Start servers beside each other and put them under the same load in turn."""
    check_path(path)
    plan, chosen = plan_of(flags), beside.Beside(threads=threads, peers=peers, has_engine=has_engine)
    files, described, found = find_models(models), machine.describe(), list[dict[str, Any]]()
    with ending_children(), TemporaryDirectory(prefix="xjax-bench-") as folder:
        for file in files:
            one = beside.run_model(
                file, plan, chosen, vocab_size=flags.vocab_size, folder=Path(folder), progress=progress
            )
            found.append(one)
    finish(run.result(plan, found, described, threads=threads, dtype="float32"), path, report.show)


def client(*, concurrency: str, output_len: int, interval: float, repeats: int) -> None:
    """Print what the load client takes."""
    streams = tuple(numbers(concurrency, int, "--concurrency"))
    plan = CostPlan(streams=streams, output_len=output_len, seconds=interval / 1e3, repeats=repeats)
    table = Table("streams", "µs of a processor a token", "share of one", "TPOT ms, p50", box=None)
    for case in measure_cost(plan):
        cost, tpot = median(case["seconds_per_token"]), case["tpot"]
        share = cost * case["streams"] / plan.seconds if cost is not None and plan.seconds else None
        table.add_row(
            str(case["streams"]),
            shown(None if cost is None else cost * 1e6),
            "-" if share is None else f"{share:.1%}",
            shown(None if tpot is None else tpot["p50"] * 1e3, 2),
        )
    tables().print(table)
