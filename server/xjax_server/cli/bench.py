"""`xjax bench`: measure the engine alone, a running server, or servers beside each other; compare results.

Tables go to standard output, progress to standard error. What is measured is `xjax_server.bench`.
"""

import inspect
import json as jsonlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, TypeVar, cast, get_type_hints

import typer
from rich.console import Console
from rich.table import Table

from xjax.errors import RequestError
from xjax_server.bench import compare as results
from xjax_server.bench import machine
from xjax_server.bench.models import find_models
from xjax_server.bench.offline import report as offline_report
from xjax_server.bench.offline import run as offline_run
from xjax_server.bench.samples import median, shown
from xjax_server.bench.serving import beside, report, run
from xjax_server.bench.serving.client import Endpoint
from xjax_server.bench.serving.cost import CostPlan, measure_cost
from xjax_server.bench.serving.load import Load
from xjax_server.bench.serving.measure import Slo
from xjax_server.bench.serving.prompts import FilePrompts, IdPrompts, Prompts, Shape, TextPrompts
from xjax_server.cli.console import ProgressBar, note

T = TypeVar("T")
app = typer.Typer(help="Measure engines and servers, and compare results.", no_args_is_help=True)
KINDS: dict[str, results.Numbers] = {"offline": offline_report.numbers, "serving": report.numbers}
WIDTH = 190  # of tables that go into a file

Json = Annotated[Path | None, typer.Option("--json", help="file for the result")]
Threads = Annotated[int, typer.Option("--threads", min=1, help="of every engine")]
Models = Annotated[
    list[str] | None, typer.Option("--model", help="default, a file, folder or name; may be repeated")
]


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """Flags of the commands that put servers under load."""

    concurrency: Annotated[
        str | None,
        typer.Option(help="requests at once, a case for each number; default: 1,4,8,16; at a rate: any"),
    ] = None
    request_rate: Annotated[
        str,
        typer.Option(help="requests a second at random times, a case for each; inf: the next when one ends"),
    ] = "inf"
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="requests of a case; default: 4 for each stream, else 32")
    ] = None
    input_len: Annotated[int, typer.Option(help="tokens of a prompt")] = 128
    output_len: Annotated[int, typer.Option(help="tokens of an answer")] = 64
    shared_prefix: Annotated[int, typer.Option(help="tokens, of input-len, that all prompts begin with")] = 0
    repeats: Annotated[int, typer.Option(min=1, help="rounds over all cases, each with new prompts")] = 1
    warmup: Annotated[
        int | None,
        typer.Option(min=0, help="short requests before a case that do not count; default: its streams"),
    ] = None
    slo_ttft: Annotated[float | None, typer.Option(help="most ms to the first token, for goodput")] = None
    slo_tpot: Annotated[float | None, typer.Option(help="most ms for each further token, for goodput")] = None
    slo_e2e: Annotated[float | None, typer.Option(help="most ms to the end, for goodput")] = None
    seed: Annotated[int, typer.Option(help="of prompts and arrival times")] = 0
    nonce: Annotated[
        str | None,
        typer.Option(help="makes prompts new to every cache; default: drawn, and told in the result"),
    ] = None
    vocab_size: Annotated[int, typer.Option(min=2, help="token ids of prompts are below this")] = 30_000

    def plan(self, **more: Any) -> run.Plan:
        """What these flags ask for. Raises RequestError."""
        limits = [self.slo_ttft, self.slo_tpot, self.slo_e2e]
        ttft, tpot, e2e = (None if limit is None else limit / 1e3 for limit in limits)
        return run.Plan(
            loads=_loads(self.concurrency, self.request_rate), shape=self.shape(),
            num_prompts=self.num_prompts, repeats=self.repeats, warmup=self.warmup,
            slo=Slo(ttft=ttft, tpot=tpot, e2e=e2e), seed=self.seed, nonce=self.nonce, **more,
        )  # fmt: skip

    def shape(self) -> Shape:
        """Lengths. Raises RequestError."""
        return Shape(input_len=self.input_len, output_len=self.output_len, shared_prefix=self.shared_prefix)


def takes_load_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of a load; it receives them as the keyword argument `flags`."""
    own, hints = inspect.signature(command), get_type_hints(LoadFlags, include_extras=True)
    shared = [
        inspect.Parameter(
            item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[item.name]
        )
        for item in fields(LoadFlags)
    ]

    def call(**values: Any) -> None:
        flags = LoadFlags(**{item.name: values.pop(item.name) for item in shared})
        command(**values, flags=flags)

    kept = [parameter for name, parameter in own.parameters.items() if name != "flags"]
    call.__signature__ = own.replace(parameters=[*kept, *shared])  # pyright: ignore[reportFunctionMemberAccess]
    call.__annotations__ = {}
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    return call


def _numbers(text: str, kind: Callable[[str], T], name: str) -> list[T]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise RequestError(f"--{name} takes numbers with commas between them, got {text!r}") from error
    if not all(cast(float, number) > 0 for number in found):
        raise RequestError(f"--{name} takes numbers above 0, got {text!r}")
    return found


def _loads(concurrency: str | None, request_rate: str) -> tuple[Load, ...]:
    found: list[Load] = []
    for rate in _numbers(request_rate, float, "request-rate"):
        given = concurrency or ("1,4,8,16" if math.isinf(rate) else None)
        streams = [None] if given is None else _numbers(given, int, "concurrency")
        found += [Load(count, rate) for count in streams]
    return tuple(found)


def _object(text: str | None) -> dict[str, Any]:
    try:
        found: Any = jsonlib.loads(text or "{}")
    except ValueError as error:
        raise RequestError(f"--extra takes a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise RequestError("--extra takes a JSON object such as '{\"top_k\": 20}'")
    return cast("dict[str, Any]", found)


def _show(result: Any, path: Path | None, table: Callable[[Any, Console], None]) -> None:
    if path is not None:
        results.save(result, path)
    table(result, _console())


def _console() -> Console:
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=WIDTH)


@app.command()
def offline(
    *,
    model: Models = None,
    peers: Annotated[str, typer.Option(help="engines to measure beside xjax: transformers")] = "",
    rows: Annotated[str, typer.Option(help="rows of the decode cases")] = "1,8,16",
    prefill: Annotated[int, typer.Option(min=1, help="tokens of the prefill case")] = 512,
    threads: Threads = 2,
    repeats: Annotated[int, typer.Option(min=1, help="rounds over all cases")] = 5,
    starts: Annotated[int, typer.Option(min=0, help="warm starts after a cold one; 0: neither")] = 3,
    json: Json = None,
) -> None:
    """Time prefill, decode and start of the engine, without a server."""
    plan = offline_run.Plan(
        rows=tuple(sorted(_numbers(rows, int, "rows"))), prefill=prefill, threads=threads,
        repeats=repeats, starts=starts, peers=tuple(name for name in peers.split(",") if name),
    )  # fmt: skip
    paths = find_models(model or ["default"])
    found = offline_run.run(paths, plan, extra=lambda _: {}, say=lambda text: note(f"bench: {text}"))
    _show(found, json, offline_report.show)


@app.command()
@takes_load_flags
def serve(
    *,
    url: Annotated[str, typer.Option(help="of the server")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="served name; default: the first that the server lists")
    ] = None,
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="what requests are sent to")
    ] = "completions",
    dataset: Annotated[
        Path | None, typer.Option(help='JSONL file of requests: "prompt" or "messages", "max_tokens"')
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", metavar="", help="prompts of words, for servers that take no token ids")
    ] = False,
    ignore_eos: Annotated[bool, typer.Option(help="ask for answers of exactly output-len tokens")] = True,
    extra: Annotated[
        str | None, typer.Option(help="JSON object of fields that go into every request")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="sent as a bearer token")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="seconds until a request has failed")] = 600,
    json: Json = None,
    flags: LoadFlags,
) -> None:
    """Put a running server under load.

    Any server that speaks the OpenAI API will do. Prompts are random token ids, or words where the
    server takes no ids; equal seeds and nonces give equal prompts.
    """
    target = Endpoint(
        url=url, model=model or "", is_chat=endpoint == "chat", api_key=api_key, ignore_eos=ignore_eos,
        extra=_object(extra), timeout=timeout,
    )  # fmt: skip
    plan = flags.plan(has_fixed_length=ignore_eos and dataset is None)
    target = run.with_model(target)
    prompts: Prompts
    if dataset is not None:
        prompts = FilePrompts(dataset, flags.shape(), is_chat=target.is_chat)
    elif target.is_chat or text:
        prompts = TextPrompts(flags.shape(), seed=flags.seed, is_chat=target.is_chat)
    else:
        prompts = IdPrompts(flags.shape(), seed=flags.seed, vocab_size=flags.vocab_size)
    with ProgressBar() as progress:
        found = run.run_url(target, prompts, plan, progress)
    _show(found, json, report.show)


def _peers(text: str) -> dict[str, str]:
    parts = [part.partition("=") for part in text.split(",") if part]
    found = {name: path for name, _, path in parts}
    for name, path in found.items():
        if not path:
            raise RequestError(f"--peers takes NAME=PATH with commas between them, got {name!r}")
    return found


@app.command()
@takes_load_flags
def serving(
    *,
    model: Models = None,
    peers: Annotated[
        str, typer.Option(help="llama-server=PATH,vllm=PYTHON: servers to start beside ours")
    ] = "",
    threads: Threads = 2,
    engine: Annotated[bool, typer.Option(help="measure the engine without a server too")] = True,
    json: Json = None,
    flags: LoadFlags,
) -> None:
    """Start our server, peers and the engine alone, and put them under the same load in turn.

    A peer runs with the fastest of several settings, which are printed with its build flags.
    """
    plan, chosen = flags.plan(), beside.Beside(threads=threads, peers=_peers(peers), has_engine=engine)
    paths, described, found = find_models(model or ["default"]), machine.describe(), list[dict[str, Any]]()
    with ProgressBar() as progress, TemporaryDirectory(prefix="xjax-bench-") as folder:
        for path in paths:
            found.append(
                beside.run_model(
                    path, plan, chosen, vocab_size=flags.vocab_size, folder=Path(folder), progress=progress
                )
            )
    _show(run.result(plan, found, described, threads=threads, dtype="float32"), json, report.show)


@app.command()
def client(
    *,
    concurrency: Annotated[str, typer.Option(help="streams at once, a case for each number")] = "1,4,8,16,64",
    output_len: Annotated[int, typer.Option(min=2, help="tokens of a stream")] = 128,
    interval: Annotated[float, typer.Option(min=0, help="ms between the tokens of a stream")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="rounds")] = 3,
) -> None:
    """Tell what the load client itself takes, against a server that computes nothing."""
    streams = tuple(_numbers(concurrency, int, "concurrency"))
    plan = CostPlan(streams=streams, output_len=output_len, seconds=interval / 1e3, repeats=repeats)
    table = Table(
        "streams", "µs of a processor a token", "share of one", "TPOT ms, p50", box=None, pad_edge=False
    )
    for case in measure_cost(plan):
        cost, tpot = median(case["seconds_per_token"]), case["tpot"]
        share = None if cost is None else cost * case["streams"] / plan.seconds if plan.seconds else None
        table.add_row(
            str(case["streams"]), shown(None if cost is None else cost * 1e6),
            "-" if share is None else f"{share:.1%}", shown(None if tpot is None else tpot["p50"] * 1e3, 2),
        )  # fmt: skip
    _console().print(table)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="a saved result")],
    b: Annotated[Path, typer.Argument(help="another of the same kind")],
) -> None:
    """Show two saved results side by side."""
    first, second = results.load(a, KINDS), results.load(b, KINDS)
    if first["kind"] != second["kind"]:
        raise RequestError(
            f"{a} is of kind {first['kind']}, {b} of kind {second['kind']}: not to be compared"
        )
    results.compare(first, second, KINDS[first["kind"]], _console())
