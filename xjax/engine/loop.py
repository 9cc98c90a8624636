"""The engine: one thread that plans, steps, commits and emits, one step ahead of what it has read.

    turn:   drain commands | plan k+1 | dispatch k+1 | read k | commit k | emit
                                         device runs k, then k+1

It holds the only reference to the donated state and rebinds it each step. A failed step ends the
sequences in it with an error each; if the state went with it, a new one is made and the others
compute again. Events reach their sinks on a second thread. No text, no sockets.
"""

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xjax.backend import EventSink
from xjax.config import CacheSpec, SchedulerConfig
from xjax.engine.delivery import Delivery
from xjax.engine.metrics import EngineMetrics
from xjax.engine.pack import Packer, first_shapes, unpack_result
from xjax.engine.transfer import Mover
from xjax.engine.warmup import Program, ProgramTable
from xjax.errors import CapacityError, EngineError, LoadError, RequestError, XjaxError
from xjax.request import Request, TokenEvent
from xjax.scheduler import Moves, Plan, Prompt, Scheduler
from xjax.state.batch import BatchShape
from xjax.state.kv import EngineState

_log = logging.getLogger(__name__)
_COMPILE_POLL = 0.01  # seconds between looks at a program that is being compiled


@dataclass(frozen=True)
class _UnderWay:
    """A dispatched step that was not read yet; times in seconds."""

    plan: Plan
    shape: BatchShape
    output: jax.Array
    host_seconds: float
    dispatched: float


@dataclass(frozen=True)
class _Clearing:
    """A command that somebody waits for."""

    scheduler: Scheduler
    done: "Future[int]"

    def __call__(self) -> list[TokenEvent]:
        count = self.scheduler.prefix.clear()
        if self.done.set_running_or_notify_cancel():  # who asked may have left
            self.done.set_result(count)
        return []

    def fail(self, error: EngineError) -> None:
        """Tell who waits that it will not be done."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


class Engine:
    """A Backend on the devices of this process.

    params            parameters, owned by the caller too, never donated
    allocate          makes a zero state; called at start and after a failed step took the state
    table             the compiled steps
    spec              what each layer keeps between steps
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
        spec: CacheSpec,
        vocab_size: int,
        lookahead: bool = True,
    ) -> None:
        self.metrics = EngineMetrics()
        self.config = config
        self.table = table
        self._params = params
        self._allocate = allocate
        self._state: EngineState | None = allocate()
        self._scheduler = Scheduler(config)
        self._pack = Packer(config)
        self._mover = Mover(spec, self._state, config.host_pages, self._saved, num_states=config.host_states)
        self._vocab_size = vocab_size
        self._lookahead = lookahead
        self._commands: deque[Callable[[], list[TokenEvent]]] = deque()
        self._num_entering = 0  # submitted, not with the scheduler yet
        self._wake = threading.Condition()
        self._masks: dict[tuple[int, int], jax.Array] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._is_stopping = False
        self._failure: str | None = None
        self._delivery = Delivery(self.abort)
        self._thread = threading.Thread(target=self._run, name="xjax-engine", daemon=True)
        self._thread.start()
        # A process that ends without `close` must not tear the device down under a running step.
        atexit.register(self.close)

    # ---- Backend: any thread ----

    def prepare(self, requests: Sequence[Request]) -> None:
        """Start to compile what requests that are about to be submitted need first; returns at once."""
        requests = [request for request in requests if 0 < len(request.prompt_ids) < self.longest]
        for is_pooled in (False, True):
            alike = [request for request in requests if (request.pooling is not None) == is_pooled]
            if alike:
                full = not all(request.sampling.is_plain for request in alike)
                lengths = [len(request.prompt_ids) for request in alike]
                samples = sum(request.sampling.n for request in alike)
                shapes = first_shapes(self.config, lengths, samples, full=full, is_pooled=is_pooled)
                self.table.prepare(shapes)

    @property
    def is_output_thread(self) -> bool:
        """Whether the caller runs inside a sink; waiting for events there would never end."""
        return self._delivery.is_current

    @property
    def longest(self) -> int:
        """Tokens of prompt plus answer that the longest single request may have."""
        return self._scheduler.longest

    def submit(self, request: Request, on_event: EventSink) -> None:
        """Queue a request; see `Backend.submit`."""
        self._check(request)
        prompt = Prompt.of(request, self.config)  # here, since the engine's thread has steps to plan
        with self._wake:
            if self._is_stopping:
                raise self._stopped()
            if request.request_id in self._delivery:
                raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
            limit = self.config.max_queue
            if limit is not None and self._scheduler.num_queued + self._num_entering >= limit:
                raise CapacityError(f"the queue is full ({limit} requests wait); try again later")
            self._delivery.register(request.request_id, on_event, request.sampling.n)
            self._num_entering += 1
            self._commands.append(lambda: self._accept(request, prompt))
            self._wake.notify()

    def finish(self, request_id: str, sample_id: int, num_tokens: int) -> None:
        """End one sample at a stop that the text showed; see `Backend.finish`."""
        self._command(lambda: self._scheduler.finish(request_id, sample_id, num_tokens))

    def clear_cache(self) -> "Future[int]":
        """Forget every kept prefix; see `Backend.clear_cache`."""
        clearing = _Clearing(self._scheduler, Future())
        if not self._command(clearing):
            clearing.fail(self._stopped())
        return clearing.done

    def prepare_moves(self, *, singly: bool = False) -> None:
        """Compile what moving pages may need, so that no request waits for it; any thread.

        singly   programs for one page alone; others are used once they are there
        Raises LoadError for a program that fails the audit and EngineError for one that cannot be compiled.
        """
        self._mover.prepare(singly=singly)

    def end_warm_up(self) -> None:
        """Say that all programs are there: from now on every compile is counted as one too many."""
        with self._wake:  # the engine is not closed meanwhile
            if not self._is_stopping:
                for shape in self.table.ready:
                    if shape.full:
                        self._all_allowed(shape)
                self.metrics.end_warm_up()

    def abort(self, request_id: str) -> None:
        """End every sample of a request; see `Backend.abort`."""
        self._command(lambda: self._scheduler.abort(request_id))

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges of scheduler and engine by name."""
        return {**self._scheduler.stats(), **self.metrics.snapshot(), **self.table.stats()}

    def failure(self) -> str | None:
        """Why nothing is served any more; see `Backend.failure`."""
        return (self._failure or "the engine was closed") if self._is_stopping else None

    def close(self) -> None:
        """Stop and let go of parameters and state; requests still alive end with an error."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self.table.close()
        self._thread.join()
        self._mover.close()
        self._delivery.close()
        self._params, self._state = None, None
        self._masks.clear()
        self.metrics.close()
        atexit.unregister(self.close)

    def _stopped(self) -> EngineError:
        return EngineError(f"the engine has stopped: {self.failure()}")

    def _command(self, command: Callable[[], list[TokenEvent]]) -> bool:
        """Have the engine's thread do something; False when it has stopped."""
        with self._wake:
            if not self._is_stopping:
                self._commands.append(command)
                self._wake.notify()
            return not self._is_stopping

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
        except BaseException as error:  # noqa: BLE001  the top of the engine thread
            _log.exception("the engine thread failed")
            self._failure = f"{type(error).__name__}: {error}"
        with self._wake:
            self._is_stopping = True
            unheard = tuple(self._commands)
        for command in unheard:
            if isinstance(command, _Clearing):
                command.fail(self._stopped())
        self._under_way.clear()
        self._delivery.fail_all(f"the engine has stopped: {self.failure()}")

    def _turn(self) -> None:
        self._drain()
        self._delivery.put(self._scheduler.expire(time.monotonic()))
        if not self._under_way and not self._scheduler.has_work:
            with self._wake:
                if not self._commands and not self._is_stopping:
                    self._wake.wait()
            return
        if not self._lookahead:
            self._collect_down_to(0)
        began = time.perf_counter()
        plan = self._scheduler.plan(time.monotonic())
        moves = self._scheduler.swap.take_moves()
        if moves is not None and not self._move(moves):
            self._moves_failed(plan)
            return
        if plan is None and not self._under_way:
            with self._wake:  # every live sequence waits for something outside
                if not self._commands and not self._is_stopping:
                    self._wake.wait(0.005)
        is_dispatched = plan is not None and self._dispatch(plan, time.perf_counter() - began)
        self._collect_down_to(1 if is_dispatched else 0)

    def _drain(self) -> None:
        while True:
            with self._wake:
                if not self._commands:
                    return
                command = self._commands.popleft()
            self._delivery.put(command())

    def _accept(self, request: Request, prompt: Prompt) -> list[TokenEvent]:
        try:
            self._scheduler.submit(request, prompt)
        except XjaxError as error:
            self._delivery.fail(request.request_id, str(error))
        with self._wake:
            self._num_entering -= 1
        return []

    def _move(self, moves: Moves) -> bool:
        """Start to move pages; False when the step that was planned with them must not run."""
        assert self._state is not None
        for transfer in moves.saves:
            try:
                self._mover.save(self._state, transfer)
            except Exception as error:  # noqa: BLE001  the sequence computes again
                _log.error("pages could not be saved: %s", error, exc_info=error)
                self._scheduler.swap.end_save(transfer.serial, ok=False)
        is_lost = False
        try:
            self._state = self._mover.copy(self._state, moves)
        except Exception as error:  # noqa: BLE001  who was to have the copies begins anew
            _log.error("pages could not be copied: %s", error, exc_info=error)
            self._scheduler.swap.fail_copies()
            is_lost = self._is_state_lost()
        for transfer in moves.loads:
            is_there, began = not is_lost, time.perf_counter()
            try:
                if is_there:
                    self._state = self._mover.load(self._state, transfer)
                    self.metrics.note_move("in", self._mover.size(transfer), time.perf_counter() - began)
            except Exception as error:  # noqa: BLE001  the sequence waits as before
                _log.error("pages could not be loaded: %s", error, exc_info=error)
                is_there, is_lost = False, self._is_state_lost()
            self._scheduler.swap.end_load(transfer.serial, ok=is_there)
        return not is_lost

    def _moves_failed(self, plan: Plan | None) -> None:
        self._collect_down_to(0)
        if plan is not None:
            self._step_failed(plan, EngineError("pages could not be moved"))
        elif self._is_state_lost():
            self._renew_state()

    def _saved(self, serial: int, is_there: bool, num_bytes: int, seconds: float) -> None:
        """Take in, from the mover's thread, that a save has ended."""

        def tell() -> list[TokenEvent]:
            self._scheduler.swap.end_save(serial, ok=is_there)
            if is_there:
                self.metrics.note_move("out", num_bytes, seconds)
                self._scheduler.pace.observe_move(num_bytes, seconds)
            return []

        self._command(tell)

    def _dispatch(self, plan: Plan, planned: float) -> bool:
        """Start a step; False when it could not be, and then nothing is under way."""
        try:
            program = self._program(plan)
            if program is None:
                return False
            began, shape = time.perf_counter(), program.shape
            vector = self._pack(plan, shape)
            arguments = (vector, self._all_allowed(shape)) if shape.full else (vector,)
            self._state, output = program.call(self._params, self._state, *arguments)
            if self._mover.is_remote:
                output.copy_to_host_async()
        except LoadError:
            raise  # a program that fails the audit: nothing can be served
        except Exception as error:  # noqa: BLE001  whatever a step raises ends that step alone
            self._collect_down_to(0)
            self._step_failed(plan, error)
            return False
        now = time.perf_counter()
        self._under_way.append(_UnderWay(plan, shape, output, planned + now - began, now))
        return True

    def _program(self, plan: Plan) -> Program | None:
        """The program for a plan. Commands go on while it is compiled; None when they left nothing to run."""
        shape, state = self._pack.shape_of(plan), self._state
        while (program := self.table.find(shape)) is None:
            self._collect_down_to(0)
            self._drain()
            if self._is_stopping:
                return None
            has_ended = all(sequence.finish_reason is not None for sequence in plan.sequences)
            if has_ended or self._state is not state:
                self._scheduler.cancel(plan)
                return None
            with self._wake:
                if not self._commands:
                    self._wake.wait(_COMPILE_POLL)
        return program

    def _collect_down_to(self, number: int) -> None:
        """Read the oldest steps, commit them and emit their events until `number` are left under way."""
        while len(self._under_way) > number:
            self._collect(self._under_way.popleft())

    def _collect(self, step: _UnderWay) -> None:
        try:
            output = np.asarray(step.output)
        except Exception as error:  # noqa: BLE001  an asynchronous failure of the device
            self._step_failed(step.plan, error)
            return
        read = time.perf_counter()
        result = unpack_result(output, step.shape, step.plan, vocab_size=self._vocab_size)
        self._delivery.put(self._scheduler.commit(step.plan, result))
        host = step.host_seconds + time.perf_counter() - read
        seconds = self.metrics.note_step(step.dispatched, read, host, time.thread_time())
        self._scheduler.observe(step.plan, seconds)

    def _step_failed(self, plan: Plan, error: Exception) -> None:
        self.metrics.num_failed_steps += 1
        line = (str(error).splitlines() or [type(error).__name__])[0]
        _log.error("step failed: %s", line, exc_info=error)
        self._delivery.put(self._scheduler.fail(plan, f"the step failed: {line}"))
        if self._is_state_lost():
            self._renew_state()

    def _renew_state(self) -> None:
        for step in self._under_way:  # ran on what was lost; whoever is only there computes again
            self._scheduler.cancel(step.plan)
        self._under_way.clear()
        self._scheduler.preempt_all()
        self._state = self._allocate()

    def _is_state_lost(self) -> bool:
        try:
            jax.block_until_ready(self._state)
        except (RuntimeError, ValueError):  # a poisoned buffer raises what the device raised
            return True
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state))

    def _all_allowed(self, shape: BatchShape) -> jax.Array:
        dims = (shape.num_sampled, -(-self._vocab_size // 32))
        if dims not in self._masks:
            ones = np.full(dims, -1, np.int32)
            self._masks[dims] = jax.device_put(ones, self.table.whole)
        return self._masks[dims]
