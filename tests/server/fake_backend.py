"""A backend for the tests of the server: answers one can tell beforehand, at a pace one can set.

The answer to a prompt is its own token ids, over and over, until max_tokens: "hi" gives "hihihi…".
With a seed of 13 tokens come in reverse order. Pages: one for each sequence that is alive.
"""

import threading
import time
from concurrent.futures import Future

from tests.text.small import from_gguf, gguf_bytes
from xjax.errors import CapacityError, EngineError, RequestError
from xjax.request import FinishReason, TokenEvent, TokenLogprobs
from xjax.text.front import Front
from xjax.text.template import ChatTemplate
from xjax_server.serving import ServedModel

EOS = 0
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'break the template' %}{{ raise_exception('broken') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


class _Sequence:
    def __init__(self, request, sample_id):
        self.request, self.sample_id = request, sample_id
        self.num_tokens = 0

    @property
    def key(self):
        return (self.request.request_id, self.sample_id)


class FakeBackend:
    """Implements xjax.backend.Backend on a thread of its own, a token a sequence and step.

    pace            seconds a step
    max_queue       requests that may wait or run; more are refused
    is_held         while set, requests wait and none runs
    prefill_steps   steps before a sequence's first token
    fail_at         token number at which every sequence fails with an error; None: never
    max_model_len   prompts of so many tokens and more are refused
    """

    def __init__(self, *, pace=0.0, max_queue=None, prefill_steps=0, fail_at=None, max_model_len=4096):
        self.pace, self.max_queue, self.prefill_steps = pace, max_queue, prefill_steps
        self.fail_at, self.max_model_len = fail_at, max_model_len
        self.is_held = False
        self.requests = []  # every request that was accepted
        self.aborted, self.finished = [], []
        self.aborts = self.steps = self.clears = 0
        self.cached = {}  # num_cached_tokens by sample id, 0 where there is none
        self._sinks, self._live = {}, {}
        self._wake = threading.Condition()
        self._failure = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    # ---- Backend ----

    def submit(self, request, on_event):
        with self._wake:
            if self._failure is not None:
                raise EngineError(f"the engine has stopped: {self._failure}")
            if request.request_id in self._sinks:
                raise RequestError("request id in use", param="request_id")
            if not request.prompt_ids:
                raise RequestError("the prompt is empty", code="empty_prompt", param="prompt")
            if len(request.prompt_ids) >= self.max_model_len:
                raise RequestError(
                    f"the prompt has {len(request.prompt_ids)} tokens; "
                    f"the context holds {self.max_model_len}, one of them for the answer",
                    code="context_length_exceeded",
                    param="prompt",
                )
            if self.max_queue is not None and len(self._sinks) >= self.max_queue:
                raise CapacityError("the queue is full", retry_after=2.0)
            self.requests.append(request)
            self._sinks[request.request_id] = on_event
            for sample_id in range(request.sampling.n):
                sequence = _Sequence(request, sample_id)
                self._live[sequence.key] = sequence
            self._wake.notify()

    def finish(self, request_id, sample_id, num_tokens):
        with self._wake:
            self.finished.append((request_id, sample_id, num_tokens))
            self._drop((request_id, sample_id))

    def abort(self, request_id):
        with self._wake:
            keys = [key for key in self._live if key[0] == request_id]
            if keys:
                self.aborts += 1
                self.aborted.append(request_id)
            for key in keys:
                self._drop(key)

    def stats(self):
        with self._wake:
            running = 0 if self.is_held else len(self._live)
            return {
                "running": running,
                "waiting": len(self._live) - running,
                "swapped": 0,
                "queued_requests": 0,
                "prefix_hits": 5,
                "prefix_misses_short": 2,
                "swap_out_seconds": 0.25,
                "pages_idle_0": 3,
                "host_slots_total_0": 0,
                "pages_used_0": len(self._live),
                "pages_total_0": 1000,
                "engine_steps": self.steps,
                "aborts": self.aborts,
                "compiles_after_warmup": 0,
                "step_seconds_sum": 0.5,
                "step_seconds_count": 3,
                "step_seconds_le_0.1": 1,
                "step_seconds_le_0.5": 3,
            }

    def failure(self):
        return self._failure

    def clear_cache(self):
        done = Future()
        if self._failure is not None:
            done.set_exception(EngineError(f"the engine has stopped: {self._failure}"))
        else:
            self.clears += 1
            done.set_result(7)
        return done

    # ---- for tests ----

    @property
    def num_live(self):
        """Sequences that hold something."""
        with self._wake:
            return len(self._live)

    def hold(self, is_held=True):
        """Let requests wait, or run."""
        with self._wake:
            self.is_held = is_held
            self._wake.notify()

    def die(self, reason="made up", *, silently=False):
        """End as an engine does whose thread failed; silently: without an event to anybody."""
        with self._wake:
            self._failure = reason
            live = [] if silently else list(self._live.values())
            events = [
                self._event(s, finish_reason=FinishReason.ERROR, error=f"the engine has stopped: {reason}")
                for s in live
            ]
            self._live.clear()
        for event, sink in events:
            sink(event)

    def close(self):
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join(5)

    # ---- engine thread ----

    def _run(self):
        while True:
            with self._wake:
                while not self._is_closed and (self.is_held or not self._live):
                    self._wake.wait(0.05)
                if self._is_closed:
                    return
                self.steps += 1
                now = time.monotonic()
                events = [made for s in list(self._live.values()) if (made := self._step(s, now)) is not None]
            # Sinks call back into finish and abort: the lock is free here.
            for event, sink in events:
                sink(event)
            if self.pace:
                time.sleep(self.pace)

    def _step(self, s, now):
        request = s.request
        s.num_tokens += 1
        number = s.num_tokens - self.prefill_steps  # of this token, from 1
        if number < 1:
            return None
        limit = request.max_queue_time
        if number == 1 and limit is not None and now - request.arrival > limit:
            self._live.pop(s.key)
            error = f"waited more than {limit:g} s in the queue"
            return self._event(s, finish_reason=FinishReason.ERROR, error=error, error_code="queue_timeout")
        if self.fail_at is not None and number >= self.fail_at:
            self._live.pop(s.key)
            return self._event(s, finish_reason=FinishReason.ERROR, error="the step failed: made up")
        ids = request.prompt_ids[::-1] if request.sampling.seed == 13 else request.prompt_ids
        token = ids[(number - 1) % len(ids)]
        more = {}
        if request.sampling.logprobs is not None:
            more["logprobs"] = (
                TokenLogprobs(-0.5, 1, ((token, -0.5), (1, -1.5))[: request.sampling.logprobs]),
            )
        if number == 1:
            more |= {
                "num_cached_tokens": self.cached.get(s.sample_id, 0),
                "queue_seconds": now - request.arrival,
            }
            if request.sampling.prompt_logprobs is not None:
                rest = tuple(TokenLogprobs(-0.25, 1) for _ in request.prompt_ids[1:])
                more["prompt_logprobs"] = (None, *rest)
        room = self.max_model_len - len(request.prompt_ids)
        stops = token in request.eos_ids and not request.sampling.ignore_eos
        if stops or token in request.sampling.stop_token_ids:
            more |= {"finish_reason": FinishReason.STOP, "stop_token_id": token}
        elif number >= min(request.sampling.max_tokens or room, room):
            more["finish_reason"] = FinishReason.LENGTH
        if "finish_reason" in more:
            self._live.pop(s.key)
        return self._event(s, token_ids=(token,), **more)

    def _event(self, s, **more):
        sink = self._sinks[s.request.request_id]
        if "finish_reason" in more:
            self._forget(s.request.request_id)
        return TokenEvent(request_id=s.request.request_id, sample_id=s.sample_id, **more), sink

    def _drop(self, key):
        if self._live.pop(key, None) is not None:
            self._forget(key[0])

    def _forget(self, request_id):
        if not any(key[0] == request_id for key in self._live):
            self._sinks.pop(request_id, None)


def small_front(template=TEMPLATE):
    """A byte-level tokenizer of a few hundred tokens, and a template that joins the messages."""
    tokenizer = from_gguf(gguf_bytes())
    chat = None if template is None else ChatTemplate({"default": template}, {})
    return Front(tokenizer, chat, eos_ids=frozenset((EOS,)))


def served(backend, *, names=("small",), front=None, defaults=None, seed=0):
    """A ServedModel around a backend."""
    return ServedModel(
        names=tuple(names),
        backend=backend,
        front=front or small_front(),
        max_model_len=backend.max_model_len,
        defaults=defaults or {},
        seed=seed,
        created=1_700_000_000,
    )
