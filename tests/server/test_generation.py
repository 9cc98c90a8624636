"""From prompts to deltas on the loop: order, wake-ups, all or none, deadlines, aborts, seeds."""

import asyncio
import time
from collections import deque

import pytest

from tests.server.fake_backend import EOS, FakeBackend, served
from tests.server.running import until
from xjax.errors import CapacityError, EngineError, RequestError
from xjax.request import FinishReason, SamplingParams
from xjax.text.answer import Delta
from xjax_server.errors import Unavailable
from xjax_server.generation import Generation, Prompt
from xjax_server.limits import Limits
from xjax_server.serving import Service

HI = (104, 105)


def run(backend, work, *, seed=0, **limits):
    """Run `work(service)` on a loop of its own; nothing may be left in service or backend."""

    async def inside():
        service = Service(limits=Limits(**limits))
        service.start(served(backend, seed=seed))
        result = await asyncio.wait_for(work(service), 20)
        assert service.active == set() and service.metrics.active == 0
        service.close()
        return result

    try:
        result = asyncio.run(inside())
        until(lambda: backend.num_live == 0)
        return result
    finally:
        backend.close()


def prompt(*ids, **sampling):
    return Prompt(ids or HI, SamplingParams(**{"max_tokens": 4, **sampling}))


async def take_all(generation):
    items = []
    try:
        while not generation.is_done:
            items += await generation.next()
    finally:
        generation.close()
    return items


def test_deltas_come_in_order_and_end():
    async def work(service):
        generation = await Generation.start(service, [prompt(n=2), prompt(7, 8, 9)], request_id="a")
        items = await take_all(generation)
        assert await generation.next(0.01) == []
        return items

    backend = FakeBackend()
    items = run(backend, work)
    for key, ids in {(0, 0): (104, 105) * 2, (0, 1): (104, 105) * 2, (1, 0): (7, 8, 9, 7)}.items():
        deltas = [delta for index, delta in items if (index, delta.sample_id) == key]
        assert tuple(i for delta in deltas for i in delta.token_ids) == ids
        assert [delta.finish_reason for delta in deltas] == [None] * 3 + [FinishReason.LENGTH]
    assert [request.request_id for request in backend.requests] == ["a-0", "a-1"]
    assert backend.aborts == 0


def test_the_request_says_who_asks_and_when():
    async def work(service):
        await take_all(await Generation.start(service, [prompt()], request_id="a", arrival=5.0, priority=3))

    backend = FakeBackend()
    run(backend, work, queue_timeout=10**9)
    (request,) = backend.requests
    assert (request.request_id, request.arrival, request.priority) == ("a", 5.0, 3)
    assert (request.eos_ids, request.max_queue_time) == (frozenset((EOS,)), 10**9)


@pytest.mark.parametrize(("limits", "queue"), [
    ({}, None), ({"request_timeout": 7.0}, 7.0), ({"request_timeout": 7.0, "queue_timeout": 2.0}, 2.0),
])  # fmt: skip
def test_the_queue_has_its_part_of_the_time(limits, queue):
    async def work(service):
        await take_all(await Generation.start(service, [prompt()], request_id="a"))

    backend = FakeBackend()
    run(backend, work, **limits)
    assert backend.requests[0].max_queue_time == queue


def test_seeds_differ_and_are_the_same_in_the_next_run():
    async def work(service):
        for i in range(3):
            await take_all(await Generation.start(service, [prompt()] * 2, request_id=str(i)))
        await take_all(await Generation.start(service, [prompt(seed=5)], request_id="own"))

    def seeds(seed):
        backend = FakeBackend()
        run(backend, work, seed=seed)
        return [request.sampling.seed for request in backend.requests]

    first = seeds(0)
    assert first == seeds(0) and first != seeds(1)
    assert len(set(first[:6])) == 6 and first[6] == 5


def test_one_refused_prompt_refuses_all():
    async def work(service):
        with pytest.raises(RequestError, match="holds 100"):
            await Generation.start(service, [prompt(), prompt(), prompt(*range(1, 200))], request_id="a")

    backend = FakeBackend(pace=0.05, max_model_len=100)
    run(backend, work)
    assert sorted(backend.aborted) == ["a-0", "a-1"]


def test_many_prompts_let_others_have_the_loop():
    async def work(service):
        turns = 0

        async def other():
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.create_task(other())
        prompts = [prompt(logit_bias=dict.fromkeys(range(300), 1.0))] * 512
        start = Generation.start(service, prompts, request_id="a")
        (await start).close()
        task.cancel()
        assert turns >= 5

    backend = FakeBackend()
    backend.hold()
    run(backend, work)
    assert len(backend.requests) == 512


def test_leaving_while_prompts_are_submitted_aborts_those_that_were():
    async def work(service):
        prompts = [prompt(logit_bias=dict.fromkeys(range(300), 1.0))] * 512
        start = Generation.start(service, prompts, request_id="a")
        task = asyncio.create_task(start)
        while not backend.requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert 0 < len(backend.requests) < 512

    backend = FakeBackend()
    backend.hold()
    run(backend, work)


def test_a_full_queue_is_told():
    async def work(service):
        first = await Generation.start(service, [prompt(max_tokens=100)], request_id="a")
        with pytest.raises(CapacityError) as caught:
            await Generation.start(service, [prompt()], request_id="b")
        assert caught.value.retry_after == 2.0
        first.close()

    run(FakeBackend(pace=0.05, max_queue=1), work)


@pytest.mark.parametrize(("change", "code"), [
    (lambda service: service.drain(), "draining"),
    (lambda service: service.fail("made up"), "engine_failed"),
])  # fmt: skip
def test_a_service_that_is_not_ready_takes_nothing(change, code):
    async def work(service):
        change(service)
        with pytest.raises(Unavailable) as caught:
            await Generation.start(service, [prompt()], request_id="a")
        assert caught.value.code == code

    backend = FakeBackend()
    run(backend, work)
    assert backend.requests == []


def test_silence_ends_a_wait():
    async def work(service):
        generation = await Generation.start(service, [prompt()], request_id="a")
        began = time.monotonic()
        assert await generation.next(0.05) == []
        assert 0.04 < time.monotonic() - began < 10
        service.model.backend.hold(False)
        assert len(await take_all(generation)) == 4

    backend = FakeBackend()
    backend.hold()
    run(backend, work)


def test_a_wake_up_for_what_was_taken_already_is_no_silence():
    async def work(service):
        generation = await Generation.start(service, [prompt()], request_id="a")
        waiting = asyncio.create_task(generation.next(5))
        for _ in range(3):
            await asyncio.sleep(0.01)
            generation.wake()
        service.model.backend.hold(False)
        assert await waiting
        generation.close()

    backend = FakeBackend(pace=0.01)
    backend.hold()
    run(backend, work)


def test_what_comes_while_a_buffer_is_emptied_does_not_hide_what_comes_next():
    class Buffer(deque):
        def popleft(self):
            item = super().popleft()
            if not late:  # the output thread, in the middle of the taker's turn
                late.append(item)
                generation.put(item)
            return item

    late = []

    async def work(service):
        nonlocal generation
        generation = await Generation.start(service, [prompt()], request_id="a")
        generation._buffer = Buffer()
        item = (0, Delta(sample_id=0, text="h", token_ids=(104,)))
        generation.put(item)
        assert len(await generation.next()) == 2
        taker = asyncio.create_task(generation.next(5))
        await asyncio.sleep(0.02)  # by now the wake-up has come, for nothing
        generation.put(item)
        began = time.monotonic()
        assert await taker == [item]
        assert time.monotonic() - began < 10
        generation.close()

    generation = None
    backend = FakeBackend()
    backend.hold()
    run(backend, work)


@pytest.mark.parametrize("is_queued", [True, False])
def test_close_aborts_wherever_it_stands(is_queued):
    async def work(service):
        generation = await Generation.start(service, [prompt(max_tokens=4000, n=3)], request_id="a")
        if not is_queued:
            await generation.next()
        generation.close()
        generation.close()
        until(lambda: backend.num_live == 0, 1)

    backend = FakeBackend(pace=0.005)
    backend.hold(is_queued)
    run(backend, work)
    assert (backend.aborts, backend.aborted) == (1, ["a"])


def test_close_lets_a_waiting_taker_go():
    async def work(service):
        generation = await Generation.start(service, [prompt()], request_id="a")
        taker = asyncio.create_task(generation.next())
        await asyncio.sleep(0.01)
        generation.close()
        assert await asyncio.wait_for(taker, 1) == []

    backend = FakeBackend()
    backend.hold()
    run(backend, work)


def test_a_slow_taker_loses_nothing():
    async def work(service):
        generation = await Generation.start(service, [prompt(max_tokens=1000, n=2)], request_id="a")
        await asyncio.to_thread(until, lambda: backend.num_live == 0)
        await asyncio.sleep(0.05)
        items = await generation.next()
        generation.close()
        assert generation.is_done
        return items

    backend = FakeBackend()
    items = run(backend, work)
    assert len(items) == 2000
    for sample in range(2):
        ids = [i for _, delta in items if delta.sample_id == sample for i in delta.token_ids]
        assert ids == list(HI) * 500


def test_many_tokens_cost_few_wake_ups():
    calls = 0

    async def work(service):
        nonlocal calls
        loop = service._loop
        original = loop.call_soon_threadsafe

        def counted(*args):
            nonlocal calls
            calls += 1
            return original(*args)

        loop.call_soon_threadsafe = counted
        generations = [
            await Generation.start(service, [prompt(max_tokens=20)], request_id=str(i)) for i in range(100)
        ]
        backend.hold(False)
        results = await asyncio.gather(*map(take_all, generations))
        del loop.call_soon_threadsafe
        assert [sum(len(delta.token_ids) for _, delta in items) for items in results] == [20] * 100

    backend = FakeBackend(pace=0.005)
    backend.hold()
    run(backend, work)
    assert calls < 20 * 100 / 5, "a wake-up serves a burst"


def test_a_sample_that_fails_is_a_delta():
    async def work(service):
        return await take_all(await Generation.start(service, [prompt()], request_id="a"))

    items = run(FakeBackend(fail_at=3), work)
    assert items[-1][1].finish_reason is FinishReason.ERROR
    assert items[-1][1].error == "the step failed: made up"


def test_an_answer_has_so_much_time():
    async def work(service):
        generation = await Generation.start(service, [prompt(max_tokens=4000)], request_id="a")
        with pytest.raises(Unavailable, match=r"0\.1 s") as caught:
            await take_all(generation)
        assert caught.value.code == "request_timeout"

    backend = FakeBackend(pace=0.01)
    run(backend, work, request_timeout=0.1, queue_timeout=100.0)
    assert backend.aborts == 1


def test_all_can_be_ended():
    async def work(service):
        generations = [
            await Generation.start(service, [prompt(max_tokens=4000)], request_id=str(i)) for i in range(3)
        ]
        takers = [asyncio.create_task(take_all(generation)) for generation in generations]
        await asyncio.sleep(0.02)
        service.end_all(EngineError("made up"))
        for taker in takers:
            with pytest.raises(EngineError, match="made up"):
                await taker
        assert service.metrics.outcomes["error"] == 3

    backend = FakeBackend(pace=0.01)
    run(backend, work)
    assert backend.aborts == 3


def test_outcomes_tokens_and_times_are_counted():
    async def work(service):
        await take_all(await Generation.start(service, [prompt(n=2)], request_id="length"))
        await take_all(await Generation.start(service, [prompt(7, 8, stop_token_ids=[8])], request_id="stop"))
        (await Generation.start(service, [prompt(max_tokens=4000)], request_id="abort")).close()
        return service.metrics

    metrics = run(FakeBackend(pace=0.01), work)
    assert metrics.outcomes == {"stop": 1, "length": 1, "abort": 1, "error": 0}
    assert (metrics.prompt_tokens, metrics.generated_tokens) == (6, 8 + 2)
    assert (metrics.ttft.count, metrics.queue.count, metrics.whole.count) == (2, 2, 3)
    assert metrics.token_gap.count == 6 + 1
    assert 0.005 < metrics.token_gap.total / 7 < 10


def test_text_work_is_bounded_and_leaves_with_its_caller():
    started = []

    def slow(name):
        started.append(name)
        time.sleep(0.1)
        return name

    async def work(service):
        tasks = [asyncio.create_task(service.in_thread(slow, i)) for i in range(4)]
        await asyncio.sleep(0.02)
        with pytest.raises(CapacityError):
            await service.in_thread(slow, 4)
        tasks[3].cancel()
        assert await asyncio.gather(*tasks[:3]) == [0, 1, 2]
        assert await service.in_thread(slow, 5) == 5

    run(FakeBackend(), work, text_threads=2, text_queue=4)
    assert sorted(started) == [0, 1, 2, 5]


def test_a_mark_after_the_loop_ended_is_harmless():
    async def make():
        return Service()

    service = asyncio.run(make())
    service.mark(object())
    service.mark(object())
