"""Bodies: how large, how slow, of which kind; always an answer that the client can read."""

import contextlib
import json
import select
import socket
import threading
import time

import pytest

from tests.server.echo import routes
from tests.server.fake_backend import FakeBackend
from tests.server.running import RunningServer, parse, read_all, until

MAX_BODY = 100_000


@pytest.fixture(scope="module")
def server():
    limits = {"max_body": MAX_BODY, "body_timeout": 0.5}
    with RunningServer(FakeBackend(), routes=routes, **limits) as running:
        yield running
        assert running.service.active == set()
        assert running.backend.num_live == 0


def post(length, more=b""):
    return b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n%b\r\n" % (length, more)


def code_of(data):
    status, _, body = parse(data)
    return status, json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200), ("application/json; charset=utf-8", 200), ("Application/JSON", 200),
        ("text/json", 200), (None, 200), ("", 200),
        ("text/plain", 415), ("multipart/form-data; boundary=a", 415), ("application/x-ndjson", 415),
        ("\xff" * 200, 415),
    ],
)  # fmt: skip
def test_media_types(server, kind, status):
    body = b'{"prompt": "hi", "max_tokens": 2}'
    more = b"connection: close\r\n"
    if kind is not None:
        more += b"content-type: " + kind.encode("latin-1") + b"\r\n"
    answer = server.raw(post(len(body), more) + body)
    assert parse(answer)[0] == status
    if status != 200:
        assert code_of(answer) == (415, "unsupported_media_type")


def test_a_compressed_body_is_refused(server):
    answer = server.raw(post(4, b"content-encoding: gzip\r\nconnection: close\r\n") + b"abcd")
    assert code_of(answer) == (415, "unsupported_media_type")


def test_a_body_at_the_limit_is_read(server):
    body = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
    body += b" " * (MAX_BODY - len(body))
    assert server.request("POST", "/echo", body)[0] == 200
    assert server.request("POST", "/echo", body + b" ")[0] == 413


@pytest.mark.parametrize("close", [b"", b"connection: close\r\n"])
def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(server, close):
    with server.connect() as client:
        client.sendall(post(10**9, close))
        assert code_of(read_all(client)) == (413, "request_too_large")


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_client_that_sends_all_of_100_mb_can_read_why_not(server, is_chunked):
    piece = b"x" * 1_000_000
    head = post(10**8) if not is_chunked else (
        b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    )  # fmt: skip
    with server.connect() as client:
        client.sendall(head)
        for _ in range(100):
            client.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
        assert code_of(read_all(client)) == (413, "request_too_large")


def test_a_client_that_asks_before_sending_is_told_to_go_on_or_not(server):
    body = b'{"prompt": "hi", "max_tokens": 2}'
    with server.connect() as client:
        client.sendall(post(len(body), b"expect: 100-continue\r\nconnection: close\r\n"))
        assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
        client.sendall(body)
        assert parse(read_all(client))[0] == 200
    with server.connect() as client:
        client.sendall(post(10**9, b"expect: 100-continue\r\n"))
        assert client.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_slow_body_is_408_and_the_connection_ends(server):
    with server.connect() as client:
        client.sendall(post(100))
        began, answer = time.monotonic(), b""
        with contextlib.suppress(ConnectionError):
            while not answer:
                client.sendall(b" ")
                if select.select([client], [], [], 0.05)[0]:
                    answer = read_all(client)
        assert 0.4 < time.monotonic() - began < 2.5
        assert code_of(answer) == (408, "body_timeout")


def test_half_a_body_and_gone_leaves_nothing(server):
    for end in (socket.SHUT_WR, socket.SHUT_RDWR):
        client = server.connect()
        client.sendall(post(1000) + b'{"prompt": ')
        client.shutdown(end)
        client.close()
    until(lambda: not server.lifecycle._server.server_state.tasks)
    assert server.request("GET", "/health")[0] == 200


def test_large_bodies_at_once_are_refused_one_by_one(server):
    answers = []

    def send():
        answers.append(server.request("POST", "/echo", b"x" * 2_000_000)[0])

    threads = [threading.Thread(target=send) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [413] * 10


def test_large_bodies_have_a_common_bound_and_give_it_back():
    limits = {"max_body": 8_000_000, "max_bodies": 9_000_000}
    with RunningServer(FakeBackend(), routes=routes, **limits) as server:
        with server.connect() as first, server.connect() as second:
            first.sendall(post(7_000_000) + b" " * 6_000_000)
            time.sleep(0.2)
            second.sendall(post(6_000_000) + b" " * 5_000_000)
            answer = b""
            while b"}}" not in answer:
                answer += second.recv(4096)
            assert code_of(answer) == (429, "queue_full")
            assert server.request("POST", "/echo", b'{"prompt": "hi", "max_tokens": 1}')[0] == 200
        body = b'{"prompt": "hi", "max_tokens": 1}'
        for _ in range(3):
            assert server.request("POST", "/echo", body + b" " * 6_000_000)[0] == 200
