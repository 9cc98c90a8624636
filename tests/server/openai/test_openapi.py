"""The document describes the server: requests made up from it get answers that are described in it."""

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core import NotSet
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.fake_backend import FakeBackend, small_front
from tests.server.running import RunningServer
from xjax_server.openai import routes
from xjax_server.openai.openapi import OPERATIONS, document
from xjax_server.openai.replies import ChatCompletion, ChatCompletionChunk, Completion

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATION_BY_PATH = {
    result.ok().path: result.ok()
    for result in schemathesis.openapi.from_dict(document()).get_all_operations()
}
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
BODIES = sorted(path for path, method in OPERATIONS if method == "post")


@pytest.fixture(scope="module")
def small_server():
    """A server whose answers are short, whatever they are asked for."""
    with RunningServer(FakeBackend(max_model_len=256), routes=routes, front=small_front(TEMPLATE)) as running:
        yield running


def ask_around(server, path, mode):
    """A body by status of the answers to requests that are as the document says, or are not."""
    body_by_status = {}

    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(OPERATION_BY_PATH[path].as_strategy(generation_mode=mode))
    def run(case):
        response = case.call(base_url=server.url)
        body_by_status[response.status_code] = case.body
        case.validate_response(response, checks=CHECKS)

    run()
    return body_by_status


@pytest.mark.parametrize("path", sorted(OPERATION_BY_PATH))
def test_requests_as_the_document_has_them(small_server, path):
    found = ask_around(small_server, path, GenerationMode.POSITIVE)
    assert set(found) <= {200, 400, 404}
    assert 200 in found or "{id}" in path


@pytest.mark.parametrize("path", BODIES)
def test_requests_as_the_document_does_not_have_them(small_server, path):
    found = ask_around(small_server, path, GenerationMode.NEGATIVE)
    if isinstance(found.get(200), NotSet) and path == "/v1/cache/clear":
        del found[200]  # no body at all is one that the document has
    assert set(found) <= {400, 404, 415}


CHAT = {"messages": [{"role": "user", "content": "a😀"}], "max_tokens": 4}
TEXT = {"prompt": ["a😀", "hi"], "max_tokens": 4}
EVERYTHING = {"n": 2, "return_token_ids": True, "stop": "zz"}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize(
    ("path", "shape", "chunk", "body"),
    [
        ("/v1/chat/completions", ChatCompletion, ChatCompletionChunk, CHAT),
        ("/v1/chat/completions", ChatCompletion, ChatCompletionChunk, CHAT | EVERYTHING),
        (
            "/v1/chat/completions",
            ChatCompletion,
            ChatCompletionChunk,
            CHAT | EVERYTHING | {"logprobs": True, "top_logprobs": 2},
        ),
        ("/v1/completions", Completion, Completion, TEXT),
        ("/v1/completions", Completion, Completion, TEXT | EVERYTHING | {"logprobs": 2, "echo": True}),
        ("/v1/completions", Completion, Completion, TEXT | EVERYTHING | {"logprobs": 0, "max_tokens": 0}),
    ],
)
def test_replies_have_their_shapes(server, path, shape, chunk, body):
    """Whatever is asked for; the shapes forbid what they do not name."""
    scored = {} if chunk is shape and not body.get("n") else {"prompt_logprobs": 1}
    status, _, data = server.request("POST", path, body | scored)
    assert status == 200
    shape.model_validate_json(data)
    status, headers, data = server.request("POST", path, body | STREAM)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *events, done, end = data.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    for event in events:
        if not event.startswith(":"):
            chunk.model_validate_json(event.removeprefix("data: "))


def test_the_document_lists_every_route(server):
    found = json.loads(server.request("GET", "/openapi.json")[2])
    assert found == document()
    listed = {(path, method) for path, entry in found["paths"].items() for method in entry}
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in routes(server.service)
        for method in route.methods - {"HEAD"}
    }
    assert listed == set(OPERATIONS) == served - {("/openapi.json", "get")}
