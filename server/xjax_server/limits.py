"""What a request may look like before anybody reads its content: path, media type, size, pace.

It knows no JSON and no model.
"""

from dataclasses import dataclass

from starlette.types import Receive, Scope


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes in bytes, times in seconds.

    max_body          largest body
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

    max_body: int = 32 << 20
    body_timeout: float = 60.0
    request_timeout: float | None = None
    queue_timeout: float | None = None
    header_timeout: float = 30.0
    idle_timeout: float = 75.0
    stall_timeout: float = 600.0
    keep_alive: float = 5.0
    text_threads: int = 2
    text_queue: int = 1024


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Read a request's body, which must be JSON by its media type or name none.

    Raises RequestError: 415 for another media type, 413 above the limit, 408 for one that comes too
    slowly. Raises ClientDisconnect (starlette.requests) when the client leaves on the way.
    """
