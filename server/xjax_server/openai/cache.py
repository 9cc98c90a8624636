"""GET /v1/cache/stats and POST /v1/cache/clear: what the prefix cache holds and did, and a way to empty it.

Both tell of, or change, what all clients share: they are for clients with a key, or for this machine.
"""

import asyncio
import json

from starlette.types import Receive, Scope, Send

from xjax.backend import cache_stats
from xjax_server.auth import check_local
from xjax_server.limits import read_body
from xjax_server.openai.read import read_request
from xjax_server.openai.types import CacheClearRequest
from xjax_server.serving import Service
from xjax_server.sse import respond_json, until_disconnect


class CacheStatsEndpoint:
    """ASGI endpoint of the counters."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_local(scope)
        stats = cache_stats(self._service.model.backend.stats())
        await respond_json(send, json.dumps(stats).encode())


class CacheClearEndpoint:
    """ASGI endpoint that empties the cache; running requests keep their pages."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_local(scope)
        body = await read_body(scope, receive, self._service.limits)
        read_request(CacheClearRequest, body or b"{}")

        async def work() -> None:
            cleared = await asyncio.wrap_future(self._service.model.backend.clear_cache())
            await respond_json(send, json.dumps({"cleared_records": cleared}).encode())

        await until_disconnect(receive, work())
