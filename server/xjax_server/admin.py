"""For probes and scrapers: /health, /ready, /version, /metrics.

state       /health   /ready
loading     200       503
ready       200       200
draining    200       503
failed      503       503     nothing will be served any more: restart the process
"""

import json
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import xjax
from xjax_server.serving import Service

Endpoint = Callable[[Request], Awaitable[Response]]


def routes(service: Service) -> Sequence[Route]:
    """The four routes of a service."""

    async def health(_: Request) -> Response:
        failure = service.failure()
        if failure is not None:
            return _json({"status": "failed", "reason": failure}, 503)
        return _json({"status": service.state})

    async def ready(_: Request) -> Response:
        service.model  # noqa: B018  raises Unavailable, with Retry-After, unless ready
        return _json({"status": "ready"})

    async def version(_: Request) -> Response:
        return _json({"version": xjax.__version__})

    async def metrics(_: Request) -> Response:
        text, media_type = service.metrics.text()
        return Response(text, headers={"content-type": media_type})

    found: dict[str, Endpoint] = {
        "/health": health,
        "/ready": ready,
        "/version": version,
        "/metrics": metrics,
    }
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in found.items()]


def _json(value: object, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")
