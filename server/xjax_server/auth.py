"""Who may ask: API keys, compared in constant time; and whose request it is.

Health, readiness, version, metrics and the API's description are open; they serve probes and scrapers.
Each of several keys is a tenant, told apart by the key's digest. Where there is no key, what tells of
other clients is for this machine alone. It knows no users.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from xjax.errors import RequestError

OPEN_PATHS = frozenset(("/health", "/ready", "/version", "/metrics", "/openapi.json"))
KEYED = "xjax.keyed"  # in a scope: a key was asked for and given
TENANT = "xjax.tenant"  # in a scope: digest of the key, where keys share no pages
_SCHEME = b"bearer "
# Whoever sends one of these is not this machine's own program, whatever the socket says.
_FROM_ELSEWHERE = frozenset((b"origin", b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # equal lengths, so that a comparison tells none


def check_local(scope: Scope) -> None:
    """Let a request through that has a key, or, where none is asked for, comes from this machine.

    Raises RequestError (403) for others: from another address, through a proxy, out of a web page.
    """
    if scope.get(KEYED) or (_is_loopback(scope) and not _FROM_ELSEWHERE & {n for n, _ in scope["headers"]}):
        return
    raise RequestError(
        f"{scope['path']} is for this machine alone while the server asks for no API key; "
        "ask from a loopback address, or start the server with --api-key",
        code="not_local",
    )


def _is_loopback(scope: Scope) -> bool:
    if scope.get("client") is None:
        return True  # a Unix socket, whose file says who may connect
    try:
        address = ipaddress.ip_address(scope["client"][0].partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # how a socket of both families shows 127.0.0.1
    return (mapped or address).is_loopback


class Authorized:
    """Lets requests to `app` through that carry one of the keys.

    shares_cache   all keys are one tenant; as is a single one
    Raises RequestError (401) for others.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], *, shares_cache: bool = False) -> None:
        self._app = app
        self._digests = [_digest(key) for key in dict.fromkeys(key.encode() for key in keys)]
        self._has_tenants = len(self._digests) > 1 and not shares_cache

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
        scope[KEYED] = True
        if self._has_tenants:
            scope[TENANT] = digest
