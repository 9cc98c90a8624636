"""One streamed request to an OpenAI-compatible server, and the times at which its tokens came.

A token has come when generated text has, on any channel: content, reasoning or a tool call; a frame
that only names a role, a comment and the usage are none. How many there were is taken from `usage`.
Knows no engine; aiohttp is imported when a session is opened.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xjax.errors import RequestError

if TYPE_CHECKING:
    import aiohttp

CHANNELS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")
_ERROR_LETTERS = 160  # of a server's message; the rest would fill the table


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where requests go and what they have in common.

    url      of the server, with or without /v1
    model    served name
    extra    fields that go into every body
    timeout  seconds a request may take
    """

    url: str
    model: str
    is_chat: bool = False
    api_key: str | None = None
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    timeout: float = 600.0

    @property
    def root(self) -> str:
        """The server's address up to and with /v1."""
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"

    @property
    def target(self) -> str:
        """Where requests are posted."""
        return f"{self.root}/{'chat/completions' if self.is_chat else 'completions'}"

    def body(self, fields: Mapping[str, Any], *, stream: bool = True) -> bytes:
        """A request as it is sent: greedy, of the wanted length, with usage at the end."""
        body: dict[str, Any] = {"model": self.model, "temperature": 0, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body | dict(fields) | dict(self.extra)).encode()


@dataclass
class Outcome:
    """What became of a request; times are those of `time.perf_counter`.

    due        when it was to be sent      first, last   when generated text came, the last or the end of it
    end        when the answer had ended   gaps          seconds between events with text
    """

    due: float
    first: float | None = None
    last: float | None = None
    end: float | None = None
    gaps: list[float] = field(default_factory=list[float])
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first is None else self.first - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None of one token, or where their number is not known."""
        if self.first is None or self.last is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float | None:
        """Seconds to the end of the answer."""
        return None if self.end is None else self.end - self.due


class EventLines:
    """Cuts a stream of bytes into the data of server-sent events; comments and other fields are dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Data of the events that are complete now."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        # One of the peers reports failures in a field of its own.
        return [line.partition(b":")[2].strip() for line in lines if line.startswith((b"data:", b"error:"))]


def has_token(choice: Mapping[str, Any]) -> bool:
    """Whether a choice of a frame carries something that was generated."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(name) for name in CHANNELS)


def note_frame(outcome: Outcome, frame: Mapping[str, Any], now: float) -> None:
    """Put what a frame says into the outcome of its request."""
    if "error" in frame or ("choices" not in frame and "message" in frame):
        outcome.error = f"error event: {_message(frame)}"
        return
    usage = frame.get("usage")
    if usage:
        outcome.prompt_tokens = usage.get("prompt_tokens")
        outcome.output_tokens = usage.get("completion_tokens")
    for choice in frame.get("choices", ()):
        reason = choice.get("finish_reason")
        if has_token(choice):
            if outcome.first is None:
                outcome.first = now
            elif outcome.last is not None:
                outcome.gaps.append(now - outcome.last)
            outcome.last = now
        if reason is not None:
            outcome.finish_reason = reason
            # The last token may have no text of its own; it came with the end.
            outcome.last = now if outcome.first is not None else None


def _message(reply: Mapping[str, Any]) -> str:
    error = reply.get("error", reply)
    text = error.get("message", error) if isinstance(error, Mapping) else error  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return " ".join(str(text).split())[:_ERROR_LETTERS]  # pyright: ignore[reportUnknownArgumentType]


class Client:
    """Sends requests, each over a connection of its own. Use it as an async context."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Client":
        try:
            import aiohttp
        except ImportError as error:
            raise RequestError("the load client needs aiohttp: pip install 'xjax[bench]'") from error
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.endpoint.api_key:
            headers["Authorization"] = f"Bearer {self.endpoint.api_key}"
        self._failures = (aiohttp.ClientError, OSError, ValueError)
        self._session = aiohttp.ClientSession(
            # A kept connection may be closed by the server just when it is used again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self.endpoint.timeout),
            headers=headers,
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def stream(self, body: bytes, due: float) -> Outcome:
        """Send one request and read its answer to the end; failures are in the outcome."""
        outcome = Outcome(due)
        try:
            await self._stream(body, outcome)
        except TimeoutError:
            outcome.error = f"no end within {self.endpoint.timeout:g} s"
        except self._failures as error:
            outcome.error = f"{type(error).__name__}: {str(error)[:_ERROR_LETTERS]}"
        return outcome

    async def _stream(self, body: bytes, outcome: Outcome) -> None:
        assert self._session is not None
        lines, is_done = EventLines(), False
        async with self._session.post(self.endpoint.target, data=body) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {_reason(await response.read())}"
                return
            while received := await response.content.readany():
                now = time.perf_counter()
                for data in lines.feed(received):
                    if data == b"[DONE]":
                        is_done = True
                    else:
                        note_frame(outcome, json.loads(data), now)
            outcome.end = time.perf_counter()
        if outcome.error is None and not is_done and outcome.finish_reason is None:
            outcome.error = "the stream ended early"

    async def ask(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request that is answered whole. Raises RequestError with the server's words."""
        return await self._exchange("POST", self.endpoint.target, self.endpoint.body(fields, stream=False))

    async def models(self) -> list[dict[str, Any]]:
        """What the server lists. Raises RequestError."""
        return (await self._exchange("GET", f"{self.endpoint.root}/models", None)).get("data", [])

    async def _exchange(self, method: str, url: str, body: bytes | None) -> dict[str, Any]:
        assert self._session is not None
        try:
            async with self._session.request(method, url, data=body) as response:
                content = await response.read()
                if response.status == 200:
                    return json.loads(content)
        except (TimeoutError, *self._failures) as error:
            # A connector's error is told by the system's own, without the connection's settings.
            cause = getattr(error, "os_error", None) or error
            number = getattr(cause, "errno", None)
            reason = os.strerror(number) if number and number > 0 else str(cause) or type(cause).__name__
            hint = "; is the server running?" if isinstance(cause, ConnectionRefusedError) else ""
            raise RequestError(f"{url} cannot be asked: {reason}{hint}") from error
        raise RequestError(f"{url} answers HTTP {response.status}: {_reason(content)}")


def _reason(content: bytes) -> str:
    try:
        reply = json.loads(content)
    except ValueError:
        return " ".join(content.decode(errors="replace").split())[:_ERROR_LETTERS]
    return _message(reply) if isinstance(reply, Mapping) else str(reply)[:_ERROR_LETTERS]  # pyright: ignore[reportUnknownArgumentType]
