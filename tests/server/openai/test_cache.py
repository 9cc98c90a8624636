"""The cache's endpoints, its field, its place in usage, and who shares with whom."""

import json
import socket

import pytest

from tests.server.fake_backend import FakeBackend
from tests.server.openai.conftest import connect
from tests.server.running import RunningServer, parse
from xjax.errors import RequestError
from xjax_server.auth import check_local
from xjax_server.generation import salt_of
from xjax_server.openai import routes
from xjax_server.openai.replies import CacheStats

HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BOTH = [("/v1/chat/completions", HI), ("/v1/completions", {"prompt": "hi", "max_tokens": 2})]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def usage_of(server, path, body):
    """The usage of a reply, and of the same as a stream."""
    status, _, data = server.request("POST", path, body)
    assert status == 200
    whole = json.loads(data)["usage"]
    events = server.request("POST", path, body | STREAM)[2].decode().split("\n\n")
    last = json.loads(events[-3].removeprefix("data: "))
    assert last["usage"] == whole
    return whole


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def own(special_server, backend):
    return special_server(backend)


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_usage_tells_of_reused_tokens_once_a_prompt(own, backend, path, body):
    assert usage_of(own, path, body)["prompt_tokens_details"] == {"cached_tokens": 0}
    backend.cached = {0: 48, 1: 64, 2: 64}  # the others find what the first has computed
    assert usage_of(own, path, body | {"n": 3})["prompt_tokens_details"] == {"cached_tokens": 48}


def test_each_of_several_prompts_counts(own, backend):
    backend.cached = {0: 16}
    body = {"prompt": ["hi", "hello", "you"], "max_tokens": 1, "n": 2}
    assert usage_of(own, "/v1/completions", body)["prompt_tokens_details"] == {"cached_tokens": 48}


def test_the_client_sees_it(own, backend):
    backend.cached = {0: 32}
    with connect(own) as client:
        reply = client.chat.completions.create(model="small", **HI)
    assert reply.usage.prompt_tokens_details.cached_tokens == 32


# ---- salts and tenants ----


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_a_salt_reaches_the_engine(own, backend, path, body):
    for salt in (None, "a", "é" * 128, "x" * 256):
        assert own.request("POST", path, body | {"cache_salt": salt})[0] == 200
    assert [r.cache_salt for r in backend.requests] == [b"", b"a", "é".encode() * 128, b"x" * 256]


@pytest.mark.parametrize("salt", ["", "x" * 257, "é" * 129, 7, True, ["a"], {}, "\ud800"])
@pytest.mark.parametrize(("path", "body"), BOTH)
def test_what_is_no_salt_is_refused(own, backend, path, body, salt):
    status, _, data = own.request("POST", path, body | {"cache_salt": salt})
    error = json.loads(data)["error"]
    assert status == 400 and not backend.requests
    if salt != "\ud800":  # that is no JSON
        assert error["param"] == "cache_salt" and error["message"].startswith("cache_salt: ")


def salts(server, key, salt=None):
    """Salt of the engine's request that a client's one becomes."""
    with connect(server, key) as client:
        client.chat.completions.create(model="small", **HI, extra_body={"cache_salt": salt} if salt else {})
    return server.backend.requests[-1].cache_salt


def test_each_of_several_keys_is_a_tenant(special_server):
    server = special_server(FakeBackend(), api_keys=["one", "two"])
    given = [salts(server, key, salt) for key in ("one", "two") for salt in (None, "a", "b")]
    assert len(set(given)) == 6 and all(given)
    assert [salts(server, "one"), salts(server, "one", "a")] == given[:2]
    assert not any(b"one" in salt or b"two" in salt for salt in given)


@pytest.mark.parametrize(
    "settings",
    [
        {"api_keys": ["one"]},
        {"api_keys": ["one", "one"]},
        {"api_keys": ["one", "two"], "shares_cache": True},
        {},
    ],
)
def test_without_tenants_all_share(special_server, settings):
    server = special_server(FakeBackend(), **settings)
    keys = settings.get("api_keys", ["any"])
    assert {salts(server, key) for key in keys} == {b""}
    assert {salts(server, key, "a") for key in keys} == {b"a"}


def test_tenants_with_one_salt_differ():
    one, two = b"1" * 32, b"2" * 32
    assert salt_of(one, "a") != salt_of(two, "a") != salt_of(two, None)
    assert salt_of(one, None) not in (one, b"")
    assert max(len(salt_of(t, "x" * 256)) for t in (one, b"")) <= 256


# ---- the endpoints ----


def test_what_the_cache_holds(own, backend):
    status, headers, data = own.request("GET", "/v1/cache/stats")
    assert (status, headers["content-type"]) == (200, "application/json")
    found = CacheStats.model_validate_json(data)
    assert (found.hits, found.misses.short, found.swap.out.seconds) == (5, 2, 0.25)
    assert [page.model_dump() for page in found.pages] == [{"used": 0, "idle": 3, "cached": 0, "total": 1000}]


@pytest.mark.parametrize("body", [None, b"", b"{}", {"unknown": 1}])
def test_clearing(own, backend, body):
    status, _, data = own.request("POST", "/v1/cache/clear", body)
    assert (status, json.loads(data)) == (200, {"cleared_records": 7})
    assert backend.clears == 1


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"[]", {}, 400),
        (b"null", {}, 400),
        (b"{", {}, 400),
        (b"\xff", {}, 400),
        (b"[" * 20_000, {}, 400),
        (b"x" * (9 << 20), {}, 413),
        (None, {"content-type": "text/plain"}, 415),
        (None, {"content-encoding": "gzip"}, 415),
    ],
)
def test_hostile_bodies_clear_nothing(own, backend, body, headers, status):
    answer = own.request("POST", "/v1/cache/clear", body, headers=headers)
    assert answer[0] == status and set(json.loads(answer[2])) == {"error"}
    assert backend.clears == 0


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/cache/clear", "POST"),
        ("DELETE", "/v1/cache/clear", "POST"),
        ("POST", "/v1/cache/stats", "GET"),
        ("PUT", "/v1/cache/stats", "GET"),
    ],
)
def test_wrong_methods(own, backend, method, path, allowed):
    status, headers, _ = own.request(method, path)
    assert status == 405 and allowed in headers["allow"]
    assert backend.clears == 0


ENDPOINTS = [("GET", "/v1/cache/stats"), ("POST", "/v1/cache/clear")]


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
@pytest.mark.parametrize(
    "header", ["origin: https://evil.test", "x-forwarded-for: 127.0.0.1", "forwarded: for=::1", "via: 1.1 a"]
)  # fmt: skip
def test_a_page_or_a_proxy_is_not_this_machine(own, backend, method, path, header):
    name, _, value = header.partition(": ")
    status, _, data = own.request(method, path, headers={name: value})
    assert (status, json.loads(data)["error"]["code"]) == (403, "not_local")
    assert backend.clears == 0


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_with_keys_any_of_them_may(special_server, method, path):
    server = special_server(FakeBackend(), api_keys=["one", "two"])
    assert server.request(method, path)[0] == 401
    assert server.request(method, path, headers={"authorization": "Bearer three"})[0] == 401
    for key in ("one", "two"):
        headers = {"authorization": f"Bearer {key}", "x-forwarded-for": "9.9.9.9"}
        assert server.request(method, path, headers=headers)[0] == 200


def scope(client, **more):
    return {"path": "/v1/cache/stats", "client": client, "headers": [], **more}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_loopback_may(host):
    check_local(scope((host, 1)))


@pytest.mark.parametrize(
    "host",
    ["192.168.0.9", "10.0.0.1", "0.0.0.0", "::", "fe80::1%lo", "::ffff:8.8.8.8", "localhost", "", "127.1a"],
)  # fmt: skip
def test_others_may_not_without_a_key(host):
    with pytest.raises(RequestError, match="for this machine alone"):
        check_local(scope((host, 1)))
    check_local(scope((host, 1), **{"xjax.keyed": True}))


def test_a_unix_socket_is_this_machine():
    check_local(scope(None))


def test_another_address_of_this_machine_is_refused_too():
    """Really over a socket, where there is such an address."""
    address = _own_address()
    if address is None:
        pytest.skip("this machine has no other address")
    with (
        RunningServer(FakeBackend(), routes=routes, host=address) as server,
        socket.create_connection((address, server.port), 5) as client,
    ):
        client.sendall(b"GET /v1/cache/stats HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        data = b""
        while piece := client.recv(65536):
            data += piece
    assert parse(data)[0] == 403


def _own_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            address = probe.getsockname()[0]
        except OSError:
            return None
    return None if address.startswith(("127.", "0.")) else address


def test_while_loading_and_after_a_death(special_server):
    loading = special_server(FakeBackend(), is_loaded=False)
    for method, path in ENDPOINTS:
        assert loading.request(method, path)[0] == 503
    dead = special_server(FakeBackend())
    dead.backend.die("made up")
    for method, path in ENDPOINTS:
        assert dead.request(method, path)[0] == 503
