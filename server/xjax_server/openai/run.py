"""The way of every generating request, from its body to its answer.

    read the body ─ text work (off the loop when there is much) ─ Generation ─ events or one reply

All of it ends when the client leaves. It knows neither chats nor completions.
"""

import time
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from xjax_server.auth import TENANT
from xjax_server.generation import Generation
from xjax_server.limits import read_body
from xjax_server.openai.frames import Head, Job
from xjax_server.serving import STARTED, ServedModel, Service
from xjax_server.sse import collect, respond_events, respond_json, until_disconnect

SMALL = 2048  # bytes of a body whose text work costs less than handing it to a thread

Prepare = Callable[[ServedModel, str, bytes], Job]


async def answer(
    service: Service, scope: Scope, receive: Receive, send: Send, *, prefix: str, prepare: Prepare
) -> None:
    """Serve one request. Raises XjaxError for one that is refused."""
    request_id = service.new_id(prefix)
    headers = [(b"x-request-id", request_id.encode())]  # where OpenAI's clients look for it
    body = await read_body(scope, receive, service.limits)

    async def work() -> None:
        model = service.model
        if len(body) <= SMALL:
            job = prepare(model, request_id, body)
        else:
            job = await service.in_thread(prepare, model, request_id, body)
        generation = await Generation.start(
            service,
            job.prompts,
            request_id=request_id,
            arrival=scope["xjax.arrival"],
            priority=job.priority,
            tenant=scope.get(TENANT, b""),
        )
        scope[STARTED] = True
        if job.is_stream:
            keep_alive = service.limits.keep_alive
            await respond_events(send, generation, job.writer, keep_alive=keep_alive, headers=headers)
        else:
            items = await collect(generation)
            if job.is_scored:
                data = await service.in_thread(job.writer.whole, items)
            else:
                data = job.writer.whole(items)
            await respond_json(send, data, headers=headers)

    await until_disconnect(receive, work())


def new_head(request_id: str, name: str, model: ServedModel) -> Head:
    """Head of the reply to a request that is answered now."""
    return Head(id=request_id, created=int(time.time()), name=name, model=model)
