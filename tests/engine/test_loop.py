"""The engine's loop: faults end what they must and nothing else; nothing is compiled while it serves."""

import threading
import time
from dataclasses import replace

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.tiny import VOCAB, Client, make_kit, tiny_llama
from xjax.engine import warmup
from xjax.engine.audit import pointers
from xjax.engine.build import start_engine
from xjax.engine.metrics import CompileCounter
from xjax.engine.pack import shapes_of
from xjax.errors import CapacityError, EngineError, LoadError, RequestError
from xjax.request import FinishReason, Request, SamplingParams

pytestmark = pytest.mark.device

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=120)


def prompt(size, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, size).tolist()


def is_idle(engine):
    """Whether nothing lives and every page is free, soon."""
    for _ in range(400):
        stats = engine.stats()
        if not (stats["running"] or stats["waiting"] or stats["pages_used_0"]):
            return True
        time.sleep(0.005)
    return False


class Breaking:
    """A table whose programs do something wrong at one call."""

    def __init__(self, table, number, fault):
        self._table, self._number, self._fault, self.calls = table, number, fault, 0

    def __getattr__(self, name):
        return getattr(self._table, name)

    def find(self, shape):
        program = self._table.find(shape)
        return None if program is None else warmup.Program(program.shape, self._call_of(program), 0, False)

    def _call_of(self, program):
        def call(params, state, *arguments):
            self.calls += 1
            if self.calls == self._number:
                return self._fault(program.call, params, state, arguments)
            return program.call(params, state, *arguments)

        return call


class Unreadable:
    """An output that fails when it is read."""

    def copy_to_host_async(self):
        pass

    def __array__(self, *args, **kwargs):
        raise RuntimeError("the device fell over")


def fault_before_dispatch(call, params, state, arguments):
    raise RuntimeError("the dispatch failed\nwith a long trace")


def fault_on_reading(call, params, state, arguments):
    state, _ = call(params, state, *arguments)
    return state, Unreadable()


def fault_that_takes_the_state(call, params, state, arguments):
    call(params, state, *arguments)
    raise RuntimeError("the state is gone")


def fault_found_late_that_takes_the_state(call, params, state, arguments):
    """What an asynchronous failure looks like: the next step is dispatched on a state that is lost."""
    state, _ = call(params, state, *arguments)

    class Late(Unreadable):
        def __array__(self, *args, **kwargs):
            for leaf in jax.tree.leaves(engine_box[0]._state):
                leaf.delete()
            raise RuntimeError("lost")

    return state, Late()


engine_box = []
FAULTS = [value for name, value in sorted(globals().items()) if name.startswith("fault_")]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_step_ends_its_batch_alone(fault, llama_kit):
    engine = llama_kit.engine()
    reference = {size: Client(engine).run(prompt(size), GREEDY).token_ids for size in (5, 9, 30, 33)}
    engine.close()
    table = Breaking(llama_kit.table, 12, fault)
    engine = start_engine(llama_kit.model, llama_kit.plan, table)
    engine_box[:] = [engine]
    client = Client(engine)
    first = [client.start(prompt(size), GREEDY) for size in (5, 9)]
    while table.calls < 12:
        time.sleep(0.001)
    rest = [client.start(prompt(size), GREEDY) for size in (30, 33)]
    for answer, size in zip(first, (5, 9), strict=True):
        sample = answer.wait(30)[0]
        assert sample.reason is FinishReason.ERROR and sample.error.startswith("the step failed: ")
        assert "\n" not in sample.error
        assert sample.token_ids == reference[size][: len(sample.token_ids)]
    for answer, size in zip(rest, (30, 33), strict=True):
        assert answer.wait(30)[0].token_ids == reference[size]
    assert engine.stats()["failed_steps"] == 1
    assert is_idle(engine)
    engine.close()
    engine._scheduler.check()


def test_sequences_only_in_the_step_after_a_lost_one_compute_again(llama_kit):
    """The failed step holds the first request alone; the second joined in the step after it."""
    engine = llama_kit.engine()
    reference = Client(engine).run(prompt(20), GREEDY).token_ids
    engine.close()
    joined = threading.Event()

    def fault(call, params, state, arguments):
        joined.wait(10)  # the next plan finds the second request
        return fault_found_late_that_takes_the_state(call, params, state, arguments)

    engine = start_engine(llama_kit.model, llama_kit.plan, Breaking(llama_kit.table, 8, fault))
    engine_box[:] = [engine]
    client = Client(engine)
    first = client.start(prompt(5), GREEDY)
    while engine.table.calls < 8:
        time.sleep(0.001)
    second = client.start(prompt(20), GREEDY)
    joined.set()
    assert first.wait(30)[0].reason is FinishReason.ERROR
    assert second.wait(30)[0].token_ids == reference
    engine.close()


def test_a_failing_sink_ends_its_own_request_only(llama_engine, caplog):
    calls = []

    def sink(event):
        calls.append(event)
        raise SystemExit("not even this ends the thread")

    llama_engine.submit(Request(request_id="bad", prompt_ids=(1, 2), sampling=LONG.replace(seed=1)), sink)
    assert Client(llama_engine).run(prompt(5), GREEDY).reason is FinishReason.LENGTH
    assert is_idle(llama_engine) and len(calls) == 1
    assert llama_engine.stats()["aborts"] == 1


def test_weights_that_are_not_numbers_end_the_request(llama_kit):
    model = llama_kit.model
    params = jax.tree.map(lambda leaf: leaf * jnp.float32(np.nan), model.params)
    engine = start_engine(
        type(model)(model.family, model.config, params, model.dtype), llama_kit.plan, llama_kit.table
    )
    sample = Client(engine).run(prompt(5), GREEDY)
    assert sample.reason is FinishReason.ERROR and "not finite" in sample.error
    assert is_idle(engine) and engine.stats()["failed_steps"] == 0
    engine.close()


def test_close_ends_live_requests_with_an_error(llama_kit):
    engine = llama_kit.engine()
    client = Client(engine)
    answers = [client.start(prompt(9), LONG.replace(n=2)) for _ in range(5)]
    answers[0].first.wait(30)
    engine.close()
    for answer in answers:
        for sample in answer.wait(1):
            assert sample.reason is FinishReason.ERROR and "closed" in sample.error
    with pytest.raises(EngineError, match="stopped"):
        client.start(prompt(3), GREEDY)
    engine.abort("r1")
    engine.close()


def test_a_defect_of_the_loop_ends_every_request(llama_kit, monkeypatch, caplog):
    engine = llama_kit.engine()
    client = Client(engine)
    answers = [client.start(prompt(9), LONG) for _ in range(6)]
    answers[0].first.wait(30)
    monkeypatch.setattr(engine._scheduler, "plan", lambda now: 1 / 0)
    assert all("ZeroDivisionError" in answer.wait(10)[0].error for answer in answers)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        client.start(prompt(3), GREEDY)
    assert "ZeroDivisionError" in engine.failure()
    engine.close()


def test_failure_tells_why_nothing_is_served(llama_kit):
    engine = llama_kit.engine()
    assert engine.failure() is None
    engine.close()
    assert engine.failure() == "the engine was closed"


def test_abort_in_every_state(llama_engine):
    client = Client(llama_engine)
    running = [
        client.start(prompt(30, i), LONG) for i in range(4)
    ]  # too much for the pages: some wait preempted
    queued = [client.start(prompt(100, i), LONG.replace(n=2)) for i in range(3)]
    running[0].first.wait(30)
    prefilling = client.start(prompt(140), GREEDY.replace(max_tokens=2))
    while not llama_engine.stats()["preemptions"]:
        time.sleep(0.001)
    for answer in (*queued, prefilling, *running):
        llama_engine.abort(answer.request_id)
    llama_engine.abort("unknown")
    for answer in (*queued, prefilling, *running):
        assert all(sample.reason is FinishReason.ABORT for sample in answer.wait(10))
    assert is_idle(llama_engine)


def test_limits_of_the_queue(llama_kit):
    plan = llama_kit.plan
    config = type(plan.scheduler)(**{**vars(plan.scheduler), "max_queue": 3})
    engine = start_engine(llama_kit.model, replace(plan, scheduler=config), llama_kit.table)
    client, answers = Client(engine), []
    with pytest.raises(CapacityError, match="3 requests wait"):
        for _ in range(12):
            answers.append(client.start(prompt(30), LONG.replace(max_tokens=100)))
    assert 3 <= len(answers) <= 8
    assert all(answer.wait(60)[0].reason is FinishReason.LENGTH for answer in answers)
    engine.close()


def test_a_request_waits_no_longer_than_it_wants(llama_engine):
    client = Client(llama_engine)
    busy = [client.start(prompt(60, i), LONG.replace(max_tokens=90)) for i in range(3)]
    late = client.start(prompt(60), GREEDY, arrival=time.monotonic() - 10, max_queue_time=0.001, priority=-1)
    sample = late.wait(20)[0]
    assert sample.reason is FinishReason.ERROR and "queue" in sample.error
    assert all(answer.wait(60)[0].reason is FinishReason.LENGTH for answer in busy)


def test_bad_requests_are_refused_at_once(llama_engine):
    client = Client(llama_engine)
    for bad, text in (([], "empty"), (prompt(156), "156"), ([VOCAB], "0..95"), ([-1], "-1")):
        with pytest.raises(RequestError, match=text):
            client.start(bad, GREEDY)
    with pytest.raises(RequestError, match="logit_bias"):
        client.start([1], GREEDY.replace(logit_bias={VOCAB: 1.0}))
    answer = client.start([1], LONG)
    client._serial -= 1
    with pytest.raises(RequestError, match="in use"):
        client.start([1], LONG)
    llama_engine.abort(answer.request_id)


def test_the_state_stays_where_it_is(llama_engine):
    client = Client(llama_engine)
    client.run(prompt(5), GREEDY)
    before = pointers(llama_engine._state)
    client.run(prompt(40), GREEDY.replace(logprobs=1))
    client.run(prompt(7), GREEDY)
    assert pointers(llama_engine._state) == before


def test_nothing_is_compiled_while_serving(llama_kit, monkeypatch):
    llama_kit.table.wait(shapes_of(llama_kit.plan.scheduler))
    engine = llama_kit.engine()
    engine.prepare_moves()
    engine.end_warm_up()
    traces, counter = [], CompileCounter()
    whole = warmup.step
    monkeypatch.setattr(warmup, "step", lambda *args, **kwargs: traces.append(1) or whole(*args, **kwargs))
    client = Client(engine)
    client._serial = 100
    kinds = (
        GREEDY, GREEDY.replace(temperature=0.9, top_p=0.8, top_k=7), GREEDY.replace(logprobs=3, n=2),
        GREEDY.replace(frequency_penalty=1.0, logit_bias={3: 1.0}), GREEDY.replace(prompt_logprobs=2),
    )  # fmt: skip
    answers = [client.start(prompt(3 + 17 * i % 80, i), kinds[i % len(kinds)]) for i in range(15)]
    for answer in answers:
        answer.wait(60)
    assert engine.stats()["preemptions"] > 0
    assert (counter.count, traces) == (0, [])
    jax.jit(lambda x: x + 2)(jnp.ones(3)).block_until_ready()
    assert counter.count >= 1, "the counter hears nothing"
    counter.close()
    engine.close()


class Slow:
    """A table in which nothing but given shapes is ever ready."""

    def __init__(self, table, shapes):
        self._table, self._shapes = table, shapes

    def __getattr__(self, name):
        return getattr(self._table, name)

    def find(self, shape):
        return self._table.find(shape) if shape in self._shapes else None


def test_a_larger_program_gives_the_same_text(llama_kit):
    """Only the full shapes of four rows are ready; they serve everything."""
    kit = llama_kit
    engine = kit.engine()
    expected = Client(engine).run(prompt(30), GREEDY).token_ids
    engine.close()
    table = warmup.ProgramTable(kit.table._spec, kit.model.params, kit.table._state)
    for shape in shapes_of(kit.plan.scheduler):
        if shape.full and shape.num_rows == 4:
            table._futures[shape] = kit.table._futures[shape]
    engine = start_engine(kit.model, kit.plan, table)
    assert Client(engine).run(prompt(30), GREEDY).token_ids == expected
    assert len(table.ready) == 2
    engine.close()


def test_the_engine_listens_while_it_compiles(llama_kit):
    """Abort and close are heard although no program is ever ready, and tokens made are delivered."""
    shapes = [shape for shape in shapes_of(llama_kit.plan.scheduler) if shape.num_prefill]
    engine = start_engine(llama_kit.model, llama_kit.plan, Slow(llama_kit.table, shapes))
    client = Client(engine)
    answer, other = client.start(prompt(5), GREEDY), client.start(prompt(5), GREEDY)
    assert answer.first.wait(10), "the prefill's token waits for the next program"
    engine.abort(answer.request_id)
    assert answer.wait(10)[0].reason is FinishReason.ABORT
    engine.abort(other.request_id)
    assert other.wait(10)[0].reason is FinishReason.ABORT
    assert is_idle(engine)
    last = client.start(prompt(5), GREEDY)
    last.first.wait(10)
    engine.close()
    assert last.wait(1)[0].reason is FinishReason.ERROR


def test_a_program_that_cannot_be_made_fails_its_requests(monkeypatch):
    kit = make_kit(tiny_llama())
    monkeypatch.setattr(warmup.ProgramTable, "_compile", lambda *_: 1 / 0)
    engine = kit.engine()
    client = Client(engine)
    for _ in range(2):
        sample = client.run(prompt(5), GREEDY)
        assert sample.reason is FinishReason.ERROR and "division" in sample.error
    engine.close()


def test_a_program_that_fails_the_audit_stops_the_engine(monkeypatch, caplog):
    def refuse(*_):
        raise LoadError("step decode-1: state leaf .kv[0].k is copied instead of updated in place")

    kit = make_kit(tiny_llama())
    monkeypatch.setattr(warmup.ProgramTable, "_compile", refuse)
    engine = kit.engine()
    client = Client(engine)
    sample = client.run(prompt(5), GREEDY)
    assert sample.reason is FinishReason.ERROR and "state leaf" in sample.error
    with pytest.raises(EngineError, match="state leaf"):
        client.run(prompt(5), GREEDY)
    engine.close()
