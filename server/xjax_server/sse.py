"""Answers on the wire, below Starlette: JSON at once, or server-sent events with back-pressure.

    handler:  body = await read_body(scope, receive, service.limits)
              await until_disconnect(receive, answer(body, send))     the whole work, in every state
    answer:   generation = await Generation.start(...)
              await respond_events(send, generation, frames)          or respond_json(send, data)

A client that leaves cancels the work, wherever it stands; the `finally` that closes the generation
aborts it in the engine. It knows frames as bytes only.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from starlette.types import Receive, Send

from xjax.errors import XjaxError
from xjax.request import FinishReason
from xjax_server.errors import error_bytes, sample_error
from xjax_server.generation import Generation, Item

_log = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks proxies to pass every event on at once
]


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
    current = asyncio.current_task()
    assert current is not None
    has_left = False

    def leave(_: "asyncio.Task[None]") -> None:
        nonlocal has_left
        if not watch.cancelled():
            has_left = True
            current.cancel()

    watch = asyncio.create_task(_disconnect(receive))
    watch.add_done_callback(leave)
    try:
        await work
    except asyncio.CancelledError:
        if not has_left or current.uncancel() > 0:  # somebody else cancels this task too
            raise
    finally:
        watch.remove_done_callback(leave)
        watch.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond_json(
    send: Send, data: bytes, *, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Send one JSON document."""
    start = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": data})


async def respond_events(
    send: Send,
    generation: Generation,
    frames: Frames,
    *,
    keep_alive: float = 5.0,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Stream a generation: status and headers at once, comments in every silence, frames, [DONE].

    Closes the generation, whatever happens. A failure after the start is an event with the error
    envelope, then [DONE] and a clean end; it is not raised.
    """
    try:
        await send({"type": "http.response.start", "status": 200, "headers": [*_EVENT_HEADERS, *headers]})
        try:
            await _send_frames(send, generation, frames, keep_alive)
            end = frames.last()
        except XjaxError as error:
            end = _error_event(error)
        except Exception as error:  # noqa: BLE001  the status is out: the client is told in the stream
            _log.exception("an answer broke off")
            end = _error_event(error)
        generation.close()
        await send({"type": "http.response.body", "body": end + DONE})
    finally:
        generation.close()


async def _send_frames(send: Send, generation: Generation, frames: Frames, keep_alive: float) -> None:
    # The comment is there from the start: a proxy sees life before the first token.
    data = frames.first() or KEEP_ALIVE
    await send({"type": "http.response.body", "body": data, "more_body": True})
    while not generation.is_done:
        items = await generation.next(keep_alive)
        failed = next((item for item in items if item[1].finish_reason is FinishReason.ERROR), None)
        if failed is not None:
            good = items[: items.index(failed)]
            data = frames.of(good) if good else b""
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            raise sample_error(failed[1])
        data = frames.of(items) if items else KEEP_ALIVE
        if data:
            await send({"type": "http.response.body", "body": data, "more_body": True})


def _error_event(error: Exception) -> bytes:
    return b"data: " + error_bytes(error) + b"\n\n"


async def collect(generation: Generation) -> list[Item]:
    """Take all deltas of a generation, for an answer that is not streamed, and close it.

    Raises EngineError or Unavailable for a sample that failed.
    """
    items: list[Item] = []
    try:
        while not generation.is_done:
            new = await generation.next()
            for _, delta in new:
                if delta.finish_reason is FinishReason.ERROR:
                    raise sample_error(delta)
            items += new
    finally:
        generation.close()
    return items
