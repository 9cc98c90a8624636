"""One HTTP request's engine requests, from submit to their last delta.

    output thread:  event ─ Answer ─ delta ─> buffer ─ mark ─┐
    loop:           next() <──────────── wake, once a burst ─┘

Everything that was made is handed out in order, however slowly it is taken: what a buffer can hold
is bounded by max_tokens. It knows no wire format.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from xjax.request import SamplingParams
from xjax.text.answer import Delta
from xjax_server.serving import Service

Item = tuple[int, Delta]  # (prompt index, delta)


@dataclass(frozen=True)
class Prompt:
    """Token ids and how to continue them: one engine request. A seed of None is drawn by `start`."""

    ids: tuple[int, ...]
    sampling: SamplingParams


class Generation:
    """All samples of all prompts of one HTTP request. Made by `start`; `close` it in a `finally`."""

    is_done: bool  # every sample of every prompt has ended and was handed out

    @classmethod
    async def start(
        cls,
        service: Service,
        prompts: Sequence[Prompt],
        *,
        request_id: str,
        arrival: float | None = None,
        priority: int = 0,
    ) -> "Generation":
        """Submit every prompt, or none and raise.

        arrival   time.monotonic() when the request came; default: now
        Raises RequestError for what can never run (400), CapacityError for a full queue (429),
        Unavailable while nothing is served (503).
        """

    async def next(self, timeout: float | None = None) -> list[Item]:
        """Return what came since, in order; [] after `timeout` seconds of silence and once all is done.

        A sample's own failure is a delta with finish_reason ERROR. Raises Unavailable when the
        request's time is over or the server shuts down, EngineError when the engine died.
        """

    def close(self) -> None:
        """Abort what has not ended; idempotent."""
