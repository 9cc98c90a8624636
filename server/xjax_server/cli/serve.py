"""`xjax serve`: the HTTP server around one model.

Flags, port and model name are checked first; then the socket listens and /health answers while the
model is loaded. What serves is imported when the command runs: the others start without it.
"""

import dataclasses
import json
import logging
import os
import sys
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import xjax
from xjax.checkpoints import hub
from xjax.config import EngineOptions, environment_api_keys
from xjax.errors import LoadError
from xjax_server.cli.terminal.console import ProgressBar, note
from xjax_server.cli.terminal.options import Flags, takes_engine_flags
from xjax_server.interrupts import ending_at_once

if TYPE_CHECKING:
    from xjax_server.limits import Limits
    from xjax_server.serving import ServedModel, Service

PORT = 8000
MAX_QUEUE = 1024  # requests that wait, when nothing else is said: some 30 rounds of --max-num-seqs
_CLOSE_SECONDS = 5.0
_LEVELS = ("debug", "info", "warning", "error")
_OTHER_LEVELS = {"trace": "debug", "critical": "error"}


_Model = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="what to serve, as --model of the other commands")
]
_Host = Annotated[
    str | None, typer.Option("--host", help="address to listen on; default: 127.0.0.1, with a key 0.0.0.0")
]
_Port = Annotated[
    int | None, typer.Option("--port", help=f"port to listen on; default: {PORT}", min=0, max=65535)
]
_Uds = Annotated[str | None, typer.Option("--uds", help="listen on this Unix socket instead")]
_ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        help="key that clients must send, as well as that of XJAX_API_KEY; may be given several times",
    ),
]
_ShareCache = Annotated[
    bool,
    typer.Option(
        "--share-prefix-cache",
        help="let clients with different keys start from each other's kept pages; without it each key is a "
        "tenant of its own",
        metavar="",
    ),
]
_Names = Annotated[
    list[str] | None,
    typer.Option("--served-model-name", help="name of the model for clients; may be given several times"),
]
_RequestTimeout = Annotated[
    float | None,
    typer.Option(
        "--request-timeout", help="seconds after which an answer is broken off; default: none", min=0.001
    ),
]
_QueueTimeout = Annotated[
    float | None,
    typer.Option(
        "--queue-timeout",
        help="seconds that a request may wait before its first step; default: none",
        min=0.001,
    ),
]
_MaxBody = Annotated[
    int | None, typer.Option("--max-body", help="largest body in bytes; default: 8 MiB", min=1)
]
_Cors = Annotated[
    list[str] | None,
    typer.Option(
        "--cors",
        "--allowed-origins",
        help="origin whose pages may ask, * for all; may be given several times",
    ),
]
_LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level", "--uvicorn-log-level", help=f"{', '.join(_LEVELS)}; debug tells every request"
    ),
]
_DrainTimeout = Annotated[
    float, typer.Option("--drain-timeout", help="seconds that running requests get after SIGTERM", min=0)
]
_Seed = Annotated[
    int | None,
    typer.Option("--seed", help="what the seeds of requests that name none are drawn from; default: 0"),
]


class _Engine:
    """The model once it is loaded; brings it, and lets it go."""

    def __init__(self, flags: Flags, names: tuple[str, ...]) -> None:
        self.names = names
        self.has_template = True
        self._flags = flags
        self._llm: xjax.LLM | None = None

    def load(self, progress: ProgressBar) -> "ServedModel":
        """Load the model and wait for its first programs. Raises LoadError."""
        serving = import_module("xjax_server.serving")
        llm = self._llm = self._flags.open_engine(progress, num_prompts=EngineOptions().max_num_seqs)
        llm.wait_ready()
        self.has_template = llm.front.template is not None
        return serving.ServedModel(
            names=self.names,
            backend=llm.engine,
            front=llm.front,
            max_model_len=llm.max_model_len,
            defaults=llm.generation_defaults,
            seed=llm.options.seed,
            created=int(time.time()),
        )

    def close(self) -> bool:
        """Stop the engine; whether all of it stopped soon, programs under compilation too."""
        if self._llm is None:
            return True
        thread = threading.Thread(target=self._llm.close, daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)
        own = (threading.main_thread(), threading.current_thread())
        return not any(t not in own and not t.daemon and t.is_alive() for t in threading.enumerate())


def _names(given: list[str] | None, model: str | None) -> tuple[str, ...]:
    """Names to serve under: those given, or the model's own, a local path by its last part too."""
    if given:
        if not all(name.strip() for name in given):
            raise typer.BadParameter("--served-model-name: the name is empty")
        return tuple(dict.fromkeys(given))
    if model is None:
        return (hub.DEFAULT_MODEL.name,)
    path = Path(model).expanduser()
    return (
        (path.resolve().stem if path.suffix == ".gguf" else path.resolve().name, model)
        if path.exists()
        else (model,)
    )


def _origins(given: list[str] | None) -> list[str]:
    """Origins, each as it is or several as a JSON list."""
    found: list[str] = []
    for item in given or ():
        if not item.startswith("["):
            found.append(item)
            continue
        try:
            listed: Any = json.loads(item)
        except ValueError as error:
            raise typer.BadParameter(f"--cors {item}: {error}") from error
        found += [str(origin) for origin in listed]
    return found


def _set_up_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("xjax: %(levelname)s %(message)s"))
    levels = {"xjax_server": level.upper(), "uvicorn.error": "ERROR"}
    if level == "debug":
        levels["uvicorn.access"] = "INFO"
    for name, value in levels.items():
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(value)
        logger.propagate = False


def _say_ready(progress: ProgressBar, address: str, engine: _Engine, has_key: bool) -> None:
    progress.pause()
    name = engine.names[0]
    note(f"xjax: serving {name}; stop with Ctrl-C")
    if not engine.has_template:
        note("xjax: this model has no chat template: /v1/completions works, chat needs --chat-template FILE")
    key = " -H 'Authorization: Bearer …'" if has_key else ""
    if not address.startswith("http"):
        note(f"xjax: try  curl --unix-socket {address.removeprefix('unix:')}{key} http://localhost/v1/models")
        return
    address = address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
    path, asked = "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
    if not engine.has_template:
        path, asked = "completions", {"prompt": "Hello"}
    body = json.dumps({"model": name, **asked, "stream": True})
    note(f"xjax: try  curl {address}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'")
    note(f"xjax: or   openai.OpenAI(base_url='{address}/v1', api_key='…')")


def _say_stop(progress: ProgressBar, drain_timeout: float, num_running: int) -> None:
    progress.pause()
    running = f": {num_running} requests run, up to {drain_timeout:g} s" if num_running else ""
    note(f"xjax: stopping{running}; again to stop at once")


def _limits(max_body: int | None, request_timeout: float | None, queue_timeout: float | None) -> "Limits":
    with ending_at_once():
        limits: Limits = import_module("xjax_server.limits").Limits()
    if max_body is not None:
        limits = dataclasses.replace(limits, max_body=max_body)
    return dataclasses.replace(limits, request_timeout=request_timeout, queue_timeout=queue_timeout)


def _keys(given: list[str] | None) -> list[str]:
    """The keys of the command line and of the environment."""
    keys = [*(given or ()), *environment_api_keys()]
    if not all(key.strip() for key in keys):
        # What a shell makes of a variable that is not set; it would open the server to everybody.
        raise typer.BadParameter("--api-key: the key is empty; give one, or leave the flag out")
    return keys


def _check_files(model: str | None, template: str | None) -> None:
    """Look at the files that are here already; raises LoadError for those that cannot be used."""
    if template is not None:
        try:
            Path(template).open("rb").close()
        except (OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else error
            raise LoadError(f"--chat-template {template}: {cause}") from error
    path = None if model is None else Path(model).expanduser()
    if path is not None and path.exists():
        with ending_at_once():
            checkpoint = import_module("xjax.checkpoints.checkpoint")
        checkpoint.open_checkpoint(path)  # headers alone


def _engine_flags(flags: Flags, models: list[str | None], seed: int | None, level: str) -> Flags:
    """The flags with the server's own defaults; everything in them is checked."""
    named = [name for name in (*models, flags.model) if name is not None]
    if len(named) > 1:
        raise typer.BadParameter(f"the model is named twice, {named[0]} and {named[1]}")
    options: dict[str, Any] = {"max_queue": MAX_QUEUE, **flags.engine}
    if seed is not None:
        options["seed"] = seed
    EngineOptions.from_mapping(options)
    model = named[0] if named else None
    hub.check_name(model)
    _check_files(model, flags.chat_template)
    is_verbose = flags.verbose or level in ("debug", "info")
    return dataclasses.replace(flags, model=model, engine=options, verbose=is_verbose)


def _serve(
    name: _Model = None,
    *,
    host: _Host = None,
    port: _Port = None,
    uds: _Uds = None,
    api_key: _ApiKey = None,
    share_prefix_cache: _ShareCache = False,
    served_model_name: _Names = None,
    request_timeout: _RequestTimeout = None,
    queue_timeout: _QueueTimeout = None,
    max_body: _MaxBody = None,
    cors: _Cors = None,
    log_level: _LogLevel = "warning",
    drain_timeout: _DrainTimeout = 30.0,
    seed: _Seed = None,
    short: Annotated[str | None, typer.Option("--m", hidden=True)] = None,
    folder: Annotated[str | None, typer.Option("--w", hidden=True)] = None,
    file: Annotated[str | None, typer.Option("--f", hidden=True)] = None,
    server: Annotated[bool, typer.Option("--server", hidden=True, metavar="")] = False,
    flags: Flags,
) -> None:
    """Serve a model over HTTP as OpenAI's API does.

    How to run it for long and for others: docs/serving.md.
    """
    del server  # other programs must be told to be one
    level = _OTHER_LEVELS.get(log_level, log_level)
    if level not in _LEVELS:
        raise typer.BadParameter(f"--log-level must be one of {', '.join(_LEVELS)}, not {log_level!r}")
    if uds is not None and (host is not None or port is not None):
        raise typer.BadParameter("--uds is instead of --host and --port; give one or the other")
    keys = _keys(api_key)
    if file is not None:  # beside --m it is a file of that repository
        short = file if short is None else f"{short}/{file}"
    flags = _engine_flags(flags, [name, short, folder], seed, level)
    _set_up_logging("info" if flags.verbose and level == "warning" else level)
    settings = {
        "limits": _limits(max_body, request_timeout, queue_timeout),
        "drain_timeout": drain_timeout,
        "access_log": level == "debug",
    }
    _run(
        _Engine(flags, _names(served_model_name, flags.model)),
        place=(host or ("0.0.0.0" if keys else "127.0.0.1"), PORT if port is None else port, uds),
        access={"api_keys": keys, "cors": _origins(cors), "shares_cache": share_prefix_cache},
        settings=settings,
    )


def _run(
    engine: _Engine,
    *,
    place: tuple[str, int, str | None],
    access: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    with ending_at_once():
        lifecycle, app = import_module("xjax_server.lifecycle"), import_module("xjax_server.app")
        openai = import_module("xjax_server.openai")
    listener = lifecycle.listen(*place)
    address: str = lifecycle.address_of(listener)
    note(f"xjax: listening on {address}; /ready tells when the model is loaded")

    def make_app(service: "Service") -> Any:
        return app.build_app(service, openai.routes(service), **access)

    with ProgressBar() as progress:
        plan = lifecycle.Plan(
            make_app=make_app,
            load=partial(engine.load, progress),
            on_stop=partial(_say_stop, progress, settings["drain_timeout"]),
            on_ready=partial(_say_ready, progress, address, engine, bool(access["api_keys"])),
            **settings,
        )
        is_loaded: bool = lifecycle.run(plan, listener)
    has_ended = is_loaded and engine.close()
    note("xjax: stopped")
    if not has_ended:
        # A thread inside the compiler cannot be stopped, and nothing of ours is left to be written.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


serve = takes_engine_flags(_serve, has_sampling=False)
