"""Hands token events to the sinks of their requests, on a thread of its own: the output thread.

    engine thread --put--> queue --output thread--> the request's sink

Each sample gets events up to its first with a finish reason and none after that. A sink that
raises is not called again. Knows no engine: what to do about a failed sink is asked of the owner.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue

from xjax.backend import EventSink
from xjax.request import FinishReason, TokenEvent

_log = logging.getLogger(__name__)


@dataclass
class _Receiver:
    """A request's sink, and its samples that have not ended."""

    sink: EventSink | None
    open_samples: set[int]


class Delivery:
    """Sinks by request id and the queue in front of them; any thread may call.

    on_failed   called on the output thread with the id of a request whose sink raised
    """

    def __init__(self, on_failed: Callable[[str], None]) -> None:
        self._on_failed = on_failed
        self._receivers: dict[str, _Receiver] = {}
        self._queue: SimpleQueue[Iterable[TokenEvent] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="xjax-output", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is the output thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._receivers

    def register(self, request_id: str, sink: EventSink, num_samples: int) -> None:
        """Send a request's events to `sink` from now on; its id must not be in use."""
        assert request_id not in self._receivers
        self._receivers[request_id] = _Receiver(sink, set(range(num_samples)))

    def put(self, events: Iterable[TokenEvent]) -> None:
        """Queue events; returns at once."""
        if events:
            self._queue.put(events)

    def fail(self, request_id: str, message: str) -> None:
        """End every sample of a request that has not ended with an error."""
        receiver = self._receivers.get(request_id)
        if receiver is not None:
            error = FinishReason.ERROR
            self.put(
                [
                    TokenEvent(request_id=request_id, sample_id=i, finish_reason=error, error=message)
                    for i in tuple(receiver.open_samples)
                ]
            )

    def fail_all(self, message: str) -> None:
        """End every request with an error."""
        for request_id in tuple(self._receivers):
            self.fail(request_id, message)

    def close(self) -> None:
        """Let the thread end after what is queued; waits for it unless this is it."""
        self._queue.put(None)
        if not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        while (events := self._queue.get()) is not None:
            for event in events:
                self._hand_over(event)

    def _hand_over(self, event: TokenEvent) -> None:
        receiver = self._receivers.get(event.request_id)
        if receiver is None or event.sample_id not in receiver.open_samples:
            return
        if event.finish_reason is not None:
            receiver.open_samples.discard(event.sample_id)
            if not receiver.open_samples:
                del self._receivers[event.request_id]
        if receiver.sink is None:
            return
        try:
            receiver.sink(event)
        except BaseException:  # noqa: BLE001  the top of the output thread
            _log.exception("the sink of request %s failed; it is aborted", event.request_id)
            receiver.sink = None
            self._on_failed(event.request_id)
