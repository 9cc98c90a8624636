"""Random requests in random schedules, each held to what the request gets alone on an idle engine.

A difference is excused only where the two best tokens of the reference were closer than
`MARGIN`, and only for greedy requests with plain logits; sampled text must be equal.
"""

import time
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from tests.engine.tiny import VOCAB, Answer, Client, Sample
from xjax.engine.loop import Engine
from xjax.request import FinishReason, SamplingParams
from xjax.scheduler import Plan

MARGIN = 1e-4
TOLERANCE = 1e-4  # of log-probabilities


@dataclass(frozen=True)
class Job:
    """A request, when it comes and when it is given up: after so many tokens of other requests."""

    prompt: tuple[int, ...]
    params: SamplingParams
    eos_ids: frozenset[int]
    delay: int
    abort_after: int | None = None


@dataclass
class Report:
    """What a schedule came to; `excused` lists positions within the margin."""

    counts: Counter[str] = field(default_factory=Counter)
    excused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def make_params(rng: np.random.Generator, kind: str, num_prompt: int) -> SamplingParams:
    """Sampling parameters of one kind, varied."""
    base = SamplingParams(
        temperature=0.0, max_tokens=int(rng.integers(2, 64)), seed=int(rng.integers(0, 2**62))
    )
    warm = replace(base, temperature=float(rng.uniform(0.6, 1.5)))
    if kind == "greedy":
        return base
    if kind == "sampled":
        return warm
    if kind == "truncated":
        return replace(warm, top_k=int(rng.integers(2, 30)), top_p=float(rng.uniform(0.5, 0.99)), min_p=0.01)
    if kind == "penalties":
        return replace(
            warm if rng.random() < 0.5 else base,
            repetition_penalty=float(rng.uniform(1.1, 1.8)),
            frequency_penalty=float(rng.uniform(0.1, 1.0)),
            presence_penalty=float(rng.uniform(-0.5, 1.0)),
        )
    if kind == "bias":
        biases = {int(i): float(rng.uniform(-5, 5)) for i in rng.integers(0, VOCAB, 8)}
        return replace(warm, logit_bias=biases)
    if kind == "min_tokens":
        return replace(warm, min_tokens=2, max_tokens=24, stop_token_ids=tuple(range(0, VOCAB, 3)))
    if kind == "stop_ids":
        return replace(warm, stop_token_ids=tuple(range(0, VOCAB, 11)))
    if kind == "logprobs":
        return replace(base, logprobs=int(rng.integers(0, 6)))
    if kind == "prompt_logprobs":
        return replace(base, prompt_logprobs=2, max_tokens=6)
    assert kind == "many"
    return replace(warm, n=3, max_tokens=int(rng.integers(4, 20)))


KINDS = (
    "greedy", "sampled", "truncated", "penalties", "bias",
    "min_tokens", "stop_ids", "logprobs", "prompt_logprobs", "many",
)  # fmt: skip


def make_jobs(seed: int, *, count: int, longest: int) -> list[Job]:
    """Requests that come in bursts and leave at random; every kind occurs."""
    rng = np.random.default_rng(seed)
    jobs = []
    for i in range(count):
        params = make_params(rng, KINDS[(seed + i) % len(KINDS)], longest)
        size = int(rng.integers(1, 24)) if rng.random() < 0.5 else int(rng.integers(24, 90))
        size = min(size, longest - (params.max_tokens or 1) - 1)
        jobs.append(
            Job(
                prompt=tuple(rng.integers(0, VOCAB, size).tolist()),
                params=params,
                eos_ids=frozenset({int(rng.integers(0, VOCAB))}),
                delay=int(rng.integers(0, 12)) * int(rng.random() < 0.6),
                abort_after=int(rng.integers(0, 40)) if rng.random() < 0.2 else None,
            )
        )
    return jobs


def alone(engine: Engine, jobs: list[Job]) -> list[list[Sample]]:
    """What each request gets when nothing else runs."""
    client = Client(engine)
    return [client.start(list(job.prompt), job.params, eos_ids=job.eos_ids).wait() for job in jobs]


def run_schedule(engine: Engine, jobs: list[Job], references: list[list[Sample]]) -> Report:
    """Run the requests together and compare."""
    report = Report()
    before = engine.stats()
    answers = Script(engine, jobs, report).run()
    for i, (answer, samples) in enumerate(zip(answers, references, strict=True)):
        for got, reference in zip(answer.wait(), samples, strict=True):
            _compare(engine, jobs[i], f"request {i}", got, reference, report)
    after = engine.stats()
    for name in ("preemptions", "chunk_splits", "shared_tokens", "stalls"):
        report.counts[name] += int(after[name] - before[name])
    return report


class Script:
    """Submits and aborts on the engine's own thread, before the plan of a step: no thread's pace matters.

    So two runs of the same jobs are the same, step for step.
    """

    def __init__(self, engine: Engine, jobs: list[Job], report: Report) -> None:
        self._engine, self._jobs, self._report = engine, list(jobs), report
        self._client = Client(engine)
        self._client._serial = 10**6
        self._answers: list[Answer] = []
        self._aborts: list[tuple[int, str]] = []
        self._last = _progress(engine)

    def run(self) -> list[Answer]:
        """Play all of it; the answers in the order of the jobs."""
        scheduler = self._engine._scheduler
        plan = scheduler.plan

        def planned(now: float) -> Plan | None:
            self._act()
            return plan(now)

        scheduler.plan, scheduler.observe = planned, lambda plan, seconds: None
        try:
            while self._jobs or not all(answer.is_done for answer in self._answers):
                if not scheduler.has_work and not self._engine._commands and not self._engine._num_entering:
                    self._begin()  # nobody plans while nothing is there
                time.sleep(0.002)
        finally:
            del scheduler.plan, scheduler.observe
        return self._answers

    def _begin(self) -> None:
        if self._jobs and all(answer.is_done for answer in self._answers):
            self._submit(self._jobs.pop(0))

    def _act(self) -> None:
        done = _progress(self._engine)
        while self._jobs and self._last + self._jobs[0].delay <= done:
            self._submit(self._jobs.pop(0))
        for entry in [entry for entry in self._aborts if entry[0] <= done]:
            self._engine.abort(entry[1])
            self._report.counts["aborts"] += 1
            self._aborts.remove(entry)

    def _submit(self, job: Job) -> None:
        answer = self._client.start(list(job.prompt), job.params, eos_ids=job.eos_ids)
        self._last = _progress(self._engine)
        self._answers.append(answer)
        if job.abort_after is not None:
            self._aborts.append((self._last + job.abort_after, answer.request_id))


def _progress(engine: Engine) -> int:
    stats = engine._scheduler.stats()
    return int(stats["decode_tokens"] + stats["prefill_tokens"])


def _compare(engine: Engine, job: Job, name: str, got: Sample, reference: Sample, report: Report) -> None:
    ids, expected = got.token_ids, reference.token_ids
    report.counts["tokens"] += len(ids)
    if got.reason is FinishReason.ABORT:
        expected = expected[: len(ids)]
        report.counts["cut"] += 1
    elif got.reason is FinishReason.ERROR:
        report.wrong.append(f"{name}: {got.error}")
        return
    if ids != expected:
        at = next((i for i, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1]), None)
        gap = _gap(engine, job, at) if at is not None else None
        if gap is not None and gap < MARGIN:
            report.excused.append(f"{name} token {at}: the best two are {gap:.2g} apart")
        else:
            report.wrong.append(f"{name}: {ids} and alone {expected}, differing at {at}, margin {gap}")
        return
    if got.reason is not FinishReason.ABORT and got.reason is not reference.reason:
        report.wrong.append(f"{name}: ended by {got.reason}, alone by {reference.reason}")
    report.wrong += [f"{name}: {line}" for line in _score_differences(got, reference)]
    report.counts["scores"] += sum(len(event.logprobs) for event in got.events)


def _gap(engine: Engine, job: Job, place: int) -> float | None:
    """How far apart the best two were alone; None where that decides nothing."""
    if job.params.temperature or not job.params.replace(logprobs=None, prompt_logprobs=None).is_plain:
        return None
    params = job.params.replace(logprobs=2)
    scores = _scores(Client(engine).run(list(job.prompt), params, eos_ids=job.eos_ids))
    if place >= len(scores):  # a broken build may write another answer each time
        return None
    top = scores[place].top
    return top[0][1] - top[1][1]


def _scores(sample: Sample) -> list:
    return [item for event in sample.events for item in event.logprobs]


def _score_differences(got: Sample, reference: Sample) -> list[str]:
    pairs = list(zip(_scores(got), _scores(reference), strict=False))
    made = [[event for event in sample.events if event.token_ids] for sample in (got, reference)]
    for event, other in zip(*made, strict=False):
        if (event.prompt_logprobs is None) != (other.prompt_logprobs is None):
            return ["prompt log-probabilities are missing"]
        pairs += list(zip(event.prompt_logprobs or (), other.prompt_logprobs or (), strict=True))
    bad = []
    for item, expected in pairs:
        if item is None or expected is None:
            bad += ["a log-probability is missing"] * ((item is None) != (expected is None))
            continue
        values = [item.logprob, *(value for _, value in item.top)]
        others = [expected.logprob, *(value for _, value in expected.top)]
        if np.abs(np.subtract(values, others)).max() > TOLERANCE:
            bad.append(f"log-probabilities {values} and alone {others}")
    return bad
