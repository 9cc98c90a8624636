"""A server on a loopback port, in a thread of the tests' process, around a backend of one's choice.

with RunningServer(FakeBackend(), routes=my_routes) as server:
    httpx.get(server.url + "/health")
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from functools import partial

from tests.server.fake_backend import served
from xjax_server.app import build_app
from xjax_server.lifecycle import Lifecycle, Plan, listen
from xjax_server.limits import Limits


class RunningServer:
    """Serves until the `with` block ends. `service` and `backend` are there to be looked at.

    routes      service -> routes; None: those of the API
    is_loaded   False leaves the service in state "loading" until `loaded` is set
    send_buffer bytes that the system keeps for a client that does not read
    limits      fields of Limits
    """

    def __init__(
        self,
        backend,
        *,
        routes=None,
        api_keys=(),
        cors=(),
        is_loaded=True,
        front=None,
        names=("small",),
        defaults=None,
        seed=0,
        drain_timeout=5.0,
        send_buffer=None,
        host="127.0.0.1",
        shares_cache=False,
        **limits,
    ):
        self.backend, self.routes = backend, routes
        self.loaded = threading.Event()
        if is_loaded:
            self.loaded.set()
        self.model = served(backend, names=names, front=front, defaults=defaults, seed=seed)
        self.service = None
        self.load_error = None  # raised in place of the model, once `loaded` is set
        self._make = partial(build_app, api_keys=api_keys, cors=cors, shares_cache=shares_cache)
        self._ready = threading.Event()
        self._listener = listen(host, 0)
        if send_buffer is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._plan = Plan(
            make_app=self._make_app,
            load=self._load,
            on_ready=self._ready.set,
            limits=Limits(**limits),
            drain_timeout=drain_timeout,
        )
        self.lifecycle = Lifecycle(self._plan, self._listener)
        self._thread = threading.Thread(target=lambda: asyncio.run(self.lifecycle.run()), daemon=True)

    def _make_app(self, service):
        self.service = service
        return self._make(service, self.routes(service))

    def _load(self):
        self.loaded.wait()
        if self.load_error is not None:
            raise self.load_error
        return self.model

    def __enter__(self):
        self._thread.start()
        if self.loaded.is_set():
            assert self._ready.wait(10)
        return self

    def __exit__(self, *exception):
        self.loaded.set()
        with contextlib.suppress(RuntimeError):
            self.call(self.lifecycle.stop)
        self._thread.join(15)
        self.backend.close()
        assert not self._thread.is_alive()

    def call(self, function, *args):
        """Have the server's loop call a function."""
        self.service._loop.call_soon_threadsafe(function, *args)

    # ---- clients ----

    def connect(self, timeout=60.0):
        """A socket to the server."""
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def raw(self, data, timeout=60.0):
        """Send bytes, and return everything that comes until the server closes."""
        with self.connect(timeout) as client:
            client.sendall(data)
            return read_all(client)

    def request(self, method, path, body=None, *, headers=()):
        """One request on its own connection: (status, headers, body)."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "host: test", "connection: close"]
        if body is not None:
            lines += [f"content-length: {len(data)}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in dict(headers).items()]
        return parse(self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + data))

    def metric(self, name):
        """Value of one sample line of /metrics, e.g. 'xjax_requests_total{outcome="stop"}'."""
        text = self.request("GET", "/metrics")[2].decode()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " "))


def read_all(client):
    """Everything until the other end closes."""
    data = b""
    while piece := client.recv(65536):
        data += piece
    return data


def parse(data):
    """An HTTP answer as (status, headers, body), chunks joined."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = unchunk(body)
    return int(first.split()[1]), headers, body


def unchunk(data):
    """The content of a chunked body; stops where it was cut."""
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        number = int(size, 16)
        out, data = out + data[:number], data[number + 2 :]
        if number == 0:
            break
    return out


def until(condition, timeout=30.0):
    """Wait for a condition; fails when it does not come."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come"
        time.sleep(0.005)
