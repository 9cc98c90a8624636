"""The life of the server's process: listen, load, serve, drain, end.

    listen ─ load in a thread, /health answers ─ ready ─ signal: drain, bounded ─ exit 0
                └ load failed: raised to the caller        └ second signal: exit at once

It knows how to serve an application, not which one and not what is loaded.
"""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import stat
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import uvicorn
from starlette.types import ASGIApp

from xjax.errors import EngineError, LoadError
from xjax_server.connection import MAX_HEAD, Connection
from xjax_server.errors import Unavailable
from xjax_server.limits import Limits
from xjax_server.serving import ServedModel, Service

T = TypeVar("T")
_log = logging.getLogger(__name__)

_BACKLOG = 2048
_MAX_FILES = 1 << 20
_WATCH_SECONDS = 1.0
_LAST_WORDS = 2  # seconds for error events and connections at the end
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run.

    make_app        the application of a service; called once, on the loop
    load            brings the model; runs in a thread of its own while the socket listens
    on_ready        called on the loop once requests are taken
    on_stop         called on the loop at the first signal, with the number of requests that run
    drain_timeout   seconds that running requests may take after the first signal
    access_log      whether each request gets a log line
    """

    make_app: Callable[[Service], ASGIApp]
    load: Callable[[], ServedModel]
    on_ready: Callable[[], None]
    on_stop: Callable[[int], None] = lambda _: None
    limits: Limits
    drain_timeout: float = 30.0
    access_log: bool = False


def listen(host: str, port: int, uds: str | None = None) -> socket.socket:
    """Open the socket to serve on: a Unix socket when `uds` is given. Raises LoadError with the cause."""
    if uds is not None:
        return _listen_unix(Path(uds))
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise LoadError(f"--host {host}: {cause}") from error
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        hint = "; choose another --port" if error.errno == errno.EADDRINUSE else ""
        raise LoadError(f"cannot listen on {host} port {port}: {error.strerror}{hint}") from error
    return found


def _listen_unix(path: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        is_there = path.exists()
        if is_there and not stat.S_ISSOCK(path.stat().st_mode):
            raise FileExistsError(errno.EEXIST, "it is there and is no socket")
        if is_there and not _is_answered(path):
            path.unlink()  # left by a process that was killed
        found.bind(str(path))
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        raise LoadError(f"cannot listen on --uds {path}: {error.strerror or error}") from error
    return found


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def address_of(listener: socket.socket) -> str:
    """Where a listening socket is reached, as a URL or, of a Unix socket, its path."""
    name = listener.getsockname()
    if listener.family is socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[0], name[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(plan: Plan, listener: socket.socket) -> bool:
    """Serve until a signal; returns whether the model's thread has ended.

    Raises what `plan.load` raised. Owns and closes the socket.
    """
    _raise_file_limit()
    lifecycle = Lifecycle(plan, listener)
    try:
        asyncio.run(lifecycle.run())
    finally:
        if listener.family is socket.AF_UNIX:
            Path(lifecycle.path).unlink(missing_ok=True)
    if lifecycle.error is not None:
        raise lifecycle.error
    return not lifecycle.is_loading


def _raise_file_limit() -> None:
    """Let as many connections be open as the system lets us have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which raise the signal again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the signals to `Lifecycle`."""
        yield


class Lifecycle:
    """One run of a plan on one socket; see `run`."""

    def __init__(self, plan: Plan, listener: socket.socket) -> None:
        self.plan = plan
        self.error: BaseException | None = None
        self.is_loading = True
        self.path: str = listener.getsockname() if listener.family is socket.AF_UNIX else ""
        self._listener = listener
        self._drain: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until drained or until the model could not be loaded."""
        self._loop = asyncio.get_running_loop()
        self._service = Service(limits=self.plan.limits)
        self._server = _Server(self._config(self.plan.make_app(self._service)))
        self._set_signals()
        threading.Thread(target=self._load, name="xjax-load", daemon=True).start()
        watch = asyncio.create_task(self._watch())
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            watch.cancel()
            self._service.close()

    def _config(self, app: ASGIApp) -> uvicorn.Config:
        limits = self.plan.limits
        config = uvicorn.Config(
            app,
            http=partial(Connection, limits=limits),  # pyright: ignore[reportArgumentType]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=self.plan.access_log,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEAD,
            timeout_graceful_shutdown=_LAST_WORDS,
        )
        config.timeout_keep_alive = limits.idle_timeout  # pyright: ignore[reportAttributeAccessIssue]
        return config

    def _set_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._loop.add_signal_handler(number, self.stop, number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Drain and end; at once when asked a second time."""
        if self._drain is not None:
            os._exit(128 + number)
        self.plan.on_stop(len(self._server.server_state.tasks))
        self._drain = self._loop.create_task(self._end())

    # ---- loading ----

    def _load(self) -> None:
        try:
            model = self.plan.load()
        except BaseException as error:  # noqa: BLE001  the top of the loading thread: raised by `run`
            self._tell(self._fail, error)
        else:
            self._tell(self._start, model)

    def _tell(self, function: Callable[[T], None], value: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, value)

    def _start(self, model: ServedModel) -> None:
        self.is_loading = False
        self._service.start(model)
        if self._drain is None:
            self.plan.on_ready()

    def _fail(self, error: BaseException) -> None:
        self.is_loading = False
        self._service.fail(str(error))
        if self._drain is None:
            self.error = error
        self._server.should_exit = True

    async def _watch(self) -> None:
        """End what waits for an engine that is dead; it has had a second to say so itself."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            failure = self._service.failure()
            if failure is not None and self._service.active:
                await asyncio.sleep(_WATCH_SECONDS)
                self._service.end_all(EngineError(f"the engine has failed: {failure}"))

    # ---- ending ----

    async def _end(self) -> None:
        self._service.drain()
        if not self._server.started:
            self._server.should_exit = True
            return
        for server in self._server.servers:
            server.close()
        if not await self._is_quiet(self.plan.drain_timeout):
            _log.warning("requests still run after %g s: they are ended", self.plan.drain_timeout)
            self._service.end_all(Unavailable("the server is shutting down", code="draining", retry_after=5))
            await self._is_quiet(_LAST_WORDS)
        self._server.should_exit = True

    async def _is_quiet(self, seconds: float) -> bool:
        """Wait for the requests being answered; whether all have ended in time."""
        deadline = self._loop.time() + seconds
        while self._server.server_state.tasks:
            if self._loop.time() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True
