"""A server that computes nothing: it streams as many tokens as it is asked for, one every so often.

    python -m xjax_server.bench.serving.null SECONDS     prints its port, serves until its input ends

With it in a process of its own, the load client's processor time is that of the client alone.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One piece of a chunked answer."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(frame: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(frame, separators=(",", ":")).encode() + b"\n\n"


def _frame(text: str, reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
    return {"id": "null", "object": "text_completion", "created": 0, "model": "null", "choices": [choice]}


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Request line and body; ("", b"") when the connection has ended."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return "", b""
    line, *fields = head.split("\r\n")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (item.partition(":") for item in fields)
    }
    return line, await reader.readexactly(int(headers.get("content-length", 0)))


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    token = chunk(event(_frame(" token", None)))
    try:
        while True:
            line, content = await read_request(reader)
            if not line:
                break
            asked = json.loads(content)
            count, tick = asked["max_tokens"], asyncio.get_running_loop().time()
            writer.write(_HEAD)
            for _ in range(count):
                tick += seconds
                await asyncio.sleep(tick - asyncio.get_running_loop().time())
                writer.write(token)
            usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": count}
            last = event(_frame("", "length") | {"usage": usage}) + b"data: [DONE]\n\n"
            writer.write(chunk(last) + chunk(b""))
            await writer.drain()
    except ConnectionError:
        pass  # the client has seen enough
    finally:
        writer.close()


async def serve(seconds: float) -> None:
    """Serve on a free port, print it, and end when standard input does."""
    server = await asyncio.start_server(lambda r, w: _answer(r, w, seconds), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


def main(arguments: Sequence[str]) -> None:
    """Serve with so many seconds between the tokens of a stream."""
    asyncio.run(serve(float(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
