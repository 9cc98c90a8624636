"""Answers on the wire, below Starlette: JSON at once, or server-sent events with back-pressure.

    handler:  body = await read_body(scope, receive, service.limits)
              await until_disconnect(receive, answer(body, send))     the whole work, in every state
    answer:   generation = await Generation.start(...)
              await respond_events(send, generation, frames)          or respond_json(send, data)

A client that leaves cancels the work, wherever it stands; the `finally` that closes the generation
aborts it in the engine. It knows frames as bytes only.
"""

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from starlette.types import Receive, Send

from xjax_server.generation import Generation, Item

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class Frames(Protocol):
    """Makes the events of one answer; each method returns complete `data: ...\\n\\n` frames or b""."""

    def first(self) -> bytes:
        """Frames before any delta, e.g. the role."""
        ...

    def of(self, items: Sequence[Item]) -> bytes:
        """All frames of these deltas, for one write. Never given a delta with finish_reason ERROR."""
        ...

    def last(self) -> bytes:
        """Frames after the last delta, e.g. usage; `data: [DONE]` is added behind it."""
        ...


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it when the client leaves; call it once the body was read whole.

    What `work` raises passes through; nothing is raised for a client that left.
    """


async def respond_json(
    send: Send, data: bytes, *, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Send one JSON document."""


async def respond_events(
    send: Send, generation: Generation, frames: Frames, *, keep_alive: float = 5.0
) -> None:
    """Stream a generation: status and headers at once, comments in every silence, frames, [DONE].

    Closes the generation, whatever happens. A failure after the start is an event with the error
    envelope, then [DONE] and a clean end; it is not raised.
    """


async def collect(generation: Generation) -> list[Item]:
    """Take all deltas of a generation, for an answer that is not streamed, and close it.

    Raises EngineError or Unavailable for a sample that failed.
    """
