"""The engine: one thread that plans, steps, commits and emits, one step ahead of what it has read.

    turn:   drain commands | plan k+1 | dispatch k+1 | read k | commit k | emit
                                         device runs k, then k+1

It holds the only reference to the donated state and rebinds it each step. A failed step ends the
sequences in it with an error each; if the state went with it, a new one is made and the others
compute again. Events reach their sinks on a second thread. No text, no sockets.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np

from xjax.backend import EventSink
from xjax.config import SchedulerConfig
from xjax.engine.metrics import EngineMetrics
from xjax.engine.pack import first_shapes, pack, shape_of, unpack_result
from xjax.engine.warmup import ProgramTable
from xjax.errors import CapacityError, EngineError, RequestError, XjaxError
from xjax.request import FinishReason, Request, TokenEvent
from xjax.scheduler import Plan, Scheduler
from xjax.state.batch import BatchShape
from xjax.state.kv import EngineState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _UnderWay:
    """A dispatched step that was not read yet."""

    plan: Plan
    shape: BatchShape
    output: jax.Array
    host_seconds: float


class Engine:
    """A Backend on the devices of this process.

    params            parameters, owned by the caller too, never donated
    allocate          makes a zero state; called at start and after a failed step took the state
    table             the compiled steps
    vocab_size        ids of prompts and biases must lie below
    lookahead         False reads each step before the next is planned; for comparison
    """

    def __init__(
        self,
        params: Any,
        allocate: Callable[[], EngineState],
        table: ProgramTable,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        lookahead: bool = True,
    ) -> None:
        self.metrics = EngineMetrics()
        self.config = config
        self.table = table
        self._params = params
        self._allocate = allocate
        self._state = allocate()
        self._scheduler = Scheduler(config)
        self._vocab_size = vocab_size
        self._lookahead = lookahead
        self._commands: deque[Callable[[], list[TokenEvent]]] = deque()
        self._sinks: dict[str, tuple[EventSink, int]] = {}
        self._wake = threading.Condition()
        self._outbox: SimpleQueue[list[TokenEvent] | None] = SimpleQueue()
        self._masks: dict[tuple[int, int], jax.Array] = {}
        self._under_way: _UnderWay | None = None
        self._last_read = 0.0
        self._is_stopping = False
        self._failure: str | None = None
        self._threads = [
            threading.Thread(target=self._run, name="xjax-engine", daemon=True),
            threading.Thread(target=self._deliver, name="xjax-output", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # ---- Backend: any thread ----

    def prepare(self, requests: Sequence[Request]) -> None:
        """Start to compile what these requests will need first, before they are submitted; returns at once."""
        if not requests:
            return
        full = not all(request.sampling.is_plain for request in requests)
        lengths = [len(request.prompt_ids) for request in requests]
        samples = sum(request.sampling.n for request in requests)
        self.table.prepare(first_shapes(self.config, lengths, samples, full=full))

    @property
    def longest(self) -> int:
        """Tokens of prompt plus answer that the longest single request may have."""
        return self._scheduler.longest

    def submit(self, request: Request, on_event: EventSink) -> None:
        """Queue a request; see `Backend.submit`."""
        self._check(request)
        with self._wake:
            if self._failure is not None or self._is_stopping:
                raise EngineError(f"the engine has stopped: {self._failure or 'it was closed'}")
            if request.request_id in self._sinks:
                raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
            limit = self.config.max_queue
            if limit is not None and self._scheduler.num_queued + len(self._commands) >= limit:
                raise CapacityError(f"the queue is full ({limit} requests wait); try again later")
            self._sinks[request.request_id] = (on_event, request.sampling.n)
            self._commands.append(lambda: self._accept(request))
            self._wake.notify()

    def finish(self, request_id: str, sample_id: int, num_tokens: int) -> None:
        """End one sample at a stop that the text showed; see `Backend.finish`."""
        self._command(lambda: self._scheduler.finish(request_id, sample_id, num_tokens))

    def abort(self, request_id: str) -> None:
        """End every sample of a request; see `Backend.abort`."""
        self._command(lambda: self._scheduler.abort(request_id))

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges of scheduler and engine by name."""
        return {**self._scheduler.stats(), **self.metrics.snapshot()}

    def close(self) -> None:
        """Stop; requests still alive end with an error."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self.table.close()

    def _command(self, command: Callable[[], list[TokenEvent]]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _check(self, request: Request) -> None:
        sampling = request.sampling
        for param, ids in (
            ("prompt", request.prompt_ids),
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            if ids and not (0 <= min(ids) and max(ids) < self._vocab_size):
                raise RequestError(
                    f"{param}: token ids must lie in 0..{self._vocab_size - 1}; found {min(ids)}..{max(ids)}",
                    param=param,
                )
        self._scheduler.validate(request)

    # ---- engine thread ----

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
            self._failure = "it was closed"
        except BaseException as error:  # noqa: BLE001  the top of the engine thread
            _log.exception("engine thread failed")
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._under_way = None
            self._end_all(self._failure or "it was closed")
            self._outbox.put(None)

    def _turn(self) -> None:
        self._drain()
        self._emit(self._scheduler.expire(time.monotonic()))
        if self._under_way is None and not self._scheduler.has_work:
            with self._wake:
                if not self._commands and not self._is_stopping:
                    self._wake.wait()
            return
        if self._under_way is not None and not self._lookahead:
            self._collect()
        began = time.perf_counter()
        plan = self._scheduler.plan()
        dispatched = self._dispatch(plan, began) if plan is not None else None
        if self._under_way is not None:
            self._collect()
        elif plan is None:
            with self._wake:  # every live sequence waits for something outside
                if not self._commands and not self._is_stopping:
                    self._wake.wait(0.005)
        self._under_way = dispatched

    def _drain(self) -> None:
        while True:
            with self._wake:
                if not self._commands:
                    return
                command = self._commands.popleft()
            self._emit(command())

    def _accept(self, request: Request) -> list[TokenEvent]:
        try:
            self._scheduler.submit(request)
        except XjaxError as error:
            return self._all_samples(request.request_id, str(error))
        return []

    def _dispatch(self, plan: Plan, began: float) -> _UnderWay | None:
        planned = time.perf_counter() - began
        try:
            program = self.table.get(shape_of(plan, self.config))
            began, shape = time.perf_counter(), program.shape
            vector = pack(plan, shape, page_size=self.config.page_size)
            arguments = (vector, self._all_allowed(shape)) if shape.full else (vector,)
            self._state, output = program.call(self._params, self._state, *arguments)
            output.copy_to_host_async()
        except Exception as error:  # noqa: BLE001  whatever a step raises ends that step alone
            if self._under_way is not None:
                self._collect()
            self._step_failed(plan, error)
            return None
        return _UnderWay(plan, shape, output, planned + time.perf_counter() - began)

    def _collect(self) -> None:
        """Read the step under way, commit it, emit its events."""
        step, self._under_way = self._under_way, None
        assert step is not None
        try:
            output = np.asarray(step.output)
        except Exception as error:  # noqa: BLE001  an asynchronous failure of the device
            self._step_failed(step.plan, error)
            return
        read = time.perf_counter()
        result = unpack_result(output, step.shape, step.plan, vocab_size=self._vocab_size)
        self._emit(self._scheduler.commit(step.plan, result))
        now = time.perf_counter()
        seconds = read - max(self._last_read, 0.0)
        self._last_read = read
        self._scheduler.observe(step.plan, min(seconds, 60.0))
        self.metrics.note_step(step.host_seconds + now - read, seconds)

    def _step_failed(self, plan: Plan, error: Exception) -> None:
        self.metrics.num_failed_steps += 1
        line = (str(error).splitlines() or [type(error).__name__])[0]
        _log.error("step failed: %s", line, exc_info=error)
        self._emit(self._scheduler.fail(plan, f"the step failed: {line}"))
        if self._is_state_lost():
            self._scheduler.preempt_all()
            self._state = self._allocate()

    def _is_state_lost(self) -> bool:
        try:
            jax.block_until_ready(self._state)
        except Exception:  # noqa: BLE001  a poisoned buffer raises what the device raised
            return True
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state))

    def _all_allowed(self, shape: BatchShape) -> jax.Array:
        dims = (shape.num_sampled, -(-self._vocab_size // 32))
        if dims not in self._masks:
            ones = np.full(dims, -1, np.int32)
            self._masks[dims] = jax.device_put(ones, jax.tree.leaves(self._state)[0].sharding)
        return self._masks[dims]

    # ---- events ----

    def _emit(self, events: list[TokenEvent]) -> None:
        if events:
            self._outbox.put(events)

    def _all_samples(self, request_id: str, message: str) -> list[TokenEvent]:
        entry = self._sinks.get(request_id)
        return [
            TokenEvent(request_id=request_id, sample_id=i, finish_reason=FinishReason.ERROR, error=message)
            for i in range(entry[1] if entry else 0)
        ]

    def _end_all(self, message: str) -> None:
        with self._wake:
            self._is_stopping = True
            sinks = dict(self._sinks)
        for request_id in sinks:
            self._emit(self._all_samples(request_id, f"the engine has stopped: {message}"))

    def _deliver(self) -> None:
        """Hand events to their sinks; the output thread."""
        ended: dict[str, set[int]] = {}
        while (events := self._outbox.get()) is not None:
            for event in events:
                entry = self._sinks.get(event.request_id)
                if entry is None or event.sample_id in ended.get(event.request_id, ()):
                    continue
                if event.finish_reason is not None:
                    done = ended.setdefault(event.request_id, set())
                    done.add(event.sample_id)
                    if len(done) == entry[1]:
                        ended.pop(event.request_id)
                        with self._wake:
                            self._sinks.pop(event.request_id, None)
                try:
                    entry[0](event)
                except Exception:  # noqa: BLE001  the top of the output thread
                    _log.exception("a sink failed; its request is aborted")
                    self.abort(event.request_id)
