"""The document describes the server: requests made up from it get answers that are described in it."""

import json
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.fake_backend import FakeBackend, small_front
from tests.server.running import RunningServer
from xjax_server.openai import routes
from xjax_server.openai.openapi import OPERATIONS, document

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
    """Statuses of the answers to requests that are as the document says, or are not."""
    statuses = Counter()

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
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    run()
    return statuses


@pytest.mark.parametrize("path", sorted(OPERATION_BY_PATH))
def test_requests_as_the_document_has_them(small_server, path):
    statuses = ask_around(small_server, path, GenerationMode.POSITIVE)
    assert set(statuses) <= {200, 400, 404}
    assert statuses[200] or "{id}" in path


@pytest.mark.parametrize("path", BODIES)
def test_requests_as_the_document_does_not_have_them(small_server, path):
    statuses = ask_around(small_server, path, GenerationMode.NEGATIVE)
    assert set(statuses) <= {400, 415}


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
