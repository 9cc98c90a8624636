"""What the server adds to a token and to a request, beside the shortest loop that streams with Starlette.

Both stream from an engine that computes nothing, in a process of their own, asked by raw sockets that
parse nothing. It knows no model.
"""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from xjax.errors import EngineError
from xjax_server.bench.samples import summarize

KINDS = ("ours", "bare")
_DONE = b"data: [DONE]\n\n"
_MAX_ANSWER = 1 << 26


@dataclass(frozen=True, kw_only=True)
class OverheadPlan:
    """What is asked: streams at once, tokens of each with `seconds` between them, and short requests.

    num_short      requests a stream, one token each, for requests a second
    repeats        rounds, in which the two take turns
    """

    streams: tuple[int, ...] = (1, 64, 256)
    output_len: int = 100
    seconds: float = 0.02
    num_short: int = 20
    repeats: int = 3


class _Child:
    """A server in a process of its own."""

    def __init__(self, kind: str, seconds: float) -> None:
        command = [sys.executable, "-m", "xjax_server.bench.serving.null_engine", kind, str(seconds)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )
        self.port = int(self._read())

    def processor_seconds(self) -> float:
        """What the process has used so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=30)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError("the server that is to be measured has ended")
        return line


def measure_overhead(plan: OverheadPlan) -> list[dict[str, Any]]:
    """For each number of streams and both servers: processor time and delay of a token, requests a second."""
    found: dict[tuple[int, str], dict[str, list[float]]] = {}
    for is_paced in (True, False):
        children = {kind: _Child(kind, plan.seconds if is_paced else 0.0) for kind in KINDS}
        try:
            for child in children.values():
                asyncio.run(_ask(child.port, 4, 4, 1))  # warm
            for _ in range(plan.repeats):
                for streams in plan.streams:
                    for kind, child in children.items():
                        samples = found.setdefault((streams, kind), {})
                        _measure(child, streams, plan, is_paced, samples)
        finally:
            for child in children.values():
                child.close()
    return [
        {"streams": streams, "server": kind} | {name: summarize(values) for name, values in samples.items()}
        for (streams, kind), samples in found.items()
    ]


def _measure(
    child: _Child, streams: int, plan: OverheadPlan, is_paced: bool, samples: dict[str, list[float]]
) -> None:
    before, began = child.processor_seconds(), time.perf_counter()
    if is_paced:
        asyncio.run(_ask(child.port, streams, plan.output_len, 1))
        tokens = streams * plan.output_len
        samples.setdefault("processor_seconds_per_token", []).append(
            (child.processor_seconds() - before) / tokens
        )
        late = (time.perf_counter() - began) / plan.output_len - plan.seconds
        samples.setdefault("added_seconds_per_token", []).append(late)
    else:
        asyncio.run(_ask(child.port, streams, 1, plan.num_short))
        seconds = time.perf_counter() - began
        samples.setdefault("requests_per_second", []).append(streams * plan.num_short / seconds)
        samples.setdefault("processor_seconds_per_request", []).append(
            (child.processor_seconds() - before) / (streams * plan.num_short)
        )


async def _ask(port: int, streams: int, output_len: int, num_requests: int) -> None:
    body = json.dumps(
        {"model": "null", "prompt": [1, 2, 3], "max_tokens": output_len, "stream": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: null\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    await asyncio.gather(*(_stream(port, head.encode() + body, num_requests) for _ in range(streams)))


async def _stream(port: int, request: bytes, count: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_MAX_ANSWER)
    for _ in range(count):
        writer.write(request)
        await reader.readuntil(_DONE)
        await reader.readuntil(b"0\r\n\r\n")
    writer.close()
