"""Raw sockets against the server: heads that never end, garbage, idlers, and clients that take nothing."""

import contextlib
import json
import select
import socket
import time

import pytest

from tests.server.echo import routes
from tests.server.fake_backend import FakeBackend
from tests.server.running import RunningServer, parse, read_all, unchunk, until
from xjax_server.lifecycle import _raise_file_limit

HELLO = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
CLOSE = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def server():
    limits = {"header_timeout": 0.4, "idle_timeout": 0.6, "body_timeout": 1.0, "stall_timeout": 0.3}
    with RunningServer(FakeBackend(), routes=routes, send_buffer=4096, **limits) as running:
        yield running


@pytest.fixture(scope="module")
def patient():
    with RunningServer(FakeBackend(pace=0.001), routes=routes, send_buffer=4096) as running:
        yield running


def code_of(data):
    status, headers, body = parse(data)
    assert headers["connection"] == "close"
    return status, json.loads(body)["error"]["code"]


def echo(**fields):
    body = json.dumps({"prompt": "hi", **fields}).encode()
    return b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n" + b"a: " + b"x" * 300_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(60_000)),
        b"GET /" + b"x" * 300_000,
        b"A" * 300_000,
    ],
    ids=["one long", "many", "target", "method"],
)
def test_a_head_has_a_largest_size(server, data):
    with server.connect() as client:
        client.settimeout(5)
        with contextlib.suppress(ConnectionError):
            client.sendall(data)
        answer = read_all(client)
    assert code_of(answer)[0] in (400, 431, 404)


def test_an_endless_head_is_told_that_it_is_too_large(server):
    with server.connect() as client:
        answer = b""
        with contextlib.suppress(ConnectionError):
            client.sendall(b"GET / HTTP/1.1\r\n")
            for i in range(200):
                client.sendall(b"h%d: %b\r\n" % (i, b"x" * 1000))
                if select.select([client], [], [], 0.002)[0]:
                    break
            answer = read_all(client)
    assert code_of(answer) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\na: \x00\r\n\r\n",
    ],
)
def test_what_is_no_http_is_400_in_the_envelope(server, data):
    status, code = code_of(server.raw(data))
    assert (status, code) == (400, "invalid_http")


def test_an_upgrade_is_answered_as_plain_http(server):
    upgrade = b"connection: Upgrade, close\r\nupgrade: websocket\r\n"
    assert parse(server.raw(HELLO[:-2] + upgrade + b"\r\n"))[0] == 200


def test_garbage_behind_a_request_ends_the_connection_after_its_answer(server):
    data = server.raw(HELLO + b"garbage\r\n\r\n")
    assert data.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 400" in data


def test_requests_sent_ahead_are_answered_in_order(server):
    data = server.raw(HELLO + HELLO.replace(b"health", b"version") + CLOSE)
    assert data.count(b"HTTP/1.1 200 OK") == 3
    assert data.index(b"version") > data.index(b"ready")


@pytest.mark.parametrize("data", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: a\r\n"])
def test_a_head_must_come_in_time(server, data):
    began = time.monotonic()
    answer = server.raw(data)
    assert 0.3 < time.monotonic() - began < 20
    assert answer == b"" if not data else code_of(answer) == (408, "body_timeout")


def test_a_head_that_drips_is_cut_off_too(server):
    began = time.monotonic()
    with server.connect() as client:
        answer = b""
        with contextlib.suppress(ConnectionError):
            for byte in b"GET / HTTP/1.1\r\nhost: a\r\n" * 10:
                client.sendall(bytes([byte]))
                if select.select([client], [], [], 0.03)[0]:
                    answer = read_all(client)
                    break
    assert time.monotonic() - began < 20
    assert code_of(answer)[0] == 408


def test_a_second_head_must_come_in_time_too(server):
    with server.connect() as client:
        client.sendall(HELLO + b"GET / HTT")
        began = time.monotonic()
        answer = read_all(client)
        assert time.monotonic() - began < 20
    assert answer.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in answer


def test_an_idle_connection_is_closed(server):
    with server.connect() as client:
        client.sendall(HELLO)
        began = time.monotonic()
        assert parse(read_all(client))[0] == 200
        assert 0.4 < time.monotonic() - began < 20


def test_an_old_client_gets_a_stream_that_ends_with_the_connection(patient):
    body = b'{"prompt": "hi", "max_tokens": 2, "stream": true}'
    data = patient.raw(b"POST /echo HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    status, headers, text = parse(data)
    assert status == 200 and "transfer-encoding" not in headers
    assert text.endswith(b"data: [DONE]\n\n")


def test_500_idle_connections_disturb_nobody(patient):
    _raise_file_limit()  # as the program does; both ends are of this process
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(patient.connect())
        times = []
        for _ in range(5):
            began = time.monotonic()
            assert patient.request("POST", "/echo", {"prompt": "hi", "max_tokens": 2})[0] == 200
            times.append(time.monotonic() - began)
        assert min(times) < 5
    until(lambda: len(patient.lifecycle._server.server_state.connections) == 0)


def test_a_request_sent_ahead_does_not_hide_that_the_client_left(patient):
    client = patient.connect()
    client.sendall(echo(max_tokens=4000) + HELLO)
    until(lambda: patient.backend.num_live == 1)
    client.close()
    until(lambda: patient.backend.num_live == 0, 2)


def shrink(client):
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return client


def test_a_slow_reader_loses_nothing_and_delays_nobody(patient):
    with shrink(socket.socket()) as slow:
        slow.connect(("127.0.0.1", patient.port))
        slow.settimeout(20)
        body = json.dumps({"prompt": "hi", "max_tokens": 1000, "n": 8, "stream": True}).encode()
        slow.sendall(
            b"POST /echo HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        until(lambda: patient.backend.num_live == 8)
        began = time.monotonic()
        assert patient.request("POST", "/echo", {"prompt": "hi", "max_tokens": 20, "stream": True})[0] == 200
        assert time.monotonic() - began < 20
        until(lambda: patient.backend.num_live == 0, 20)
        _, _, text = parse(read_all(slow))
    deltas = [json.loads(line[6:]) for line in text.decode().split("\n\n") if line.startswith("data: [") and
              not line.startswith("data: [DONE")]  # fmt: skip
    for sample in range(8):
        assert "".join(d[2] for d in deltas if d[1] == sample) == "hi" * 500
    assert text.endswith(b'data: "end"\n\ndata: [DONE]\n\n')


def test_a_client_that_takes_nothing_at_all_is_cut_off(server):
    with shrink(socket.socket()) as stuck:
        stuck.connect(("127.0.0.1", server.port))
        stuck.sendall(echo(max_tokens=2000, n=8, stream=True))
        until(lambda: len(server.service.active) == 1)
        until(lambda: not server.service.active, 10)
        assert server.backend.num_live == 0
    assert unchunk(b"0\r\n\r\n") == b""
