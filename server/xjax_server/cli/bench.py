"""`xjax bench`: measure the engine alone, a running server, or servers beside each other; compare results.

Tables go to standard output, progress to standard error. What the commands do is in
`xjax_server.bench.commands`, which is imported when one runs: other commands start without it.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal, get_type_hints

import typer

from xjax_server.bench.commands.flags import LoadFlags
from xjax_server.cli.terminal.console import ProgressBar, note
from xjax_server.cli.terminal.options import takes
from xjax_server.interrupts import ending_at_once

app = typer.Typer(help="Measure engines and servers, and compare results.")

Json = Annotated[Path | None, typer.Option("--json", help="file for the result")]
Threads = Annotated[int, typer.Option("--threads", min=1, help="of every engine")]
Models = Annotated[
    list[str] | None, typer.Option("--model", help="default, a file, folder or name; may be repeated")
]


@app.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:  # pyright: ignore[reportUnusedFunction]
    if context.invoked_subcommand is None:
        raise typer.BadParameter("name what to measure: offline, serve, serving, client or compare")


def _commands(name: str) -> ModuleType:
    with ending_at_once():
        return import_module(f"xjax_server.bench.commands.{name}")


def takes_load_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of a load; it receives them as the keyword argument `flags`."""
    hints, kind = get_type_hints(LoadFlags, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(item.name, kind, default=item.default, annotation=hints[item.name])
        for item in fields(LoadFlags)
    ]
    return takes(command, shared, lambda values: LoadFlags(**values))


@app.command()
def offline(
    *,
    model: Models = None,
    peers: Annotated[
        str, typer.Option(help="engines to measure beside xjax: transformers, llama-bench=PATH")
    ] = "",
    kernels: Annotated[
        str, typer.Option(help="of our engine; with commas between them: all, beside the first")
    ] = "auto",
    rows: Annotated[str, typer.Option(help="rows of the decode cases")] = "1,8,16",
    prefill: Annotated[str, typer.Option(help="tokens of the prefill cases")] = "512",
    context: Annotated[int, typer.Option(min=1, help="tokens before a decode")] = 64,
    threads: Threads = 2,
    repeats: Annotated[int, typer.Option(min=1, help="rounds over all cases")] = 5,
    starts: Annotated[int, typer.Option(min=0, help="warm starts after a cold one; 0: neither")] = 3,
    json: Json = None,
) -> None:
    """Time prefill, decode and start of the engine, without a server.

    llama.cpp's programs run with the fastest of several settings for each case, which are printed with
    their build flags. A model `random-1b-q4_k` is written once: a Llama without meaning.
    """
    commands = _commands("offline")
    plan = commands.plan_of(
        rows=rows, prefill=prefill, context=context, threads=threads, repeats=repeats, starts=starts,
        kernels=kernels, peers=peers,
    )  # fmt: skip
    commands.offline(model or ["default"], plan, path=json, say=lambda text: note(f"bench: {text}"))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


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
    ignore_eos: Annotated[
        bool, typer.Option(help="ask for answers of exactly output-len tokens; --no-ignore-eos: let them end")
    ] = True,
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
    loads = _commands("loads")
    target = loads.Endpoint(
        url=url, model=model or "", is_chat=endpoint == "chat", api_key=api_key, ignore_eos=ignore_eos,
        extra=loads.json_object(extra), timeout=timeout,
    )  # fmt: skip
    with ProgressBar() as progress:
        loads.serve(target, flags, dataset=dataset, is_text=text, path=json, progress=progress)


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
    loads = _commands("loads")
    with ProgressBar() as progress:
        loads.serving(
            model or ["default"], flags, peers=loads.peers_of(peers), threads=threads, has_engine=engine,
            path=json, progress=progress,
        )  # fmt: skip


@app.command()
def client(
    *,
    concurrency: Annotated[str, typer.Option(help="streams at once, a case for each number")] = "1,4,8,16,64",
    output_len: Annotated[int, typer.Option(min=2, help="tokens of a stream")] = 128,
    interval: Annotated[float, typer.Option(min=0, help="ms between the tokens of a stream")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="rounds")] = 3,
) -> None:
    """Tell what the load client itself takes, against a server that computes nothing."""
    _commands("loads").client(
        concurrency=concurrency, output_len=output_len, interval=interval, repeats=repeats
    )


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="a saved result")],
    b: Annotated[Path, typer.Argument(help="another of the same kind")],
) -> None:
    """Show two saved results side by side."""
    _commands("results").compare(a, b)
