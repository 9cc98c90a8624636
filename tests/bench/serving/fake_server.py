"""A server of scripted answers, each of frames with the pauses before them.

Runs in a thread with an event loop of its own. What it is asked is kept; what it answers is what
`script(request)` says: a status and body, or steps of (seconds to wait, bytes to send).
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from xjax_server.bench.serving.null import chunk, event, read_request

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Reply:
    """Steps of an event stream, or a status with a JSON body; `is_cut`: the connection is dropped."""

    steps: Sequence[tuple[float, bytes]] = ()
    status: int = 200
    body: Any = None
    is_cut: bool = False


@dataclass
class Asked:
    """What came in."""

    line: str
    body: dict[str, Any]


@dataclass
class FakeServer:
    script: Callable[[Asked], Reply]
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def answer(self, reader, writer):
        try:
            while (request := await read_request(reader))[0]:
                if not await self._one(Asked(request[0], json.loads(request[1] or b"{}")), writer):
                    break
        finally:
            writer.close()

    async def _one(self, asked, writer):
        """Answer a request; False when the connection ends with it."""
        self.asked.append(asked)
        reply = self.script(asked)
        if reply.body is not None:
            body = json.dumps(reply.body).encode()
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (reply.status, len(body), body))
            return True
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        writer.write(_HEAD)
        for seconds, data in reply.steps:
            await asyncio.sleep(seconds)
            writer.write(chunk(data))
        self.at_once -= 1
        if not reply.is_cut:
            writer.write(chunk(b""))
        return not reply.is_cut


@contextmanager
def serving(script: Callable[[Asked], Reply]) -> Iterator[FakeServer]:
    """Serve a script on a free port."""
    fake, loop, is_up = FakeServer(script), asyncio.new_event_loop(), threading.Event()

    async def main(stop: asyncio.Event) -> None:
        server = await asyncio.start_server(fake.answer, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        is_up.set()
        await stop.wait()
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main(stop)))
    thread.start()
    is_up.wait(10)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def delta(**fields: Any) -> bytes:
    """A chat frame."""
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def text(value: str) -> bytes:
    """A frame of a completion."""
    return event({"choices": [{"index": 0, "text": value, "finish_reason": None}]})


def finish(prompt_tokens: int, output_tokens: int, *, has_usage: bool = True, is_chat: bool = True) -> bytes:
    """The end of an answer: reason, usage, [DONE]."""
    choice = {"index": 0, "finish_reason": "length"} | ({"delta": {}} if is_chat else {"text": ""})
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    last = event({"choices": [], "usage": usage}) if has_usage else b""
    return event({"choices": [choice]}) + last + b"data: [DONE]\n\n"
