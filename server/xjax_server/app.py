"""The ASGI application: the layers that every request passes, and routes at their end.

    CORSMiddleware   browsers of the allowed origins; answers OPTIONS
    Application      arrival time; every exception becomes the envelope of errors.py
    Authorized       API keys
    Router           path and method to an endpoint

It knows no endpoint: they are given to it.
"""

import logging
import time
from collections.abc import Mapping, Sequence

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from xjax.errors import RequestError, XjaxError
from xjax_server import admin
from xjax_server.auth import Authorized
from xjax_server.errors import error_bytes, error_headers, status_of
from xjax_server.limits import SHARE, Bodies, check_path, no_route
from xjax_server.serving import STARTED, Service
from xjax_server.sse import respond_json

_log = logging.getLogger(__name__)
_MUST_CLOSE = (408, 413)  # the rest of the body is not wanted


def build_app(
    service: Service,
    routes: Sequence[BaseRoute],
    *,
    api_keys: Sequence[str] = (),
    cors: Sequence[str] = (),
    shares_cache: bool = False,
) -> ASGIApp:
    """Put the layers around the routes.

    routes         the API's, e.g. `xjax_server.openai.routes(service)`; those of admin.py are added
    api_keys       any of them is asked for; none: everybody may ask
    cors           origins whose pages may ask, "*" for all
    shares_cache   requests with different keys may start from each other's kept pages
    """
    app: ASGIApp = Router([*routes, *admin.routes(service)], redirect_slashes=False, default=_no_route)
    if api_keys:
        app = Authorized(app, api_keys, shares_cache=shares_cache)
    app = Application(app, service)
    if cors:
        app = CORSMiddleware(
            app, allow_origins=list(cors), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    raise no_route(scope)


class Application:
    """Gives `app` each request with its arrival time, and the client an envelope for what goes wrong.

    scope["xjax.arrival"] is time.monotonic() when the request came.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._bodies = Bodies(service.limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; raises nothing but what ends the connection."""
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} is spoken here")
        scope["xjax.arrival"] = time.monotonic()
        scope[SHARE] = share = self._bodies.share()
        scope["app"] = self  # has Starlette's routes raise instead of answering in their own form
        try:
            check_path(scope)
            await self._app(scope, receive, send)
        except ClientDisconnect:
            pass
        except HTTPException as error:
            await self._refuse(scope, send, _translate(error, scope), error.headers)
        except XjaxError as error:
            await self._refuse(scope, send, error, None)
        except Exception as error:  # noqa: BLE001  the top of the application
            _log.exception("%s %s failed", scope["method"], scope["path"])
            await self._refuse(scope, send, error, None)
        finally:
            share.give_back()

    async def _refuse(
        self, scope: Scope, send: Send, error: Exception, more: Mapping[str, str] | None
    ) -> None:
        status = status_of(error)
        if STARTED not in scope:
            self._service.metrics.refused(status)
        headers = error_headers(error)
        if status in _MUST_CLOSE:
            headers.append((b"connection", b"close"))
        headers += [(name.lower().encode(), value.encode()) for name, value in (more or {}).items()]
        await respond_json(send, error_bytes(error), status=status, headers=headers)


def _translate(error: HTTPException, scope: Scope) -> XjaxError:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return RequestError(
            f"{scope['path']} takes {allowed}, not {scope['method'][:20]}", code="method_not_allowed"
        )
    return no_route(scope) if error.status_code == 404 else RequestError(str(error.detail))
