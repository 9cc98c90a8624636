"""Streams on the wire: keep-alives, errors in the middle, and a client that leaves in every state."""

import json
import socket
import struct
import threading
import time
from functools import partial

import pytest
from starlette.routing import Route

from tests.server import echo
from tests.server.fake_backend import FakeBackend
from tests.server.running import RunningServer, parse, read_all, until
from xjax_server.sse import DONE, KEEP_ALIVE


def post(path="/echo", **fields):
    body = json.dumps({"prompt": "hi", **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def texts(body):
    """The text of the deltas of an echo stream, comments and end left out."""
    frames = [
        frame for frame in body.decode().split("\n\n") if frame.startswith("data: [") and "DONE" not in frame
    ]
    return [json.loads(frame[6:])[2] for frame in frames]


def start_and(server, data):
    """A connection on which a request was sent."""
    client = server.connect()
    client.sendall(data)
    return client


def test_a_stream_is_its_headers_its_frames_and_its_end():
    with RunningServer(FakeBackend(), routes=echo.routes) as server:
        status, headers, body = parse(server.raw(post(max_tokens=5, stream=True)))
        assert status == 200
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["cache-control"] == "no-cache"
        assert "".join(texts(body)) == "hihih"
        assert body.endswith(b'data: "end"\n\n' + DONE)
        assert body.count(DONE) == 1


@pytest.mark.parametrize("phase", ["queue", "prefill"])
def test_silence_is_filled_from_acceptance_on(phase):
    backend = FakeBackend(pace=0.01, prefill_steps=0 if phase == "queue" else 30)
    backend.hold(phase == "queue")
    with RunningServer(backend, routes=echo.routes, keep_alive=0.05) as server:
        with start_and(server, post(max_tokens=3, stream=True)) as client:
            seen = b""
            until(lambda: backend.requests)
            began = time.monotonic()
            while seen.count(KEEP_ALIVE) < 3:
                seen += client.recv(1000)
            assert seen.startswith(b"HTTP/1.1 200")
            assert time.monotonic() - began < 10
            backend.hold(False)
            body = parse(seen + read_all(client))[2]
        assert "".join(texts(body)) == "hih"
        assert body.startswith(KEEP_ALIVE)


def test_a_token_needs_no_keep_alive():
    with RunningServer(FakeBackend(pace=0.005), routes=echo.routes, keep_alive=0.2) as server:
        body = parse(server.raw(post(max_tokens=50, stream=True)))[2]
        assert body.count(KEEP_ALIVE) == 1


def test_a_failure_in_the_middle_is_an_event_then_a_clean_end():
    with RunningServer(FakeBackend(fail_at=3), routes=echo.routes) as server:
        status, _, body = parse(server.raw(post(max_tokens=5, stream=True)))
        assert status == 200
        frames = body.decode().split("\n\n")
        assert "".join(texts(body)) == "hi"
        error = json.loads(frames[-3][6:])["error"]
        assert (error["message"], error["code"]) == ("the step failed: made up", "engine_error")
        assert frames[-2:] == ["data: [DONE]", ""]
        assert server.metric('xjax_requests_total{outcome="error"}') == 1


def test_a_failure_without_a_stream_is_a_status():
    with RunningServer(FakeBackend(fail_at=3), routes=echo.routes) as server:
        status, _, body = parse(server.raw(post(max_tokens=5)))
        assert (status, json.loads(body)["error"]["code"]) == (500, "engine_error")


def test_one_failed_sample_ends_all_of_them():
    with RunningServer(FakeBackend(fail_at=3, pace=0.01), routes=echo.routes) as server:
        body = parse(server.raw(post(max_tokens=5, n=4, stream=True)))[2]
        assert body.count(b'"error"') == 1
        until(lambda: server.backend.num_live == 0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_too_long_in_the_queue_is_503(is_stream):
    backend = FakeBackend()
    backend.hold()
    with RunningServer(backend, routes=echo.routes, request_timeout=30.0, queue_timeout=0.05) as server:
        with start_and(server, post(max_tokens=5, stream=is_stream)) as client:
            until(lambda: backend.requests)
            time.sleep(0.1)
            backend.hold(False)
            status, headers, body = parse(read_all(client))
        assert b'"queue_timeout"' in body
        if not is_stream:
            assert (status, headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_that_takes_too_long_is_broken_off(is_stream):
    with RunningServer(FakeBackend(pace=0.01), routes=echo.routes, request_timeout=0.1) as server:
        status, _, body = parse(server.raw(post(max_tokens=4000, stream=is_stream)))
        assert b'"request_timeout"' in body
        assert status == (200 if is_stream else 503)
        if is_stream:
            assert len(texts(body)) > 3 and body.endswith(DONE)
        until(lambda: server.backend.num_live == 0, 1)


def test_a_refusal_comes_before_the_status_of_a_stream():
    with RunningServer(FakeBackend(max_model_len=8, max_queue=1), routes=echo.routes) as server:
        status, _, body = parse(server.raw(post(prompt="x" * 9, stream=True)))
        assert (status, json.loads(body)["error"]["code"]) == (400, "context_length_exceeded")
        server.backend.hold()
        with start_and(server, post(max_tokens=2)):
            until(lambda: server.backend.requests)
            status, headers, body = parse(server.raw(post(stream=True)))
            assert (status, headers["retry-after"]) == (429, "2")
            assert json.loads(body)["error"]["type"] == "rate_limit_error"


def leave(client, how):
    """End a connection: politely, or as a process that was killed."""
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_a_client_that_leaves_aborts_within_a_step(phase, is_stream, how):
    backend = FakeBackend(pace=0.02, prefill_steps=10_000 if phase == "prefill" else 0)
    backend.hold(phase == "queue")
    with RunningServer(backend, routes=echo.routes) as server:
        client = start_and(server, post(max_tokens=4000, n=2, stream=is_stream))
        until(lambda: backend.num_live == 2)
        time.sleep(0.1)
        left = time.monotonic()
        leave(client, how)
        until(lambda: backend.num_live == 0, 8)
        assert time.monotonic() - left < 8
        assert backend.aborts == 1
        until(lambda: server.metric('xjax_requests_total{outcome="abort"}') == 1)
        assert server.metric('xjax_pages_used{group="0"}') == 0
        assert server.metric("xjax_active_requests") == 0


def test_a_client_that_leaves_while_its_text_is_worked_on_reaches_no_engine():
    reached, done = threading.Event(), threading.Event()

    def slow():
        reached.set()
        done.wait(5)

    async def wait(service, scope, receive, send):
        await echo.read_body(scope, receive, service.limits)

        async def work():
            await service.in_thread(slow)
            await echo.Generation.start(
                service, [echo.Prompt((1, 2), echo.SamplingParams())], request_id="never"
            )

        await echo.until_disconnect(receive, work())

    def routes(service):
        return [Route("/wait", echo.Endpoint(partial(wait, service)), methods=["POST"])]

    with RunningServer(FakeBackend(), routes=routes) as server:
        client = start_and(server, post("/wait"))
        assert reached.wait(5)
        client.close()
        until(lambda: not server.lifecycle._server.server_state.tasks, 1)
        done.set()
        time.sleep(0.05)
        assert server.backend.requests == []


def test_an_abort_storm_leaves_nothing():
    with RunningServer(FakeBackend(pace=0.002), routes=echo.routes) as server:
        for round_ in range(10):
            clients = [
                start_and(server, post(max_tokens=4000, n=1 + i % 3, stream=i % 2 == 0)) for i in range(30)
            ]
            time.sleep(0.005 * round_)
            for i, client in enumerate(clients):
                leave(client, "reset" if i % 2 else "close")
        until(lambda: server.backend.num_live == 0 and not server.service.active)
        until(lambda: not server.lifecycle._server.server_state.tasks)
        assert server.backend._sinks == {}
        assert "".join(texts(parse(server.raw(post(max_tokens=4, stream=True)))[2])) == "hihi"
        assert server.metric("xjax_active_requests") == 0


def test_a_defect_of_the_frames_is_an_event_without_detail(monkeypatch):
    def broken(self, items):
        raise ZeroDivisionError("a secret detail")

    monkeypatch.setattr(echo.EchoFrames, "of", broken)
    with RunningServer(FakeBackend(), routes=echo.routes) as server:
        body = parse(server.raw(post(max_tokens=4, stream=True)))[2]
        assert b"secret" not in body and b'"internal_error"' in body and body.endswith(DONE)
        until(lambda: server.backend.num_live == 0)


def _name(i):
    return "xyz"[i % 3] + "pqrs"[i // 3 % 4] + chr(ord("A") + i // 12)


def test_64_streams_at_once_are_each_complete():
    with RunningServer(FakeBackend(pace=0.002), routes=echo.routes) as server:
        bodies = []

        def ask(i):
            bodies.append(parse(server.raw(post(prompt=_name(i), max_tokens=90, stream=True)))[2])

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted("".join(texts(body)) for body in bodies) == sorted(_name(i) * 30 for i in range(64))
