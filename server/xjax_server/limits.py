"""What a request may look like before anybody reads its content: path, media type, size, pace.

It knows no JSON and no model.
"""

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from xjax.errors import CapacityError, RequestError

SHARE = "xjax.share"  # where a scope has its `Share`
_LARGE = 1 << 20  # bytes from which a body is counted
Body = TypeVar("Body", bytes, bytearray)
_MEDIA_TYPES = (b"", b"application/json", b"text/json")
_ID_PREFIX = b"/v1/models/"  # the one path with a part that clients choose, slashes and all


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes in bytes, times in seconds.

    max_body          largest body
    max_bodies        of all large bodies together, from their first piece until they are answered
    body_timeout      within which a whole body must come
    request_timeout   within which an answer must be complete, counted from arrival; None: no limit
    queue_timeout     the part of it that may pass before the first step; None: request_timeout
    header_timeout    within which a request's head must come, and the first one after connecting
    idle_timeout      that a connection may wait between requests
    stall_timeout     after which a client that takes no byte of its answer is cut off
    keep_alive        silence after which a stream gets a comment
    text_threads      threads for templates and tokenizing
    text_queue        texts that may wait for them
    """

    max_body: int = 8 << 20
    max_bodies: int = 256 << 20
    body_timeout: float = 60.0
    request_timeout: float | None = None
    queue_timeout: float | None = None
    header_timeout: float = 30.0
    idle_timeout: float = 75.0
    stall_timeout: float = 600.0
    keep_alive: float = 5.0
    text_threads: int = 2
    text_queue: int = 1024


class Bodies:
    """Memory that the large bodies of all requests take; one object a server, on its loop."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.max_bodies
        self._taken = 0

    @property
    def taken(self) -> int:
        """Bytes of the large bodies of requests that are under way."""
        return self._taken

    def share(self) -> "Share":
        """A part for one request, to be given back when it is answered."""
        return Share(self)

    def take(self, size: int) -> None:
        """Count more bytes, or fewer. Raises CapacityError when they are too many."""
        if size > 0 and self._taken + size > self._most:
            raise CapacityError("too many large requests are being read; try again later", retry_after=5)
        self._taken += size


class Share:
    """What one request's body takes of `Bodies`."""

    __slots__ = ("_bodies", "_size")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._size = bodies, 0

    def grow_to(self, size: int) -> None:
        """Count a body that has so many bytes now; small ones are free."""
        if size > _LARGE:
            self._bodies.take(size - self._size)
            self._size = size

    def give_back(self) -> None:
        """Count nothing any more."""
        self._bodies.take(-self._size)
        self._size = 0


def check_path(scope: Scope) -> None:
    """Refuse a path that only looks like one of ours once it is decoded or tidied up: 404.

    Routes are plain ASCII, so an escape can stand in a model's id alone.
    """
    raw: bytes = scope["raw_path"]
    if b"%" in raw and not raw.startswith(_ID_PREFIX):
        raise no_route(scope)
    path: str = scope["path"]
    if "//" in path or "\0" in path or "/../" in path or "/./" in path or path.endswith(("/..", "/.")):
        raise no_route(scope)


def no_route(scope: Scope) -> RequestError:
    """What an unknown path gets."""
    shown = scope["path"][:100].encode("ascii", "backslashreplace").decode()
    return RequestError(f"there is no {scope['method']} {shown!r} here", code="not_found")


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Read a request's body, which must be JSON by its media type or name none.

    Raises RequestError: 415 for another media type, 413 above the limit, 408 for one that comes too
    slowly; CapacityError when too much is being read already. Raises ClientDisconnect
    (starlette.requests) when the client leaves on the way.
    """
    _check_headers(scope, limits)
    try:
        async with asyncio.timeout(limits.body_timeout):
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                return _within(message.get("body", b""), limits)
            return await _read_rest(scope, message, receive, limits)
    except TimeoutError:
        raise RequestError(
            f"the body did not come within {limits.body_timeout:g} s", code="body_timeout"
        ) from None


async def _read_rest(scope: Scope, message: Message, receive: Receive, limits: Limits) -> bytes:
    body = bytearray()
    share: Share | None = scope.get(SHARE)
    while message["type"] == "http.request":
        body += message.get("body", b"")
        _within(body, limits)
        if share is not None:
            share.grow_to(len(body))
        if not message.get("more_body", False):
            return bytes(body)
        message = await receive()
    raise ClientDisconnect


def _within(body: Body, limits: Limits) -> Body:
    if len(body) > limits.max_body:
        raise _too_large(limits)
    return body


def _too_large(limits: Limits) -> RequestError:
    return RequestError(
        f"the body is larger than {limits.max_body} bytes (--max-body)", code="request_too_large"
    )


def _check_headers(scope: Scope, limits: Limits) -> None:
    for name, value in scope["headers"]:
        if name == b"content-type":
            kind = value.partition(b";")[0].strip().lower()
            if kind not in _MEDIA_TYPES:
                raise RequestError(
                    f"the body must be application/json, not {kind[:100].decode('latin-1')!r}",
                    code="unsupported_media_type",
                )
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise RequestError(
                "a compressed body is not read; send it as it is", code="unsupported_media_type"
            )
        elif name == b"content-length" and value.isdigit() and int(value[:20]) > limits.max_body:
            raise _too_large(limits)
