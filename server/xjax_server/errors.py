"""The one table from an exception to an HTTP status and OpenAI's error envelope.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

What a request is refused with is decided where it is found out, as one of `XjaxError`'s classes and
a code; only this file knows what that means in HTTP.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, cast

from xjax.errors import CapacityError, EngineError, RequestError, XjaxError
from xjax.text.answer import Delta

Headers = list[tuple[bytes, bytes]]

# Codes of a RequestError that are not a plain 400.
_STATUS_BY_CODE = {
    "invalid_api_key": 401,
    "not_local": 403,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "body_timeout": 408,
    "request_too_large": 413,
    "unsupported_media_type": 415,
    "headers_too_large": 431,
}


class Unavailable(CapacityError):
    """The service, not its queue, cannot take a request now: 503.

    code   "model_loading", "draining", "engine_failed", "request_timeout" or "queue_timeout"
    """

    def __init__(self, message: str, *, code: str, retry_after: float = 1.0):
        super().__init__(message, retry_after=retry_after)
        self.code = code


def status_of(error: BaseException) -> int:
    """HTTP status of an exception; 500 for what is none of ours."""
    return _row(error)[0]


def error_body(error: BaseException) -> dict[str, Any]:
    """The envelope of an exception; one that is none of ours shows no detail."""
    _, kind, code = _row(error)
    message = str(error) if isinstance(error, XjaxError) else "the server failed at this request; see its log"
    param = error.param if isinstance(error, RequestError) else None
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_headers(error: BaseException) -> Headers:
    """Headers that go with the status: Retry-After, WWW-Authenticate."""
    if isinstance(error, Unavailable) and error.code == "request_timeout":
        # OpenAI's clients would ask again, and again for nothing, while the server is busy enough.
        return [(b"x-should-retry", b"false")]
    if isinstance(error, CapacityError):
        return [(b"retry-after", str(max(1, math.ceil(error.retry_after))).encode())]
    if isinstance(error, RequestError) and error.code == "invalid_api_key":
        return [(b"www-authenticate", b"Bearer")]
    return []


def error_bytes(error: BaseException) -> bytes:
    """The envelope as JSON."""
    return json.dumps(error_body(error)).encode()


def sample_error(delta: Delta) -> XjaxError:
    """What a delta with finish_reason ERROR tells, as an exception."""
    message = delta.error or "the engine failed at this request"
    if delta.error_code == "queue_timeout":
        return Unavailable(message, code="queue_timeout")
    return EngineError(message)


def from_pydantic(errors: list[Mapping[str, Any]]) -> RequestError:
    """The first of pydantic's complaints (`ValidationError.errors()`), its field as dotted path in `param`.

    Members of unions are left out of the path: no user wrote them.
    """
    first = errors[0]
    place = cast("tuple[str | int, ...]", first.get("loc", ()))
    path = ".".join(str(part) for part in place if isinstance(part, int) or part.isidentifier())
    message = _message(str(first.get("type", "")), place, str(first.get("msg", "is not valid")))
    text = f"{path}: {message[:1].lower()}{message[1:]}" if path else message
    if len(errors) > 1:
        text += f" (and {len(errors) - 1} more)"
    return RequestError(text, code="invalid_value", param=path or None)


# What a field that takes several forms takes, by the form that pydantic chose to complain about.
_FORMS = {
    "=parts": "must be text or a list of parts",
    "=text": "must be text, token ids, or a list of either",
    "=texts": "must be text or a list of texts",
}


def _message(kind: str, place: tuple[str | int, ...], message: str) -> str:
    """A complaint in the words of who wrote the request."""
    if kind == "too_short":
        return "must not be empty"
    form = place[-1] if place else ""
    if kind in ("list_type", "string_type") and isinstance(form, str):
        return _FORMS.get(form, message)
    return message


def _row(error: BaseException) -> tuple[int, str, str | None]:
    if isinstance(error, RequestError):
        return _STATUS_BY_CODE.get(error.code, 400), "invalid_request_error", error.code
    if isinstance(error, Unavailable):
        return 503, "server_error", error.code
    if isinstance(error, CapacityError):
        return 429, "rate_limit_error", "queue_full"
    if isinstance(error, EngineError):
        return 500, "server_error", "engine_error"
    return 500, "server_error", "internal_error"
