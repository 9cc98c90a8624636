"""The smallest API over the server's core, so that the core is tested without the real one.

POST /echo {"prompt": "text", "max_tokens": 3, "stream": true} gives each delta's text as an event.
POST /defect raises what is no error of ours.
"""

import json
from functools import partial

from starlette.routing import Route

from xjax.errors import RequestError
from xjax.request import SamplingParams
from xjax_server.generation import Generation, Prompt
from xjax_server.limits import read_body
from xjax_server.sse import collect, respond_events, respond_json, until_disconnect


class Endpoint:
    """Makes Starlette take a coroutine function as ASGI."""

    def __init__(self, function):
        self._function = function

    async def __call__(self, scope, receive, send):
        await self._function(scope, receive, send)


class EchoFrames:
    def first(self):
        return b""

    def of(self, items):
        return b"".join(b"data: " + json.dumps([i, d.sample_id, d.text]).encode() + b"\n\n" for i, d in items)

    def last(self):
        return b'data: "end"\n\n'


def _encode(front, text):
    return tuple(front.encode_prompt(text))


async def _answer(service, scope, body, send):
    try:
        asked = json.loads(body)
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}", code="invalid_json") from error
    texts = asked["prompt"] if isinstance(asked["prompt"], list) else [asked["prompt"]]
    settings = {"n": asked.get("n", 1), "max_tokens": asked.get("max_tokens"), "seed": asked.get("seed")}
    sampling = SamplingParams(**settings)
    prompts = [Prompt(await service.in_thread(_encode, service.model.front, t), sampling) for t in texts]
    generation = await Generation.start(
        service, prompts, request_id=service.new_id("echo"), arrival=scope["xjax.arrival"]
    )
    if asked.get("stream"):
        await respond_events(send, generation, EchoFrames(), keep_alive=service.limits.keep_alive)
        return
    items = await collect(generation)
    text = "".join(delta.text for _, delta in items)
    await respond_json(send, json.dumps({"text": text}).encode())


async def _echo(service, scope, receive, send):
    body = await read_body(scope, receive, service.limits)
    await until_disconnect(receive, _answer(service, scope, body, send))


async def _defect(scope, receive, send):
    raise ZeroDivisionError("a secret detail")


def routes(service):
    """Routes of the echo API."""
    return [
        Route("/echo", Endpoint(partial(_echo, service)), methods=["POST"]),
        Route("/defect", Endpoint(_defect), methods=["POST"]),
    ]
