"""The one interface between those who want tokens and those who make them.

The engine, a remote replica and the fake of the tests implement it. Calls may come from any
thread and return at once; events are delivered on the backend's own thread, in order for each
sample, and the receiver must not block it.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from xjax.request import Request, TokenEvent

EventSink = Callable[[TokenEvent], None]


class Backend(Protocol):
    """Takes requests, delivers events."""

    def submit(self, request: Request, on_event: EventSink) -> None:
        """Queue a request; its events go to `on_event`.

        Raises RequestError for one that can never run here, CapacityError for a full queue
        and EngineError when the engine has stopped.
        """
        ...

    def finish(self, request_id: str, sample_id: int, num_tokens: int) -> None:
        """End one sample with reason "stop" after its first `num_tokens` output tokens.

        For a stop that only the text shows; tokens after it count nowhere and no event
        with them follows. Unknown or ended samples are ignored.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End every sample of a request and free what it holds; unknown ids are ignored."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges by name."""
        ...

    def failure(self) -> str | None:
        """Why nothing is served any more, in one line; None while requests are taken."""
        ...
