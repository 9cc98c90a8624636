"""Requests that no honest client sends, drawn by chance; for the tests and for scripts/soak.

Each kind is a function that does one to the server at (host, port) and returns the statuses it saw.
It knows the API's paths, and asks nothing about the answers but their status and form.
"""

import contextlib
import json
import random
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.server.running import unchunk

Address = tuple[str, int]
PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
ALLOWED = {200, 400, 401, 404, 405, 408, 413, 415, 429, 431, 503}
_TIMEOUT = 30.0
_VALUES = [None, -1, 1e999, "x", [], {}, [[]], True, 2**70, "\0", "\ud800", [None], {"a": {"b": []}}]
_FIELDS = [
    "model", "messages", "max_tokens", "temperature", "stop", "n", "logit_bias", "stream", "seed", "tools",
    "logprobs", "stream_options", "user", "top_p", "chat_template_kwargs",
]  # fmt: skip
_NO_JSON = [
    b"", b"{", b"\xff\xfe\x00", b'{"model": "\xff"}', b"[" * 20_000, b'{"a":' * 20_000, b"nul", b"NaN",
    b"1e400", b'"\\ud800"', b"{}" * 100, b"\0" * 100, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
]  # fmt: skip
_TEXTS = ["\0", "\ud800", "\U0010ffff", "a\u0301" * 500, "<|im_end|>" * 50, "\u202e", ""]
_ODD_PATHS = [
    "/..", "//v1/models", "/v1/../v1/models", "/v1/models/%00", "/v1%2fmodels", "/v1/models/../../etc",
    "/" + "a" * 20_000, "/v1/models/" + "%2e%2e%2f" * 20, "/%", "/%zz", "*", "/metrics/../health",
    "/v1/models/" + "a" * 3000, "/v1/chat/completions/", "http://a/v1/models",
]  # fmt: skip
_NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50 + b"\r\n\r\n", b"hello\r\n\r\n",
    b"\r\n" * 3 + b"\0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
]  # fmt: skip


def _head(path: str, length: int, more: str = "") -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{more}"
    return f"{lines}content-length: {length}\r\n\r\n".encode()


@dataclass
class Tally:
    """What came of all of them."""

    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


class Hostile:
    """One client with a seed of its own; `names` are the models to ask for."""

    def __init__(self, address: Address, seed: int, name: str) -> None:
        self._address, self._draw, self._name = address, random.Random(seed), name

    def once(self, tally: Tally) -> None:
        """Do one thing, drawn by chance, and count what came of it."""
        kind = self._draw.choice(KINDS)
        tally.kinds[kind.__name__] += 1
        try:
            data = kind(self)
        except (ConnectionError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                tally.bad.append(f"{kind.__name__}: no answer in {_TIMEOUT:g} s")
            return
        for status in _statuses(data):
            tally.statuses[status] += 1
            if status not in ALLOWED:
                tally.bad.append(f"{kind.__name__}: {data[:300]!r}")

    # ---- parts ----

    def connect(self) -> socket.socket:
        return socket.create_connection(self._address, _TIMEOUT)

    def send(self, data: bytes, *, pieces: int = 1) -> bytes:
        """Send, and read until the server closes."""
        with self.connect() as client:
            size = max(1, -(-len(data) // pieces))
            with contextlib.suppress(ConnectionError):
                for start in range(0, len(data), size):
                    client.sendall(data[start : start + size])
            return _read(client)

    def post(self, body: bytes, *, more: str = "", length: int | None = None) -> bytes:
        path = self._draw.choice(PATHS)
        return _head(path, len(body) if length is None else length, more) + body

    def chat(self, **fields: object) -> bytes:
        messages = [{"role": "user", "content": "hi"}]
        body = json.dumps({"model": self._name, "messages": messages, "max_tokens": 4, **fields}).encode()
        return _head(PATHS[0], len(body)) + body

    # ---- kinds ----

    def wrong_types(self) -> bytes:
        draw = self._draw
        fields = {draw.choice(_FIELDS): draw.choice(_VALUES) for _ in range(draw.randint(1, 3))}
        if fields.get("max_tokens", 4) is None:  # right, and without end
            fields["max_tokens"] = 0
        return self.send(self.chat(**fields))

    def no_json(self) -> bytes:
        return self.send(self.post(self._draw.choice(_NO_JSON)))

    def noise(self) -> bytes:
        return self.send(self.post(self._draw.randbytes(self._draw.randint(1, 5000))))

    def odd_text(self) -> bytes:
        text = self._draw.choice(_TEXTS)
        return self.send(self.chat(messages=[{"role": "user", "content": text}]))

    def unknown_model(self) -> bytes:
        return self.send(self.chat(model=self._draw.choice(["nobody", "", "../x", "x" * 5000])))

    def long_prompt(self) -> bytes:
        return self.send(self.chat(messages=[{"role": "user", "content": "hello " * 20_000}]))

    def many_messages(self) -> bytes:
        return self.send(self.chat(messages=[{"role": "user", "content": "a"}] * 3000))

    def large_body(self) -> bytes:
        return self.send(self.post(b" " * 100, length=self._draw.choice([10**9, 10**18, 34 << 20])))

    def half_body(self) -> bytes:
        with self.connect() as client:
            client.sendall(self.post(b'{"model"', length=5000))
            self._leave(client)
        return b""

    def pieces(self) -> bytes:
        return self.send(self.chat(), pieces=self._draw.randint(2, 60))

    def paths(self) -> bytes:
        path = self._draw.choice(_ODD_PATHS)
        method = self._draw.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW", "CONNECT"])
        return self.send(f"{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())

    def no_http(self) -> bytes:
        return self.send(self._draw.choice(_NO_HTTP))

    def header_bomb(self) -> bytes:
        many = b"".join(b"h%d: x\r\n" % i for i in range(40_000))
        bomb = self._draw.choice([b"a: " + b"x" * 400_000, many])
        return self.send(b"GET /health HTTP/1.1\r\nhost: a\r\n" + bomb, pieces=10)

    def wrong_media_type(self) -> bytes:
        kind = self._draw.choice(["text/plain", "multipart/form-data; boundary=a", "\x7f", "a" * 5000])
        return self.send(self.post(b"{}", more=f"content-type: {kind}\r\n"))

    def abort(self) -> bytes:
        """Leave at any moment of an answer."""
        with self.connect() as client:
            client.sendall(self.chat(max_tokens=self._draw.randint(1, 500), stream=self._draw.random() < 0.5))
            time.sleep(self._draw.random() * 0.1)
            self._leave(client)
        return b""

    def abort_many(self) -> bytes:
        for _ in range(10):
            self.abort()
        return b""

    def idle(self) -> bytes:
        """Many connections that say little and go."""
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                client = stack.enter_context(self.connect())
                client.sendall(b"GET /heal"[: self._draw.randint(0, 9)])
        return b""

    def ahead(self) -> bytes:
        """Several requests before the first answer."""
        one = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"
        return self.send(one * self._draw.randint(1, 50) + one[:-2] + b"connection: close\r\n\r\n")

    def slow_reader(self) -> bytes:
        """Take an answer byte by byte for a while, then go."""
        with self.connect() as client:
            client.sendall(self.chat(max_tokens=200, stream=True))
            for _ in range(self._draw.randint(1, 20)):
                if not select.select([client], [], [], 1)[0] or not client.recv(7):
                    break
                time.sleep(0.002)
            self._leave(client)
        return b""

    def honest(self) -> bytes:
        return self.send(self.chat(stream=self._draw.random() < 0.5))

    def _leave(self, client: socket.socket) -> None:
        if self._draw.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


KINDS: list[Callable[[Hostile], bytes]] = [
    Hostile.wrong_types, Hostile.no_json, Hostile.noise, Hostile.odd_text, Hostile.unknown_model,
    Hostile.long_prompt, Hostile.many_messages, Hostile.large_body, Hostile.half_body, Hostile.pieces,
    Hostile.paths, Hostile.no_http, Hostile.header_bomb, Hostile.wrong_media_type, Hostile.abort,
    Hostile.abort_many, Hostile.idle, Hostile.ahead, Hostile.slow_reader, Hostile.honest,
]  # fmt: skip


def _read(client: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            data += piece
    return data


def _statuses(data: bytes) -> list[int]:
    parts = data.split(b"HTTP/1.1 ")[1:]
    return [int(part[:3]) for part in parts if part[:3].isdigit()]


def attack(address: Address, count: int, *, name: str, seed: int = 0, threads: int = 8) -> Tally:
    """Do `count` hostile things from several threads."""
    tallies = [Tally() for _ in range(threads)]

    def work(number: int) -> None:
        client = Hostile(address, seed * 1000 + number, name)
        for _ in range(count // threads):
            client.once(tallies[number])

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    total = Tally()
    for tally in tallies:
        total.statuses += tally.statuses
        total.kinds += tally.kinds
        total.bad += tally.bad
    return total


class Witness:
    """An honest stream that runs all the while; tells what it got and its longest silence in seconds."""

    def __init__(self, address: Address, name: str, max_tokens: int) -> None:
        self.text, self.longest_gap, self.is_over = b"", 0.0, False
        self._client = Hostile(address, 0, name)
        self._request = self._client.chat(max_tokens=max_tokens, stream=True, seed=1, ignore_eos=True)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Witness":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.join()

    @property
    def content(self) -> str:
        """The answer's text; fails when the stream is not whole."""
        body = unchunk(self.text.partition(b"\r\n\r\n")[2]).decode()
        frames = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
        assert frames[-1] == "[DONE]", frames[-3:]
        choices = [choice for frame in frames[:-1] for choice in json.loads(frame)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    def _run(self) -> None:
        with self._client.connect() as client:
            client.sendall(self._request)
            last = time.monotonic()
            while piece := client.recv(65536):
                now = time.monotonic()
                if self.text:
                    self.longest_gap = max(self.longest_gap, now - last)
                last, self.text = now, self.text + piece
        self.is_over = True
