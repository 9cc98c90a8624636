"""The layers around every endpoint: state, keys, origins, paths, methods, and errors in one form."""

import json
import logging

import pytest

from tests.server.echo import routes
from tests.server.fake_backend import FakeBackend
from tests.server.running import RunningServer, parse, until
from xjax.errors import LoadError

HI = {"prompt": "hi", "max_tokens": 4}


@pytest.fixture(scope="module")
def server():
    with RunningServer(FakeBackend(), routes=routes) as running:
        yield running


@pytest.fixture(scope="module")
def keyed():
    keys = ["first-key", "schlüssel"]
    with RunningServer(FakeBackend(), routes=routes, api_keys=keys, cors=["https://a.test"]) as running:
        yield running


def error_of(answer):
    """The envelope of an answer, whose form is checked."""
    status, headers, body = answer
    assert headers["content-type"] == "application/json"
    envelope = json.loads(body)
    assert list(envelope) == ["error"]
    assert set(envelope["error"]) == {"message", "type", "param", "code"}
    assert status >= 400
    return status, envelope["error"]


def test_a_request_is_answered(server):
    status, _, body = server.request("POST", "/echo", HI)
    assert (status, json.loads(body)) == (200, {"text": "hihi"})


def test_probes_of_a_ready_server(server):
    assert json.loads(server.request("GET", "/health")[2]) == {"status": "ready"}
    assert server.request("GET", "/ready")[0] == 200
    assert set(json.loads(server.request("GET", "/version")[2])) == {"version"}
    assert server.request("GET", "/metrics")[1]["content-type"].startswith("text/plain; version=0.0.4")


def test_while_loading_health_answers_and_nothing_else():
    with RunningServer(FakeBackend(), routes=routes, is_loaded=False) as server:
        assert server.request("GET", "/health")[0] == 200
        for method, path, body in (("GET", "/ready", None), ("POST", "/echo", HI)):
            answer = server.request(method, path, body)
            assert error_of(answer)[0] == 503
            assert error_of(answer)[1]["code"] == "model_loading"
            assert int(answer[1]["retry-after"]) >= 1
        server.loaded.set()
        until(lambda: server.request("GET", "/ready")[0] == 200)
        assert server.request("POST", "/echo", HI)[0] == 200


def test_a_load_that_fails_ends_the_server():
    with RunningServer(FakeBackend(), routes=routes, is_loaded=False) as server:
        server.load_error = LoadError("made up")
        server.loaded.set()
        until(lambda: server.lifecycle.error is not None)
        assert str(server.lifecycle.error) == "made up"
        server._thread.join(5)
        assert not server._thread.is_alive()


@pytest.mark.parametrize("silently", [False, True])
def test_a_dead_engine_fails_health_and_ends_requests(silently):
    with RunningServer(FakeBackend(pace=0.01), routes=routes) as server, server.connect() as client:
        body = json.dumps({"prompt": "hi", "stream": True}).encode()
        client.sendall(b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        seen = client.recv(1000)
        server.backend.die("made up", silently=silently)
        while b"0\r\n\r\n" not in seen:
            seen += client.recv(1000)
        text = parse(seen)[2].decode()
        assert '"type": "server_error"' in text and "made up" in text
        assert text.endswith("data: [DONE]\n\n")
        status, _, health = server.request("GET", "/health")
        assert (status, json.loads(health)) == (503, {"status": "failed", "reason": "made up"})
        for method, path, asked in (("GET", "/ready", None), ("POST", "/echo", HI)):
            answer = server.request(method, path, asked)
            assert error_of(answer)[0] == 503
            assert "made up" in error_of(answer)[1]["message"]
        assert server.service.active == set()


@pytest.mark.parametrize(
    "path",
    [
        "/", "/nothing", "/echo/", "//echo", "/./echo", "/a/../echo", "/%65cho", "/echo%00", "/echo%2f",
        "/%2e%2e/echo", "/..%2fecho", "/ECHO", "/v1%2fmodels", "/echo;a", "/%ff", "/" + "a" * 8000,
        "http://elsewhere/echo", "/echo%0d%0aset-cookie:a",
    ],
)  # fmt: skip
def test_what_is_no_path_of_ours_is_404(server, path):
    status, error = error_of(server.request("POST", path, HI))
    assert (status, error["code"]) == (404, "not_found")
    assert len(error["message"]) < 200


def test_a_query_is_no_part_of_the_path(server):
    assert server.request("POST", "/echo?a=//../%00", HI)[0] == 200


@pytest.mark.parametrize(("method", "path"), [
    ("GET", "/echo"), ("PUT", "/echo"), ("OPTIONS", "/echo"), ("HEAD", "/echo"), ("POST", "/health"),
    ("TRACE", "/health"), ("BREW", "/health"),
])  # fmt: skip
def test_a_wrong_method_is_405_and_told_the_right_one(server, method, path):
    status, headers, body = server.request(method, path)
    assert status == 405
    assert headers["allow"] in ("POST", "GET, HEAD", "HEAD, GET")
    assert (body == b"") == (method == "HEAD")


def test_head_is_get_without_a_body(server):
    status, headers, body = server.request("HEAD", "/health")
    assert (status, body) == (200, b"")
    assert headers["content-length"] == str(len(server.request("GET", "/health")[2]))


def test_a_defect_of_ours_is_500_without_detail_and_the_server_lives(server, caplog):
    with caplog.at_level(logging.ERROR, "xjax_server"):
        status, error = error_of(server.request("POST", "/defect", {}))
    assert (status, error["type"]) == (500, "server_error")
    assert "secret" not in error["message"]
    assert any(record.exc_info for record in caplog.records)
    assert server.request("POST", "/echo", HI)[0] == 200


def test_refusals_are_counted_by_status(server):
    name = 'xjax_refused_requests_total{status="404"}'
    server.request("GET", "/nothing")
    before = server.metric(name)
    server.request("GET", "/nothing")
    assert server.metric(name) == before + 1


@pytest.mark.parametrize(
    "header",
    [
        None, "Bearer", "Bearer ", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-key2",
        "Bearer FIRST-KEY", "Bearer first", "Bearer \xff",
    ],
)  # fmt: skip
def test_without_a_key_nothing_but_probes(keyed, header):
    headers = {} if header is None else {"authorization": header}
    for method, path in (("POST", "/echo"), ("GET", "/v1/models"), ("GET", "/nothing")):
        lines = [f"{method} {path} HTTP/1.1", "host: a", "connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        answer = parse(keyed.raw("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"))
        status, error = error_of(answer)
        assert (status, error["code"]) == (401, "invalid_api_key")
        assert answer[1]["www-authenticate"] == "Bearer"
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert keyed.request("GET", path, headers=headers)[0] == 200


@pytest.mark.parametrize("key", ["first-key", "schlüssel"])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_any_of_the_keys_opens(keyed, key, scheme):
    headers = {"authorization": f"{scheme} {key}"}
    assert keyed.request("POST", "/echo", HI, headers=headers)[0] == 200


def test_an_allowed_origin_may_ask_and_read_errors(keyed):
    asked = {"origin": "https://a.test", "access-control-request-method": "POST",
             "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    status, headers, _ = keyed.request("OPTIONS", "/echo", headers=asked)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://a.test")
    assert "authorization" in headers["access-control-allow-headers"]
    _, headers, _ = keyed.request("POST", "/echo", HI, headers={"origin": "https://a.test"})
    assert headers["access-control-allow-origin"] == "https://a.test"


def test_another_origin_may_not(keyed, server):
    assert "access-control-allow-origin" not in keyed.request(
        "POST", "/echo", HI, headers={"origin": "https://b.test"}
    )[1]  # fmt: skip
    assert "access-control-allow-origin" not in server.request(
        "POST", "/echo", HI, headers={"origin": "https://a.test"}
    )[1]  # fmt: skip
