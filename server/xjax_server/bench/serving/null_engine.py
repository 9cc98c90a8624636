"""What the server's own cost is measured on: an engine that computes nothing, behind our API or a bare loop.

    python -m xjax_server.bench.serving.null_engine ours|bare SECONDS

serves on a port of its choice with SECONDS between a stream's tokens (0: as fast as it can), prints the
port, and for each line on standard input the processor seconds it has used so far.
"""

import asyncio
import json
import resource
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import uvicorn
from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp
from tokenizers import pre_tokenizers

from xjax.backend import EventSink
from xjax.request import FinishReason, Request, TokenEvent
from xjax.text.front import Front
from xjax.text.tokenizer import Tokenizer
from xjax.text.vocabulary.gguf import build_vocabulary
from xjax_server.app import build_app
from xjax_server.connection import MAX_HEAD, Connection
from xjax_server.limits import Limits
from xjax_server.openai import routes
from xjax_server.serving import ServedModel, Service

TOKEN_ID = 100
MAX_MODEL_LEN = 1 << 20


class _Live:
    def __init__(self, request: Request, sink: EventSink) -> None:
        self.sink, self.id = sink, request.request_id
        self.left = request.sampling.max_tokens or 1
        self.is_first = True


class NullEngine:
    """A Backend: every request that lives gets the same token once in `seconds`, all of them in one burst."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._live: dict[str, _Live] = {}
        self._wake = threading.Condition()
        threading.Thread(target=self._run, name="null-engine", daemon=True).start()

    def submit(self, request: Request, on_event: EventSink) -> None:
        """Take a request."""
        with self._wake:
            self._live[request.request_id] = _Live(request, on_event)
            self._wake.notify()

    def finish(self, request_id: str, sample_id: int, num_tokens: int) -> None:
        """End a request."""
        self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """End a request."""
        with self._wake:
            self._live.pop(request_id, None)

    def stats(self) -> Mapping[str, float]:
        """What is running."""
        return {"running": len(self._live)}

    def failure(self) -> str | None:
        """Nothing fails that does nothing."""
        return None

    def clear_cache(self) -> "Future[int]":
        """Nothing is kept."""
        done: Future[int] = Future()
        done.set_result(0)
        return done

    def _run(self) -> None:
        tick = time.monotonic()
        while True:
            with self._wake:
                while not self._live:
                    self._wake.wait()
                    tick = time.monotonic()
                live = list(self._live.values())
            tick += self._seconds
            time.sleep(max(tick - time.monotonic(), 0))
            for item in live:
                self._emit(item)

    def _emit(self, item: _Live) -> None:
        item.left -= 1
        reason = FinishReason.LENGTH if item.left <= 0 else None
        more: dict[str, Any] = {"num_cached_tokens": 0, "queue_seconds": 0.0} if item.is_first else {}
        item.is_first = False
        if reason is not None:
            self.abort(item.id)
        item.sink(TokenEvent(item.id, token_ids=(TOKEN_ID,), finish_reason=reason, **more))


def _front() -> Front:
    """A tokenizer of single bytes."""
    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 1)],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 0,
    }
    return Front(Tokenizer(*build_vocabulary(metadata, None)), None, eos_ids=frozenset((0,)))


def _ours(seconds: float) -> ASGIApp:
    service = Service()
    model = ServedModel(
        names=("null",),
        backend=NullEngine(seconds),
        front=_front(),
        max_model_len=MAX_MODEL_LEN,
        defaults={},
        seed=0,
        created=int(time.time()),
    )
    service.start(model)
    return build_app(service, routes(service))


def _bare(seconds: float) -> ASGIApp:
    """The shortest way to stream JSON with Starlette."""

    async def events(count: int) -> AsyncIterator[bytes]:
        tick = time.monotonic()
        for i in range(count):
            tick += seconds
            await asyncio.sleep(max(tick - time.monotonic(), 0))
            choice = {"index": 0, "text": "a", "finish_reason": None if i < count - 1 else "length"}
            frame = {
                "id": "bare",
                "object": "text_completion",
                "created": 0,
                "model": "null",
                "choices": [choice],
            }
            yield b"data: " + json.dumps(frame).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def answer(request: HttpRequest) -> StreamingResponse:
        asked: dict[str, Any] = json.loads(await request.body())
        return StreamingResponse(events(asked["max_tokens"]), media_type="text/event-stream")

    return Router([Route("/v1/completions", answer, methods=["POST"])])


async def _serve(kind: str, seconds: float) -> None:
    is_ours = kind == "ours"
    app = _ours(seconds) if is_ours else _bare(seconds)
    http: Any = partial(Connection, limits=Limits()) if is_ours else "auto"
    config = uvicorn.Config(
        app,
        port=0,
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEAD,
        backlog=2048,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    _say(server.servers[0].sockets[0].getsockname()[1])
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        used = resource.getrusage(resource.RUSAGE_SELF)
        _say(used.ru_utime + used.ru_stime)
    server.should_exit = server.force_exit = True
    await serving


def _say(value: float) -> None:
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], float(sys.argv[2])))
