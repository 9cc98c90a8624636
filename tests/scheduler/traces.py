"""Random traces of requests, aborts, stops and failures, and the laws that a run of one must keep.

A trace is a function of its seed. `run_trace` raises AssertionError at the first breach; with
`is_checked=False` only what users see is looked at, so that a broken build must show in the text.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tests.fakes import Answer, FakeLoop, FakeModel, answer_alone
from xjax.config import SchedulerConfig, StepShapes
from xjax.errors import CapacityError
from xjax.request import FinishReason, Request, SamplingParams, TokenEvent
from xjax.scheduler import Plan, Scheduler, StepResult
from xjax.scheduler.sequence import Status

EOS, STOP_ID = 0, 1
WINDOWS = ((None,), (None, 3), (5,), (None, 2, 7), (1, 4), (None, 1, 16), (None,), (None, 12))
SHAPES = (((2, 1), (4, 2)), ((8, 4),), ((4, 2), (16, 4)), ((16, 4), (64, 16)), ((1, 1),), ((32, 8),))


@dataclass
class Trace:
    """What happens when: steps are those of the loop."""

    config: SchedulerConfig
    model: FakeModel
    arrivals: dict[int, list[Request]]
    aborts: dict[int, list[str]]
    text_stops: dict[tuple[str, int], tuple[int, int]]  # sample -> (tokens kept, steps too late)
    hunted: set[str]  # aborted as soon as they are preempted
    refused_steps: frozenset[int] = frozenset()
    broken_steps: frozenset[int] = frozenset()
    broken_moves: float = 0.0  # share of saves and loads that fail
    move_delay: int = 0  # most steps until the mover reports
    lookahead: bool = True


@dataclass
class Run:
    """What a trace came to."""

    counts: Counter[str] = field(default_factory=Counter)
    events: dict[tuple[str, int], list[TokenEvent]] = field(default_factory=lambda: defaultdict(list))


def make_config(rng: np.random.Generator, **changes: object) -> SchedulerConfig:
    """A small engine: one to three page groups, tiny pools."""
    windows = WINDOWS[rng.integers(len(WINDOWS))]
    page_size = int(rng.choice([1, 4, 4, 16]))
    max_model_len = int(rng.integers(20, 64))
    prefill = SHAPES[rng.integers(len(SHAPES))]
    whole = -(-max_model_len // page_size)
    num_seqs = int(rng.integers(1, 7))
    shapes = StepShapes(
        decode_rows=tuple(sorted({1, min(3, num_seqs), num_seqs})),
        prefill=prefill,
        num_scored=tuple(min(tokens, 5) for tokens, _ in prefill),
        num_pairs=max_model_len + 12,
    )
    values = {
        "max_num_seqs": num_seqs,
        "max_model_len": max_model_len,
        "page_size": page_size,
        "num_pages": tuple(2 + int(whole * rng.choice([0.6, 1.0, 1.3, 2.0])) for _ in windows),
        "windows": windows,
        "shapes": shapes,
        "max_queue": int(rng.integers(3, 8)) if rng.random() < 0.3 else None,
        "has_recurrent": bool(rng.random() < 0.15),
        "prefix_cache": bool(rng.random() < 0.8),
        "prefix_cache_max_tokens": int(rng.integers(0, 80)) if rng.random() < 0.2 else None,
        "preemption_mode": str(rng.choice(["auto", "swap", "recompute"], p=[0.2, 0.6, 0.2])),
    }
    if rng.random() < 0.7:
        share = rng.choice([0.3, 1.0, 2.0])
        values["host_pages"] = tuple(1 + int(count * share) for count in values["num_pages"])
        values["host_states"] = int(share * 4)
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def make_sampling(rng: np.random.Generator, room: int) -> SamplingParams:
    """Parameters of every kind that the scheduler has to do with."""
    max_tokens = int(rng.choice([rng.integers(1, 10), rng.integers(10, 40)])) if rng.random() < 0.9 else None
    most = min(room, max_tokens or room)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=int(rng.integers(0, most + 1)) if rng.random() < 0.3 else 0,
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        top_k=int(rng.choice([-1, 0, 7])),
        repetition_penalty=1.3 if rng.random() < 0.25 else 1.0,
        presence_penalty=0.5 if rng.random() < 0.2 else 0.0,
        logit_bias={STOP_ID: 3.0, 9: -2.0} if rng.random() < 0.2 else {},
        seed=int(rng.integers(2**62)),
        n=int(rng.integers(2, 7)) if rng.random() < 0.3 else 1,
        stop_token_ids=(STOP_ID,) if rng.random() < 0.5 else (),
        ignore_eos=bool(rng.random() < 0.3),
        logprobs=int(rng.integers(0, 4)) if rng.random() < 0.3 else None,
        prompt_logprobs=int(rng.integers(0, 4)) if rng.random() < 0.2 else None,
    )


def make_trace(seed: int) -> Trace:
    """The trace of a seed."""
    rng = np.random.default_rng(seed)
    config = make_config(rng)
    longest = Scheduler(config).longest
    model = FakeModel(config.windows, has_state=config.has_recurrent)
    arrivals: dict[int, list[Request]] = defaultdict(list)
    aborts: dict[int, list[str]] = defaultdict(list)
    text_stops: dict[tuple[str, int], tuple[int, int]] = {}
    hunted: set[str] = set()
    is_burst = rng.random() < 0.3  # many short prompts at once that all grow
    has_priorities = rng.random() < 0.4
    stems = [rng.integers(2, model.nan_token, longest) for _ in range(2)]  # what prompts begin with
    for number in range(int(rng.integers(3, 12))):
        name = f"r{number}"
        step = int(rng.integers(0, 3 if is_burst else 30))
        kind = 0.5 if is_burst else rng.random()
        low, high = (1, longest) if kind < 0.3 else (1, max(longest // 4, 2))
        num_prompt = longest - 1 if kind > 0.97 else int(rng.integers(low, high))
        sampling = make_sampling(rng, longest - num_prompt)
        prompt = rng.integers(2, model.nan_token, num_prompt)
        if rng.random() < 0.6:
            same = int(rng.choice([num_prompt, rng.integers(0, num_prompt + 1)]))
            prompt[:same] = stems[rng.integers(2)][:same]
        request = Request(
            request_id=name,
            prompt_ids=tuple(int(i) for i in prompt),
            cache_salt=b"other" if rng.random() < 0.2 else b"",
            sampling=sampling,
            eos_ids=frozenset({EOS}),
            priority=int(rng.integers(0, 3)) if has_priorities else 0,
            arrival=float(step),
            max_queue_time=float(rng.integers(2, 25)) if rng.random() < 0.15 else None,
        )
        arrivals[step].append(request)
        if rng.random() < 0.25:
            aborts[step + int(rng.integers(0, 40))].append(name)
        elif rng.random() < 0.15:
            hunted.add(name)
        if rng.random() < 0.25:
            sample = int(rng.integers(sampling.n))
            text_stops[name, sample] = (int(rng.integers(1, 10)), int(rng.integers(0, 4)))
    failing = rng.random() < 0.3
    numbers = [frozenset(rng.integers(1, 60, 2).tolist()) if failing else frozenset() for _ in range(2)]
    return Trace(
        config, model, arrivals, aborts, text_stops, hunted, *numbers,
        broken_moves=0.3 if rng.random() < 0.3 else 0.0, move_delay=int(rng.choice([0, 0, 1, 5])),
        lookahead=bool(rng.random() < 0.8),
    )  # fmt: skip


def make_cache_trace(seed: int, **changes: object) -> Trace:
    """A trace in which many prompts begin alike and pages are few: conversations that go on, and bursts.

    changes   of the scheduler's config
    """
    rng = np.random.default_rng([seed, 1])
    windows = WINDOWS[rng.integers(len(WINDOWS))]
    page_size, max_model_len = int(rng.choice([1, 2, 4])), int(rng.integers(40, 90))
    whole = -(-max_model_len // page_size)
    num_pages = tuple(2 + int(whole * rng.choice([1.0, 1.2, 1.6])) for _ in windows)
    config = make_config(
        rng, page_size=page_size, max_model_len=max_model_len, max_num_seqs=int(rng.integers(3, 8)),
        windows=windows, num_pages=num_pages, max_queue=None, has_recurrent=False,
        prefix_cache=bool(rng.random() < 0.9),
        prefix_cache_max_tokens=int(rng.integers(8, 80)) if rng.random() < 0.15 else None,
        preemption_mode=str(rng.choice(["swap", "recompute"], p=[0.85, 0.15])),
        host_pages=tuple(1 + int(count * rng.choice([0.4, 1.0, 3.0])) for count in num_pages),
        least_awaited=int(rng.choice([1, 4])),
    )  # fmt: skip
    config = replace(config, **changes)  # type: ignore[arg-type]
    sizes = sorted({1, min(3, config.max_num_seqs), config.max_num_seqs})
    config = replace(
        config,
        shapes=replace(config.shapes, decode_rows=tuple(sizes), num_pairs=max_model_len + 12),
    )
    longest = Scheduler(config).longest
    model = FakeModel(config.windows, has_state=config.has_recurrent)
    arrivals: dict[int, list[Request]] = defaultdict(list)
    aborts: dict[int, list[str]] = defaultdict(list)
    hunted: set[str] = set()
    stems = [rng.integers(2, model.nan_token, longest) for _ in range(int(rng.integers(1, 4)))]
    last = int(rng.choice([2, 20, 60]))
    for number in range(int(rng.integers(6, 16))):
        step = int(rng.integers(0, last))
        num_prompt = int(rng.integers(page_size + 1, max(longest // 2, page_size + 2)))
        prompt = rng.integers(2, model.nan_token, num_prompt)
        same = int(rng.choice([num_prompt, num_prompt - 1, rng.integers(0, num_prompt + 1)]))
        prompt[:same] = stems[rng.integers(len(stems))][:same]
        sampling = make_sampling(rng, longest - num_prompt).replace(
            max_tokens=int(rng.integers(8, 40)), min_tokens=0, prompt_logprobs=None, ignore_eos=True,
            n=int(rng.integers(2, 4)) if rng.random() < 0.1 else 1, stop_token_ids=(),
        )  # fmt: skip
        request = Request(
            request_id=f"r{number}", prompt_ids=tuple(int(i) for i in prompt), sampling=sampling,
            eos_ids=frozenset({EOS}), arrival=float(step),
            cache_salt=b"other" if rng.random() < 0.1 else b"",
        )  # fmt: skip
        arrivals[step].append(request)
        if rng.random() < 0.1:
            aborts[step + int(rng.integers(0, 60))].append(request.request_id)
        elif rng.random() < 0.1:
            hunted.add(request.request_id)
    failing = rng.random() < 0.15
    numbers = [frozenset(rng.integers(1, 90, 2).tolist()) if failing else frozenset() for _ in range(2)]
    trace = Trace(
        config, model, arrivals, aborts, {}, hunted, *numbers,
        broken_moves=0.3 if rng.random() < 0.2 else 0.0, move_delay=int(rng.choice([0, 0, 1, 5])),
        lookahead=bool(rng.random() < 0.8),
    )  # fmt: skip
    names = [request.request_id for requests in arrivals.values() for request in requests]
    stopped = [name for name in names if rng.random() < 0.15]
    trace.text_stops.update(
        {(name, 0): (int(rng.integers(1, 20)), int(rng.integers(0, 4))) for name in stopped}
    )
    return trace


def run_trace(trace: Trace, *, is_checked: bool = True) -> Run:
    """Play a trace to its end and check every law."""
    loop = FakeLoop(
        trace.config,
        trace.model,
        lookahead=trace.lookahead,
        refused_steps=trace.refused_steps,
        broken_steps=trace.broken_steps,
        broken_moves=lambda serial: np.random.default_rng(serial).random() < trace.broken_moves,
        move_delay=lambda serial: serial % (trace.move_delay + 1),
        is_checked=is_checked,
    )
    run, accepted, due = Run(), {}, defaultdict(list)
    seen: Counter[tuple[str, int]] = Counter()

    def on_event(event: TokenEvent) -> None:
        key = (event.request_id, event.sample_id)
        run.events[key].append(event)
        kept, late = trace.text_stops.get(key, (0, 0))
        before, seen[key] = seen[key], seen[key] + len(event.token_ids)
        if kept and before < kept <= seen[key]:
            due[step + late].append((*key, kept))

    loop.on_event = on_event
    _count_ends_in_line(loop.scheduler, run)
    last = max([*trace.arrivals, *trace.aborts])
    step, work = 0, 0
    while step <= last or not loop.is_idle:
        for request in trace.arrivals.get(step, ()):
            try:
                loop.submit(request)
            except CapacityError:
                run.counts["refused_requests"] += 1
                continue
            accepted[request.request_id] = request
            tokens = len(request.prompt_ids) + _max_tokens(request, loop.scheduler.longest)
            work += request.sampling.n * tokens
        caught = [name for name in sorted(trace.hunted) if _state(loop.scheduler, name) == "preempted"]
        for name in (*trace.aborts.get(step, ()), *caught):
            run.counts[f"aborts_{_state(loop.scheduler, name)}"] += 1
            loop.abort(name)
        for name, sample_id, kept in due.pop(step, ()):
            run.counts["text_stops"] += 1
            loop.finish(name, sample_id, kept)
        oldest = loop.scheduler._roster.running[:1]
        plan = loop.step()
        for name in trace.aborts.get(step, ()):
            assert name not in loop.scheduler._roster.groups, "an abort left something behind"
        if is_checked:
            _check_oldest(plan, oldest, run)
            _check_pages_at_once(loop.scheduler)
        step += 1
        assert step < last + 50 + 6 * work, "somebody starves"
    run.counts["failed_copies"] += loop.num_failed_copies
    _check_end(loop, run)
    for request in accepted.values():
        for sample_id in range(request.sampling.n):
            answer = answer_alone(trace.model, request, sample_id, loop.scheduler.longest)
            check_events(request, run.events[request.request_id, sample_id], answer)
            run.counts[f"ends_{run.events[request.request_id, sample_id][-1].finish_reason}"] += 1
    return run


def _max_tokens(request: Request, longest: int) -> int:
    room = longest - len(request.prompt_ids)
    return min(request.sampling.max_tokens or room, room)


def _state(scheduler: Scheduler, name: str) -> str:
    """Where the first living sample of a request is."""
    group = scheduler._roster.groups.get(name)
    if group is None:
        return "gone"
    sequence = group.live[0]
    if sequence.status is Status.RUNNING:
        return "decoding" if sequence.is_decoding else "prefilling"
    return "preempted" if group.has_started else "queued"


def _count_ends_in_line(scheduler: Scheduler, run: Run) -> None:
    """Count sequences whose last token is read after they were preempted."""
    commit = scheduler.commit

    def counting(plan: Plan, result: StepResult) -> Iterable[TokenEvent]:
        waiting = [item for item in plan.sequences if item.status is Status.WAITING and item.in_flight]
        events = commit(plan, result)
        run.counts["ends_in_line"] += sum(item.status is Status.FINISHED for item in waiting)
        return events

    scheduler.commit = counting  # type: ignore[method-assign]


def _check_pages_at_once(scheduler: Scheduler) -> None:
    """No sequence holds more pages than admission reckons with."""
    book = scheduler._roster.book
    for sequence in scheduler._roster.running:
        for group, pages in enumerate(sequence.pages):
            assert len(pages) - sequence.num_passed[group] <= book.pages_at_once(
                group, len(pages) * book.page_size
            )


def _check_oldest(plan: Plan | None, oldest: list, run: Run) -> None:
    """The oldest that ran, or one before it, is in the plan, unless its last token is under way."""
    for sequence in oldest:
        if sequence.status is not Status.FINISHED and sequence.num_expected_output < sequence.max_tokens:
            in_plan = plan is not None and any(item.order <= sequence.order for item in plan.sequences)
            assert in_plan, "the oldest does not progress"
            run.counts["oldest_checked"] += 1


def _check_end(loop: FakeLoop, run: Run) -> None:
    stats = loop.scheduler.stats()
    assert (stats["running"], stats["waiting"], stats["queued_requests"]) == (0, 0, 0)
    for group in range(len(loop.scheduler.config.num_pages)):
        assert stats[f"pages_used_{group}"] == 0, "pages are lost"
    roster = loop.scheduler._roster
    counted = {**roster.counts, **roster.prefix.counts, **roster.swap.counts}
    run.counts.update({name: int(stats[name]) for name in counted})


def check_events(request: Request, events: list[TokenEvent], answer: Answer) -> None:
    """Events of one sample are in order, end once, and tell what the sample gives alone."""
    assert events, "a sample without an event"
    *before, final = events
    assert all(event.finish_reason is None for event in before), "something follows the end"
    assert final.finish_reason is not None, "a sample without an end"
    tokens = [token for event in events for token in event.token_ids]
    assert tokens == answer.token_ids[: len(tokens)], "the text is not that of the sequence alone"
    logprobs = [item for event in events for item in event.logprobs]
    assert logprobs == answer.logprobs[: len(tokens)]
    first = [event for event in events if event.token_ids][:1]
    for event in first:
        scores = list(event.prompt_logprobs) if event.prompt_logprobs is not None else None
        assert scores == answer.prompt_logprobs
    cached = [event.num_cached_tokens for event in events if event.token_ids]
    assert all(count is None for count in cached[1:])
    assert all(count is not None and 0 <= count < len(request.prompt_ids) for count in cached[:1])
    if final.finish_reason is FinishReason.LENGTH or final.token_ids or _is_nan(final):
        assert (tokens, final.finish_reason) == (answer.token_ids, answer.reason), (
            "it ended too early or too late"
        )
    if final.finish_reason is FinishReason.ERROR:
        assert final.error
        if "queue" in final.error:
            assert not tokens
    is_stop_id = final.finish_reason is FinishReason.STOP and bool(final.token_ids)
    assert final.stop_token_id == (tokens[-1] if is_stop_id else None)


def _is_nan(event: TokenEvent) -> bool:
    return event.error is not None and "finite" in event.error


def expect_breach(make: Callable[[int], Trace], num_traces: int) -> None:
    """Play traces until one breaks a law, with the scheduler's own checks off; fails where none does."""
    for seed in range(num_traces):
        try:
            run_trace(make(seed), is_checked=False)
        except (AssertionError, IndexError, KeyError, ValueError):
            return
    pytest.fail("nobody noticed")
