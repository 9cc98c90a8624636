"""The table from exceptions to statuses and envelopes."""

import json

import pytest
from pydantic import BaseModel, ValidationError

from xjax.errors import CapacityError, EngineError, LoadError, RequestError
from xjax.request import FinishReason
from xjax.text.answer import Delta
from xjax_server.errors import (
    Unavailable,
    error_body,
    error_bytes,
    error_headers,
    from_pydantic,
    sample_error,
    status_of,
)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("invalid_value", 400), ("context_length_exceeded", 400), ("new", 400), ("invalid_api_key", 401),
        ("model_not_found", 404), ("not_found", 404), ("method_not_allowed", 405), ("body_timeout", 408),
        ("request_too_large", 413), ("unsupported_media_type", 415), ("headers_too_large", 431),
    ],
)  # fmt: skip
def test_faults_of_the_request(code, status):
    error = RequestError("m", code=code, param="p")
    assert status_of(error) == status
    kind = "invalid_request_error"
    assert error_body(error) == {"error": {"message": "m", "type": kind, "param": "p", "code": code}}
    assert json.loads(error_bytes(error)) == error_body(error)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (CapacityError("m"), 429, "rate_limit_error", "queue_full"),
        (Unavailable("m", code="draining"), 503, "server_error", "draining"),
        (EngineError("m"), 500, "server_error", "engine_error"),
        (LoadError("m"), 500, "server_error", "internal_error"),
    ],
)
def test_faults_of_the_server(error, status, kind, code):
    assert status_of(error) == status
    assert error_body(error) == {"error": {"message": "m", "type": kind, "param": None, "code": code}}


def test_what_is_none_of_ours_tells_nothing():
    assert status_of(KeyError("secret")) == 500
    assert "secret" not in json.dumps(error_body(KeyError("secret")))


@pytest.mark.parametrize(("seconds", "header"), [(0.0, b"1"), (1.0, b"1"), (1.2, b"2"), (30, b"30")])
def test_retry_after_is_whole_seconds_and_at_least_one(seconds, header):
    assert error_headers(CapacityError("m", retry_after=seconds)) == [(b"retry-after", header)]


def test_an_answer_that_took_too_long_is_not_asked_for_again():
    error = Unavailable("m", code="request_timeout")
    assert error_headers(error) == [(b"x-should-retry", b"false")]


def test_headers_of_others():
    assert (
        error_headers(RequestError("m")) == error_headers(EngineError("m")) == error_headers(KeyError()) == []
    )
    assert error_headers(RequestError("m", code="invalid_api_key")) == [(b"www-authenticate", b"Bearer")]


def test_text_that_is_no_unicode_is_escaped():
    assert json.loads(error_bytes(RequestError("\ud800")))["error"]["message"] == "\\ud800"


@pytest.mark.parametrize(("text", "code", "kind", "status"), [
    ("waited too long", "queue_timeout", Unavailable, 503), ("the step failed", None, EngineError, 500),
    (None, None, EngineError, 500),
])  # fmt: skip
def test_what_a_sample_tells(text, code, kind, status):
    error = sample_error(Delta(sample_id=0, finish_reason=FinishReason.ERROR, error=text, error_code=code))
    assert type(error) is kind and status_of(error) == status


class Inner(BaseModel):
    role: str


class Outer(BaseModel):
    n: int = 1
    items: list[Inner] = []
    either: str | list[str] = ""


@pytest.mark.parametrize(
    ("value", "param", "more"),
    [
        ({"n": "a"}, "n", ""),
        ({"items": [{"role": "a"}, {}]}, "items.1.role", ""),
        ({"items": 5, "n": []}, "n", "(and 1 more)"),
        ({"either": [1]}, "either", ""),
        (5, None, ""),
    ],
)
def test_pydantic_names_the_field(value, param, more):
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(value)
    error = from_pydantic(caught.value.errors())
    assert status_of(error) == 400
    assert error.param == param or (param == "either" and error.param.startswith("either"))
    assert str(error).startswith(error.param or "") and more in str(error)
