"""Who may ask: API keys, compared in constant time.

Health, readiness, version, metrics and the API's description are open; they serve probes and scrapers.
It knows no users.
"""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from xjax.errors import RequestError

OPEN_PATHS = frozenset(("/health", "/ready", "/version", "/metrics", "/openapi.json"))
_SCHEME = b"bearer "


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # equal lengths, so that a comparison tells none


class Authorized:
    """Lets requests to `app` through that carry one of the keys.

    Raises RequestError (401) for others.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["path"] not in OPEN_PATHS:
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if given[: len(_SCHEME)].lower() != _SCHEME:
            raise RequestError(
                "no API key was given; send it as `Authorization: Bearer KEY`", code="invalid_api_key"
            )
        digest = _digest(given[len(_SCHEME) :].strip())
        # Every key is compared, so that the time does not tell which one came close.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise RequestError("the API key is not one of this server's", code="invalid_api_key")
