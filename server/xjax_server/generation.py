"""One HTTP request's engine requests, from submit to their last delta.

    output thread:  event ─ Answer ─ delta ─> buffer ─ mark ─┐
    loop:           next() <──────────── wake, once a burst ─┘

Everything that was made is handed out in order, however slowly it is taken: what a buffer can hold
is bounded by max_tokens. It knows no wire format.
"""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from xjax.errors import XjaxError
from xjax.request import FinishReason, Request, SamplingParams, TokenEvent
from xjax.text.answer import Answer, Delta
from xjax_server.errors import Unavailable
from xjax_server.serving import ServedModel, Service

Item = tuple[int, Delta]  # (prompt index, delta)
_TENANT_TAG = b"xjax tenant 1\0"
_TURN = 0.002  # seconds that the prompts of one request may hold the loop
_OUTCOMES = ("error", "abort", "length", "stop")  # of several samples the worst counts


@dataclass(frozen=True)
class Prompt:
    """Token ids and how to continue them: one engine request. A seed of None is drawn by `start`.

    cache_salt   kept pages are shared with prompts of the same tenant and salt alone
    """

    ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str | None = None


def salt_of(tenant: bytes, salt: str | None) -> bytes:
    """What keeps a request's pages apart: equal for equal tenants and salts, and for no others.

    tenant   digest of fixed length, or b"" for none, in which case the salt stands alone
    """
    given = b"" if salt is None else salt.encode()
    return hashlib.sha256(_TENANT_TAG + tenant + given).digest() if tenant else given


class _Sink:
    """Takes one engine request's events on the output thread and leaves the deltas for the loop."""

    __slots__ = ("_answer", "_generation", "_index")

    def __init__(self, generation: "Generation", index: int, request: Request, model: ServedModel) -> None:
        self._generation, self._index = generation, index
        self._answer = Answer(request, model.front.tokenizer, model.backend, self._put)

    def __call__(self, event: TokenEvent) -> None:
        if not self._generation.is_closed:
            self._answer(event)

    def _put(self, delta: Delta) -> None:
        self._generation.put((self._index, delta))


class Generation:
    """All samples of all prompts of one HTTP request. Made by `start`; `close` it in a `finally`."""

    def __init__(self, service: Service, model: ServedModel, arrival: float, tenant: bytes) -> None:
        self.is_done = False  # every sample of every prompt has ended and was handed out
        self.is_closed = False
        self._service, self._model = service, model
        self._arrival, self._tenant = arrival, tenant
        limit = service.limits.request_timeout
        self._deadline = None if limit is None else arrival + limit
        self._request_ids: list[str] = []
        self._buffer: deque[Item] = deque()
        self._is_marked = self._is_late = False
        self._waiting: asyncio.Future[None] | None = None
        self._error: XjaxError | None = None
        self._last: dict[tuple[int, int], float] = {}  # time of each open sample's last token
        self._num_open = 0
        self._has_token = self._has_queue_time = False
        self._reasons: set[str] = set()

    @classmethod
    async def start(
        cls,
        service: Service,
        prompts: Sequence[Prompt],
        *,
        request_id: str,
        arrival: float | None = None,
        priority: int = 0,
        tenant: bytes = b"",
    ) -> "Generation":
        """Submit every prompt, or none and raise.

        arrival   time.monotonic() when the request came; default: now
        tenant    whose request it is, where clients share no pages; b"" where they do
        Raises RequestError for what can never run (400), CapacityError for a full queue (429),
        Unavailable while nothing is served (503).
        """
        generation = cls(service, service.model, time.monotonic() if arrival is None else arrival, tenant)
        try:
            turn = time.monotonic()
            for index, prompt in enumerate(prompts):
                name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
                generation._submit(index, name, prompt, priority)
                if time.monotonic() - turn > _TURN:  # many prompts: let other requests have the loop
                    await asyncio.sleep(0)
                    turn = time.monotonic()
        except BaseException:
            generation._abort()
            raise
        generation._enter(sum(len(prompt.ids) for prompt in prompts))
        return generation

    async def next(self, timeout: float | None = None) -> list[Item]:
        """Return what came since, in order; [] after `timeout` seconds of silence and once all is done.

        A sample's own failure is a delta with finish_reason ERROR. Raises Unavailable when the
        request's time is over or the server shuts down, EngineError when the engine died.
        """
        if not self._buffer and not self.is_done:
            await self._wait(timeout)
        if self._error is not None:
            raise self._error
        # First the mark, then the buffer: what comes in between marks again.
        self._is_marked = False
        items: list[Item] = []
        buffer = self._buffer
        while buffer:
            items.append(buffer.popleft())
        if items:
            self._note(items)
        elif self._deadline is not None and time.monotonic() >= self._deadline:
            limit = self._service.limits.request_timeout
            raise Unavailable(f"the answer took more than {limit:g} s", code="request_timeout")
        return items

    def close(self) -> None:
        """Abort what has not ended; idempotent."""
        if self.is_closed:
            return
        self._service.active.discard(self)
        metrics = self._service.metrics
        metrics.active -= 1
        if not self.is_done:
            self._reasons.add("error" if self._error is not None else "abort")
        outcome = next((reason for reason in _OUTCOMES if reason in self._reasons), "abort")
        metrics.ended(outcome, time.monotonic() - self._arrival)
        self._abort()

    # ---- output thread ----

    def put(self, item: Item) -> None:
        """Keep a delta for `next`; on the backend's output thread."""
        self._buffer.append(item)
        if not self._is_marked:
            self._is_marked = True
            self._service.mark(self)

    # ---- loop ----

    def wake(self) -> None:
        """Let `next` go on."""
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def end(self, error: XjaxError) -> None:
        """Have `next` raise an error."""
        if not self.is_done:
            self._error = self._error or error
            self.wake()

    async def _wait(self, timeout: float | None) -> None:
        """Wait for a delta, an error, the end, or so many seconds."""
        if self._deadline is not None:
            rest = max(self._deadline - time.monotonic(), 0.0)
            timeout = rest if timeout is None else min(timeout, rest)
        loop = asyncio.get_running_loop()
        self._is_late = False
        timer = None if timeout is None else loop.call_later(timeout, self._be_late)
        try:
            # A wake-up may come for what was taken already, and its mark may still be up: what comes next
            # would not wake anybody. So the mark goes down before every look at the buffer.
            while True:
                self._is_marked = False
                if self._buffer or self._is_late or self._error or self.is_closed:
                    break
                self._waiting = loop.create_future()
                await self._waiting
        finally:
            self._waiting = None
            if timer is not None:
                timer.cancel()

    def _be_late(self) -> None:
        self._is_late = True
        self.wake()

    def _submit(self, index: int, request_id: str, prompt: Prompt, priority: int) -> None:
        sampling, model, limits = prompt.sampling, self._model, self._service.limits
        if sampling.seed is None:
            sampling = sampling.replace(seed=self._service.new_seed())
        request = Request(
            request_id=request_id,
            prompt_ids=prompt.ids,
            sampling=sampling,
            eos_ids=model.front.eos_ids,
            priority=priority,
            arrival=self._arrival,
            max_queue_time=limits.request_timeout if limits.queue_timeout is None else limits.queue_timeout,
            cache_salt=salt_of(self._tenant, prompt.cache_salt),
        )
        model.backend.submit(request, _Sink(self, index, request, model))
        self._request_ids.append(request_id)
        self._num_open += sampling.n

    def _enter(self, num_prompt_tokens: int) -> None:
        self._service.active.add(self)
        self._service.metrics.active += 1
        self._service.metrics.prompt_tokens += num_prompt_tokens

    def _abort(self) -> None:
        self.is_closed = True
        if not self.is_done:
            for request_id in self._request_ids:
                self._model.backend.abort(request_id)
        self._buffer.clear()
        self.wake()

    def _note(self, items: list[Item]) -> None:
        """Count tokens and times of deltas that are handed out now."""
        now, metrics, last = time.monotonic(), self._service.metrics, self._last
        for index, delta in items:
            count = len(delta.token_ids)
            key = (index, delta.sample_id)
            if count:
                metrics.generated_tokens += count
                before = last.get(key)
                if before is not None:
                    metrics.token_gap.observe((now - before) / count, count)
                elif not self._has_token:
                    self._has_token = True
                    metrics.ttft.observe(now - self._arrival)
                last[key] = now
            if delta.queue_seconds is not None and not self._has_queue_time:
                self._has_queue_time = True
                metrics.queue.observe(delta.queue_seconds)
            if delta.num_cached_tokens and delta.sample_id == 0:
                metrics.cached_tokens += delta.num_cached_tokens
            if delta.finish_reason is not None:
                self._finish(key, delta.finish_reason)

    def _finish(self, key: tuple[int, int], reason: FinishReason) -> None:
        self._last.pop(key, None)
        self._reasons.add(reason.value)
        self._num_open -= 1
        self.is_done = self._num_open == 0
