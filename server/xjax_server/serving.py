"""The service: what is served, in which state, and the switchboard between output thread and loop.

    loading ── start(model) ──> ready ── drain() ──> draining
       └─ fail(reason) ─> failed <─ the backend's own failure ─┘

One object a process, made on the event loop's thread and used there; `mark` alone is called from
the backend's threads. It knows no HTTP and no model beyond `ServedModel`.
"""

import asyncio
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, TypeVarTuple

from xjax.backend import Backend
from xjax.errors import XjaxError
from xjax.text.front import Front
from xjax_server.limits import Limits
from xjax_server.metrics import ServerMetrics

_log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
State = Literal["loading", "ready", "draining", "failed"]
_MIX = 0x9E3779B97F4A7C15  # odd, so that consecutive requests get distant seeds


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What a loaded engine offers.

    names           served names; the first is the canonical one
    max_model_len   most tokens of prompt and answer
    defaults        sampling defaults of the model; empty where they are not wanted
    seed            what the seeds of requests that name none are drawn from
    created         Unix time in seconds
    """

    names: tuple[str, ...]
    backend: Backend
    front: Front
    max_model_len: int
    defaults: Mapping[str, float]
    seed: int
    created: int


class Waiter(Protocol):
    """What is woken on the loop when something came for it; a `Generation`."""

    def wake(self) -> None:
        """Go on; called on the loop's thread."""
        ...

    def end(self, error: XjaxError) -> None:
        """End with an error; called on the loop's thread."""
        ...


class Service:
    """State, model, limits and metrics of one server. Make it on the loop that serves.

    limits   sizes and times that requests are held to
    """

    def __init__(self, *, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.metrics = ServerMetrics(self.stats)
        self.active: set[Waiter] = set()
        self._state: State = "loading"
        self._reason = ""
        self._model: ServedModel | None = None
        self._serial = itertools.count()
        self._nonce = secrets.token_hex(4)
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(self.limits.text_threads, "xjax-text")
        self._num_text_jobs = 0
        self._pending: deque[Waiter] = deque()
        self._is_waking = False

    # ---- state ----

    @property
    def state(self) -> State:
        """Where the service is in its life; asks the backend whether it still lives."""
        if self._state in ("ready", "draining") and self.failure() is not None:
            return "failed"
        return self._state

    def failure(self) -> str | None:
        """Why nothing will be served any more, None while that is not so."""
        if self._state == "failed":
            return self._reason
        return None if self._model is None else self._model.backend.failure()

    @property
    def model(self) -> ServedModel:
        """What is served. Raises Unavailable (503, Retry-After) unless ready."""

    def start(self, model: ServedModel) -> None:
        """Serve a model from now on."""

    def fail(self, reason: str) -> None:
        """Serve nothing any more: the model could not be loaded."""

    def drain(self) -> None:
        """Refuse what comes from now on; what runs goes on."""

    def end_all(self, error: XjaxError) -> None:
        """End every running generation with an error."""

    def close(self) -> None:
        """Let the text threads go."""

    # ---- for those who build requests ----

    def new_seed(self) -> int:
        """Seed of a request that names none: differs between requests, the same ones in every run."""

    def new_id(self, prefix: str) -> str:
        """A request id that no other request of any run has, e.g. "chatcmpl-…"."""

    async def in_thread(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run text work off the loop. Raises CapacityError when too much of it waits already.

        A caller that is cancelled takes work that has not begun with it.
        """

    # ---- switchboard ----

    def mark(self, waiter: Waiter) -> None:
        """Have a waiter woken on the loop; any thread. One wake-up serves a whole burst."""

    def stats(self) -> Mapping[str, float]:
        """The backend's counters, empty before there is one."""
