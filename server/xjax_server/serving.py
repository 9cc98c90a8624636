"""The service: what is served, in which state, and the switchboard between output thread and loop.

    loading ── start(model) ──> ready ── drain() ──> draining
       └─ fail(reason) ─> failed <─ the backend's own failure ─┘

One object a process, made on the event loop's thread and used there; `mark` alone is called from
the backend's threads. It knows no HTTP and no model beyond `ServedModel`.
"""

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, TypeVarTuple

from xjax.backend import Backend
from xjax.errors import CapacityError, XjaxError
from xjax.text.front import Front
from xjax_server.errors import Unavailable
from xjax_server.limits import Limits
from xjax_server.metrics import ServerMetrics

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
State = Literal["loading", "ready", "draining", "failed"]
STARTED = "xjax.started"  # in a scope: its request reached the engine, so how it ends is counted there
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
    """What is woken on the loop when something came for it: a `Generation`."""

    def wake(self) -> None:
        """Go on; called on the loop's thread."""
        ...

    def end(self, error: XjaxError) -> None:
        """End with an error; called on the loop's thread."""
        ...


class Service:
    """State, model, limits and metrics of one server. Make it on the loop that serves.

    limits   sizes and times that requests are held to
    active   generations that were started and not closed
    """

    def __init__(self, *, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.metrics = ServerMetrics(self.stats)
        self.active: set[Waiter] = set()
        self._state: State = "loading"
        self._reason = ""
        self._model: ServedModel | None = None
        self._seeds, self._ids = itertools.count(1), itertools.count(1)
        self._nonce = secrets.token_hex(6)
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(self.limits.text_threads, "xjax-text")
        self._num_texts = 0
        self._pending: deque[Waiter] = deque()
        self._is_waking = False

    # ---- state ----

    @property
    def state(self) -> State:
        """Where the service is in its life; asks the backend whether it still lives."""
        return "failed" if self.failure() is not None else self._state

    def failure(self) -> str | None:
        """Why nothing will be served any more, None while that is not so."""
        if self._state == "failed":
            return self._reason
        return None if self._model is None else self._model.backend.failure()

    @property
    def model(self) -> ServedModel:
        """What is served. Raises Unavailable (503, Retry-After) unless ready."""
        failure = self.failure()
        if failure is not None:
            raise Unavailable(f"the engine has failed: {failure}", code="engine_failed", retry_after=30)
        if self._state == "draining":
            raise Unavailable("the server is shutting down", code="draining", retry_after=5)
        if self._model is None:
            raise Unavailable("the model is being loaded", code="model_loading", retry_after=5)
        return self._model

    def start(self, model: ServedModel) -> None:
        """Serve a model from now on."""
        self._model = model
        if self._state == "loading":
            self._state = "ready"

    def fail(self, reason: str) -> None:
        """Serve nothing any more: the model could not be loaded."""
        self._state, self._reason = "failed", reason

    def drain(self) -> None:
        """Refuse what comes from now on; what runs goes on."""
        if self._state != "failed":
            self._state = "draining"

    def end_all(self, error: XjaxError) -> None:
        """End every running generation with an error."""
        for waiter in tuple(self.active):
            waiter.end(error)

    def close(self) -> None:
        """Let the text threads go."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- for those who build requests ----

    def new_seed(self) -> int:
        """Seed of a request that names none: differs between requests, the same ones in every run."""
        assert self._model is not None
        return (self._model.seed + next(self._seeds) * _MIX) % 2**64

    def new_id(self, prefix: str) -> str:
        """A request id that no other request of any run has, e.g. "chatcmpl-…"."""
        return f"{prefix}-{self._nonce}{next(self._ids):08x}"

    async def in_thread(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run text work off the loop. Raises CapacityError when too much of it waits already.

        A caller that is cancelled takes work that has not begun with it.
        """
        if self._num_texts >= self.limits.text_queue:
            raise CapacityError(f"{self._num_texts} prompts wait to be tokenized; try again later")
        self._num_texts += 1
        try:
            return await self._loop.run_in_executor(self._pool, function, *args)
        finally:
            self._num_texts -= 1

    # ---- switchboard ----

    def mark(self, waiter: Waiter) -> None:
        """Have a waiter woken on the loop; any thread. One wake-up serves a whole burst."""
        self._pending.append(waiter)
        # The loop clears the flag before it empties the queue, so what is appended while the flag
        # is up is always seen.
        if not self._is_waking:
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._wake_pending)
            except RuntimeError:  # the loop has ended, and with it whoever waited
                self._pending.clear()

    def _wake_pending(self) -> None:
        self._is_waking = False
        pending = self._pending
        while pending:
            pending.popleft().wake()

    def stats(self) -> Mapping[str, float]:
        """The backend's counters, empty before there is one."""
        return {} if self._model is None else self._model.backend.stats()
