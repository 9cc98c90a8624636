"""One connection: uvicorn's HTTP/1.1 protocol with bounds on what a client may take and hold.

    connect ─ head (header_timeout) ─ body ─ answer (stall_timeout) ─ idle (idle_timeout) ─ head …

Heads are bounded in size by h11, in time here; bodies by who reads them. A client that is refused
while it still sends gets time to read why. It knows no request.
"""

import asyncio
import sys
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from xjax.errors import RequestError
from xjax_server.errors import error_bytes, status_of
from xjax_server.limits import Limits

MAX_HEAD = 64 << 10  # bytes of a request's head
_MAX_AHEAD = 64 << 10  # bytes of further requests that are kept while one is answered
_LINGER = 10.0  # seconds that a refused client may go on sending
_REFUSED = "the request is not HTTP/1.1 as it should be"


class _Transport:
    """The transport, but closing it first lets a client that still sends read its answer."""

    def __init__(self, transport: asyncio.Transport, connection: "Connection") -> None:
        self._transport, self._connection = transport, connection
        self._is_lingering = False
        self.write = transport.write
        self.get_extra_info = transport.get_extra_info
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def is_closing(self) -> bool:
        """Whether nothing more is to be read from the client."""
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """Close, at once or after what the client still sends."""
        if self._is_lingering or self._transport.is_closing():
            return
        if self._connection.is_mid_body and self._transport.can_write_eof():
            self._is_lingering = True
            self._transport.write_eof()
            self._transport.resume_reading()
            self._connection.linger()
        else:
            self._transport.close()


class Connection(H11Protocol):
    """uvicorn's protocol with our limits; give it to `uvicorn.Config(http=partial(Connection, limits=…))`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: Limits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._wire: asyncio.Transport | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0
        self._is_lingering = False

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        cycle = cast(Any, self.cycle)
        return cycle is not None and not cycle.response_complete

    @property
    def is_mid_body(self) -> bool:
        """Whether the client still sends what nobody will read."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    # ---- what the loop calls ----

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start to wait for a head."""
        self._wire = transport
        super().connection_made(cast(asyncio.Transport, _Transport(transport, self)))
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let everything go; the request being answered, if any, hears of it."""
        self._stop_head_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and see whether a head is under way."""
        if self._is_lingering:
            return
        super().data_received(data)
        if self.is_busy:
            self._stop_head_timer()
            self._look_for_end()
        elif self._head_timer is None:
            self._start_head_timer()

    def on_response_complete(self) -> None:
        """Wait for the next request, and not for long when it has begun."""
        super().on_response_complete()
        if not self.is_busy and self._head_timer is None and self.conn.trailing_data[0]:
            self._start_head_timer()

    def pause_writing(self) -> None:
        """Hold the writer back, and start to watch whether the client takes anything at all."""
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        """Let the writer go on."""
        self._stop_stall_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in our envelope; called while the parser's error is handled."""
        fault = sys.exc_info()[1]
        hint = fault.error_status_hint if isinstance(fault, h11.RemoteProtocolError) else 400
        if self.is_busy:
            # The body broke off: whoever reads it hears that the client is gone.
            is_answered = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if is_answered:
                self.transport.close()
                return
        if hint == 431:
            text = f"the request's head is larger than {MAX_HEAD} bytes"
            self._answer_alone(RequestError(text, code="headers_too_large"))
        else:
            self._answer_alone(RequestError(f"{_REFUSED}: {fault}", code="invalid_http"))

    def linger(self) -> None:
        """Read on for a while and drop it, so that the client can send its fill and read its answer."""
        assert self._wire is not None
        self._is_lingering = True
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(_LINGER, self._wire.abort)

    # ---- timers ----

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.header_timeout, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.is_busy or self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            text = f"the request's head did not come within {self._limits.header_timeout:g} s"
            self._answer_alone(RequestError(text, code="body_timeout"))
        else:
            assert self._wire is not None
            self._wire.close()

    def _watch_stall(self) -> None:
        assert self._wire is not None
        self._num_unsent = self._wire.get_write_buffer_size()
        self._stop_stall_timer()
        self._stall_timer = self.loop.call_later(self._limits.stall_timeout, self._stall_is_over)

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _stall_is_over(self) -> None:
        assert self._wire is not None
        if self._wire.get_write_buffer_size() < self._num_unsent:
            self._watch_stall()
        else:
            self._wire.abort()

    # ---- parts ----

    def _look_for_end(self) -> None:
        """Go on reading behind a complete request, or the end of the client would go unnoticed."""
        if self.flow.read_paused and not self.cycle.more_body:
            if len(self.conn.trailing_data[0]) < _MAX_AHEAD:
                self.flow.resume_reading()

    def _answer_alone(self, error: RequestError) -> None:
        """Answer without an application, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body, status = error_bytes(error), status_of(error)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        start = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        for event in (start, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
