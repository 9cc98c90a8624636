"""The scheduler in situations made by hand, against the fake device."""

from collections import defaultdict

import numpy as np
import pytest

from tests.fakes import FakeLoop, FakeModel, answer_alone
from tests.scheduler.traces import check_events
from xjax.config import SchedulerConfig, StepShapes
from xjax.errors import CapacityError, RequestError
from xjax.request import FinishReason, Request, SamplingParams
from xjax.scheduler import Scheduler, StepResult
from xjax.scheduler.admission import WaitingLine
from xjax.scheduler.roster import Roster


def config(**changes) -> SchedulerConfig:
    prefill = changes.pop("prefill", ((8, 4), (16, 4)))
    num_seqs = changes.pop("max_num_seqs", 4)
    shapes = StepShapes(
        decode_rows=tuple(sorted({1, num_seqs})),
        prefill=prefill,
        num_scored=tuple(min(tokens, 8) for tokens, _ in prefill),
        num_pairs=changes.pop("num_pairs", 400),
    )
    values = {"max_model_len": 64, "page_size": 4, "num_pages": (65,), "windows": (None,), "shapes": shapes}
    return SchedulerConfig(**({"max_num_seqs": num_seqs} | values | changes))


def request(name: str, num_prompt: int, num_output: int | None = 8, **changes) -> Request:
    fields = {
        name: changes.pop(name)
        for name in ("priority", "arrival", "max_queue_time", "eos_ids", "pooling")
        if name in changes
    }
    prompt = np.random.default_rng(len(name) + num_prompt).integers(2, 50, num_prompt)
    sampling = SamplingParams(max_tokens=num_output, seed=changes.pop("seed", 5), **changes)
    return Request(request_id=name, prompt_ids=tuple(prompt.tolist()), sampling=sampling, **fields)


class Play:
    """A loop and what came out of it; `end` runs it dry and checks every answer."""

    def __init__(self, settings: SchedulerConfig, *, nan_token: int = -1, **options) -> None:
        self.loop = FakeLoop(settings, FakeModel(settings.windows, nan_token=nan_token), **options)
        self.requests: dict[str, Request] = {}
        self.events = defaultdict(list)
        self.loop.on_event = lambda event: self.events[event.request_id, event.sample_id].append(event)

    def submit(self, *requests: Request) -> None:
        for item in requests:
            self.loop.submit(item)
            self.requests[item.request_id] = item

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.loop.step()

    def end(self) -> dict[str, float]:
        for _ in range(2000):
            if self.loop.is_idle:
                break
            self.loop.step()
        assert self.loop.is_idle, "the run does not come to an end"
        for item in self.requests.values():
            for sample_id in range(item.sampling.n):
                answer = answer_alone(self.loop.device.model, item, sample_id, self.loop.scheduler.longest)
                check_events(item, self.events[item.request_id, sample_id], answer)
        return self.loop.scheduler.stats()

    def reason(self, name: str, sample_id: int = 0) -> FinishReason | None:
        return self.events[name, sample_id][-1].finish_reason

    def num_tokens(self, name: str, sample_id: int = 0) -> int:
        return sum(len(event.token_ids) for event in self.events[name, sample_id])


# ---- what is refused, what is clipped ----------------------------------------------------


def test_refusals_say_what_to_do_and_change_nothing():
    scheduler = Scheduler(config(max_queue=1))
    with pytest.raises(RequestError, match="empty"):
        scheduler.submit(request("a", 0))
    with pytest.raises(RequestError, match=r"64 tokens; the context holds 64") as caught:
        scheduler.submit(request("a", 64))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    scheduler.submit(request("a", 63))
    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.submit(request("a", 3))
    with pytest.raises(CapacityError, match="1 requests wait"):
        scheduler.submit(request("b", 3))
    assert scheduler.stats()["queued_requests"] == 1
    scheduler.check()


def test_pool_below_the_context_limits_single_requests():
    scheduler = Scheduler(config(num_pages=(6,)))
    assert scheduler.longest == 20
    with pytest.raises(RequestError, match=r"--num-pages\) holds 20"):
        scheduler.submit(request("a", 20))


@pytest.mark.parametrize(("windows", "num_pages", "longest"), [
    ((None, 5), (65, 3), 64),  # two pages hold a window of 5 that begins anywhere but not its last ...
    ((None, 6), (65, 3), 8),
    ((None, 6), (65, 4), 64),
    ((5,), (3,), 64),
    ((), (), 64),
])  # fmt: skip
def test_longest_counts_what_a_window_needs(windows, num_pages, longest):
    assert Scheduler(config(windows=windows, num_pages=num_pages)).longest == longest


@pytest.mark.parametrize("window", [1, 4, 5, 6, 16])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_smallest_window_pool_carries_the_longest_request(window, page_size):
    least = -(-(window - 1) // page_size) + 1
    play = Play(config(windows=(None, window), page_size=page_size, num_pages=(66, least + 1)))
    play.submit(request("a", 40, None, n=2), request("b", 21))
    play.end()
    assert play.num_tokens("a") == 24


@pytest.mark.parametrize("num_prompt", [4, 8, 16, 19])
def test_max_tokens_is_clipped_to_the_pool(num_prompt):
    play = Play(config(num_pages=(6,)))
    play.submit(request("a", num_prompt, 5000))
    play.end()
    assert (play.reason("a"), play.num_tokens("a")) == (FinishReason.LENGTH, 20 - num_prompt)


def test_samples_that_wait_hold_no_copy_of_their_prompt():
    play = Play(config(max_num_seqs=2))
    play.submit(request("many", 30, 4, n=100, frequency_penalty=0.5, logit_bias={3: 1.0}))
    play.steps(3)
    waiting = [item for item in play.loop.scheduler._roster.groups["many"].live if item.slot is None]
    assert len(waiting) == 98 and not any(item.penalties for item in waiting)
    prompt = waiting[0].tokens(0, 30)
    assert all(np.shares_memory(item.tokens(0, 30), prompt) for item in waiting)
    assert play.end()["running"] == 0


def test_deadlines_do_not_outlive_their_requests():
    play = Play(config())
    for i in range(500):
        play.submit(request(f"r{i}", 3, 1, max_queue_time=3600.0))
        play.steps(1)
    assert len(play.loop.scheduler._deadlines) <= 100
    waits = request("waits", 3, 8, max_queue_time=1.0, arrival=play.loop.now)
    play.submit(waits)
    play.loop.scheduler.abort("waits")
    play.submit(request("waits", 3, 8, max_queue_time=3600.0, arrival=play.loop.now))
    assert play.loop.scheduler.expire(play.loop.now + 10) == [], "the deadline of an id's earlier life"
    assert len(play.loop.scheduler.expire(play.loop.now + 10_000)) == 1


def test_queue_counts_requests_not_samples():
    scheduler = Scheduler(config(max_queue=2))
    scheduler.submit(request("a", 3, n=20))
    scheduler.submit(request("b", 3, n=20))
    with pytest.raises(CapacityError):
        scheduler.submit(request("c", 3))
    scheduler.abort("a")
    scheduler.submit(request("c", 3))


def test_queue_time_ends_only_what_never_ran():
    play = Play(config(max_num_seqs=1))
    play.submit(request("a", 9, 20, max_queue_time=3.0, n=3), request("b", 9, 2, max_queue_time=3.0, n=2))
    play.steps(10)
    for sample_id in range(2):
        (event,) = play.events["b", sample_id]
        assert event.finish_reason is FinishReason.ERROR and "3 s in the queue" in (event.error or "")
        assert event.error_code == "queue_timeout"
    play.end()
    assert [play.reason("a", i) for i in range(3)] == [FinishReason.LENGTH] * 3


# ---- order, fairness, pressure -----------------------------------------------------------


def flood(play: Play) -> int:
    """Submit a long request into a stream of short ones; steps until the long one has ended."""
    play.submit(request("s0", 8, 8), request("s1", 8, 8))
    play.steps(1)
    play.submit(request("long", 30, 4, arrival=0.5))
    for step in range(400):
        if play.events["long", 0] and play.reason("long") is not None:
            return step
        if step % 2 == 0:
            play.submit(request(f"t{step}", 8, 8, arrival=1.0 + step))
        play.steps(1)
    return 400


def test_short_ones_pass_a_long_one_but_not_for_ever(monkeypatch):
    play = Play(config(num_pages=(13,)))
    steps = flood(play)
    stats = play.end()
    assert steps < 150
    assert stats["bypasses"] > 5
    monkeypatch.setattr(WaitingLine, "is_starved", staticmethod(lambda sequence: False))
    assert flood(Play(config(num_pages=(13,)))) == 400


@pytest.mark.parametrize("lookahead", [True, False])
def test_two_prompts_of_most_of_the_pool_both_end(lookahead):
    play = Play(config(num_pages=(17,), prefill=((4, 4),)), lookahead=lookahead)
    play.submit(request("a", 38, 20), request("b", 39, 20))
    stats = play.end()
    assert stats["preemptions"] <= 1


def test_many_growing_sequences_are_not_thrashed():
    """All fit at first and none later: recomputing stays below the work itself."""
    play = Play(config(num_pages=(17,), max_num_seqs=8))
    play.submit(*(request(f"g{i}", 4, 40) for i in range(8)))
    stats = play.end()
    assert stats["preemptions"] > 0
    assert stats["recomputed_tokens"] < 8 * 44


def test_only_younger_ones_yield():
    play = Play(config(num_pages=(13,), max_num_seqs=3))
    play.submit(*(request(f"g{i}", 4, 30, seed=i) for i in range(3)))
    ends = []
    while not play.loop.is_idle:
        play.loop.step()
        ends += [name for name, _ in play.events if play.reason(name) and name not in ends]
    assert play.end()["preemptions"] > 0
    assert ends == ["g0", "g1", "g2"]


def test_higher_priority_starts_first():
    play = Play(config(max_num_seqs=1))
    play.submit(
        request("low", 4, 3), request("late", 4, 3, priority=5, arrival=9.0), request("mid", 4, 3, priority=1)
    )
    play.end()
    order = list(dict.fromkeys(event.request_id for event in play.loop.events))
    assert order == ["late", "mid", "low"]


def test_slow_prefill_shrinks_the_chunk_while_others_decode():
    scheduler = Scheduler(config())
    scheduler.submit(request("d", 4, 30))
    first = scheduler.plan()
    assert first is not None and first.prefill == (8, 4)
    scheduler.observe(first, 0.25)  # 32 tokens a second: 8 in the time a step may take
    scheduler.submit(request("long", 60))
    plan = scheduler.plan()
    assert plan is not None and plan.num_decode == 1 and plan.prefill == (8, 4)
    scheduler.abort("d")
    plan = scheduler.plan()
    assert plan is not None and plan.num_decode == 0 and plan.prefill == (16, 4)


def test_short_prompt_does_not_wait_for_the_whole_of_a_long_one():
    play = Play(config(prefill=((8, 4),)))
    play.submit(request("long", 60, 2), request("short", 4, 2))
    play.steps(2)
    assert play.num_tokens("short") == 1
    play.end()


def test_prefill_that_ends_finds_room_for_its_pairs():
    """Younger decodes with many penalties must not keep an older prompt from its first token."""
    play = Play(config(num_pairs=45, max_num_seqs=4))
    play.submit(request("y", 25, 30, presence_penalty=0.5, arrival=5.0))
    play.steps(4)
    play.submit(request("old", 50, 4, presence_penalty=0.5, arrival=1.0))
    play.steps(10)
    assert play.num_tokens("old") > 0
    assert play.end()["stalls"] > 0


# ---- samples that share ------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None,), (None, 3), (5,), (None, 1, 16)])
@pytest.mark.parametrize("num_prompt", [3, 4, 5, 32, 33])
def test_samples_compute_the_full_pages_of_a_prompt_once(windows, num_prompt):
    play = Play(config(windows=windows, num_pages=(65,) * len(windows), max_num_seqs=2))
    play.submit(request("a", num_prompt, 6, n=5))
    stats = play.end()
    shared = (num_prompt - 1) // 4 * 4
    assert stats["shared_tokens"] == 4 * shared
    # A sample of which one prompt token is left computes that with the decodes.
    partial = num_prompt - 1 - shared
    forward = stats["prefill_tokens"] + stats["decode_tokens"]
    assert forward == 5 * (num_prompt + 5) - 4 * (shared + partial)
    assert stats["page_copies"] == 4 * len(windows) * (partial > 0)


def test_recurrent_models_share_nothing():
    play = Play(config(has_recurrent=True))
    play.submit(request("a", 17, 6, n=3))
    stats = play.end()
    assert (stats["shared_tokens"], stats["prefill_tokens"] + stats["decode_tokens"]) == (0, 3 * (17 + 5))


@pytest.mark.parametrize("step", range(9))
def test_first_sample_may_end_at_any_time(step):
    """By the text, before or after its prompt is shared; the others go on."""
    play = Play(config(max_num_seqs=2))
    play.submit(request("a", 33, 6, n=4))
    play.steps(step)
    play.loop.finish("a", 0, 1)
    play.end()
    assert [play.reason("a", i) for i in (1, 2, 3)] == [FinishReason.LENGTH] * 3


@pytest.mark.parametrize("step", range(9))
def test_abort_ends_every_sample_at_once(step):
    play = Play(config(max_num_seqs=2))
    play.submit(request("a", 33, 3, n=4), request("b", 9))
    play.steps(step)
    play.loop.abort("a")
    play.loop.step()
    assert [play.reason("a", i) for i in range(4)].count(None) == 0
    play.end()


@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("step", range(1, 9))
@pytest.mark.parametrize("kind", ["refused_steps", "broken_steps"])
def test_prompt_of_a_failed_step_is_not_shared(kind, step, lookahead):
    play = Play(config(max_num_seqs=3), lookahead=lookahead, **{kind: frozenset({step})})
    play.submit(request("a", 31, 6, n=4), request("b", 9, 12))
    play.end()
    failed = [event for event in play.loop.events if event.error is not None]
    assert failed and all(event.error in ("refused", "lost", "lost too") for event in failed)
    assert play.loop.scheduler.stats()["pages_used_0"] == 0


def test_build_that_shares_a_failed_prompt_is_seen(monkeypatch):
    monkeypatch.setattr(Roster, "withdraw", lambda self, leader: None)
    play = Play(config(max_num_seqs=3), refused_steps=frozenset({2}))
    play.submit(request("a", 31, 6, n=4))
    with pytest.raises(AssertionError, match="text is not"):
        play.end()


# ---- ends --------------------------------------------------------------------------------


def test_stop_late_from_the_text_counts_nothing_twice():
    play = Play(config())
    play.submit(request("a", 5, 30))
    play.steps(9)
    before = play.num_tokens("a")
    play.loop.finish("a", 0, before - 2)
    play.loop.finish("a", 0, before - 2)
    play.loop.finish("a", 7, 1)
    play.loop.finish("nobody", 0, 1)
    play.end()
    assert (play.num_tokens("a"), play.reason("a")) == (before, FinishReason.STOP)


@pytest.mark.parametrize("lookahead", [True, False])
def test_last_token_of_a_preempted_sequence_still_ends_it(lookahead):
    """Whatever the length of the younger one, it ends as it would alone, in the line or not."""
    for length in range(1, 12):
        play = Play(config(num_pages=(5,), max_num_seqs=2), lookahead=lookahead)
        play.submit(request("old", 2, 12), request("young", 3, length))
        play.end()
        assert play.num_tokens("young") == length


def test_logits_that_are_not_finite_end_their_sample_alone():
    play = Play(config(), nan_token=7)
    bad = Request(request_id="bad", prompt_ids=(3, 3, 3, 3, 7), sampling=SamplingParams(max_tokens=9, n=2))
    play.submit(bad, request("good", 9))
    play.end()
    assert [play.reason("bad", i) for i in (0, 1)] == [FinishReason.ERROR] * 2
    assert play.reason("good") is FinishReason.LENGTH and play.num_tokens("good") == 8


@pytest.mark.parametrize("value", [1.0, np.nan], ids=["finite", "nan"])
def test_hidden_states_that_are_not_finite_are_never_found(value):
    scheduler = Scheduler(config(embed_dim=2))
    scheduler.submit(request("vector", 8, 1, pooling="mean"))
    plan = scheduler.plan()
    assert plan is not None and plan.samples.tolist() == [True]
    zeros = np.zeros(1, np.int32)
    (event,) = scheduler.commit(plan, StepResult(zeros, zeros, pooled=np.full((1, 2), value, np.float32)))
    assert event.finish_reason is (FinishReason.ERROR if np.isnan(value) else FinishReason.STOP)
    assert scheduler.stats()["prefix_records"] == (0 if np.isnan(value) else 2)
    scheduler.check()


def test_device_lost_all_running_start_again():
    play = Play(config())
    play.submit(request("a", 9, 12), request("b", 21, 12, n=2))
    play.steps(5)
    play.loop._settle()
    play.loop.scheduler.preempt_all()
    play.loop.device.reset()
    play.end()
    assert [play.reason(*key) for key in play.events] == [FinishReason.LENGTH] * 3


def test_same_plan_twice_for_the_same_requests():
    def shapes_of() -> list[tuple]:
        play = Play(config(num_pages=(17,)))
        play.submit(*(request(f"r{i}", 3 + 5 * i, 9) for i in range(5)))
        plans = [play.loop.step() for _ in range(30)]
        return [
            (p.prefill, p.num_decode, p.slots.tolist(), p.tables.tolist()) for p in plans if p is not None
        ]

    assert shapes_of() == shapes_of()
