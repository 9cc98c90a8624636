"""Servers in turn: for each repetition, for each load, every server gets the same requests.

The requests of a repetition are new to every cache. Those that warm a server up are not counted.
The result is plain JSON (`None` where there is no sample); `report` prints it.
"""

import asyncio
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from xjax.errors import RequestError
from xjax_server.bench import machine
from xjax_server.bench.offline.worker import Worker
from xjax_server.bench.serving.client import Client, Endpoint, Outcome
from xjax_server.bench.serving.load import Load, Repetition, run_load
from xjax_server.bench.serving.measure import Slo, figures
from xjax_server.bench.serving.prompts import IdPrompts, Prompts, Shape

PER_STREAM, NO_STREAMS = 4, 32  # requests of a repetition, where their number is not given
WARM_TOKENS = 8
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    num_prompts   of each repetition; None: four for each stream
    warmup        requests before the first repetition of a load; None: one for each stream
    nonce         what makes the prompts new; None: drawn, and told in the result
    """

    loads: tuple[Load, ...]
    shape: Shape
    num_prompts: int | None = None
    repeats: int = 1
    warmup: int | None = None
    slo: Slo = Slo()
    seed: int = 0
    nonce: str | None = None
    has_fixed_length: bool = True

    def count(self, load: Load) -> int:
        """Requests of one repetition."""
        return self.num_prompts or (PER_STREAM * load.streams if load.streams else NO_STREAMS)

    @property
    def most_streams(self) -> int:
        """Requests that may be under way at once."""
        return max(load.streams or self.count(load) for load in self.loads)

    def flags(self) -> dict[str, Any]:
        """What was chosen, for the head of a result; infinite rates as None, which JSON has."""
        loads = [load.name for load in self.loads]
        slo = {f"slo_{name}": value for name, value in vars(self.slo).items() if value is not None}
        return {
            **asdict(self.shape), "loads": loads, "num_prompts": self.num_prompts, "repeats": self.repeats,
            "seed": self.seed, **slo,
        }  # fmt: skip


class Subject(Protocol):
    """Something that answers requests."""

    def prepare(self) -> None:
        """Get ready; raises XjaxError where it does not answer."""
        ...

    def measure(
        self, load: Load, numbers: range, nonce: str, on_done: Callable[[Outcome], None]
    ) -> Repetition:
        """Send the requests with these numbers."""
        ...

    def warm(self, load: Load, count: int) -> None:
        """Send a few that nobody counts."""
        ...


class HttpSubject:
    """A server."""

    def __init__(self, endpoint: Endpoint, prompts: Prompts, *, seed: int = 0) -> None:
        self.endpoint, self._prompts, self._seed = endpoint, prompts, seed

    def prepare(self) -> None:
        """Fit the prompts to this server."""
        asyncio.run(self._fit())

    async def _fit(self) -> None:
        async with Client(self.endpoint) as client:

            async def count(fields: Mapping[str, Any]) -> int:
                reply = await client.ask({**fields, "max_tokens": 1})
                usage: dict[str, int] = reply.get("usage") or {}
                if "prompt_tokens" not in usage:
                    raise RequestError(
                        f"{self.endpoint.url} tells no usage: the length of prompts is not known"
                    )
                return usage["prompt_tokens"]

            await self._prompts.fit(count)

    def measure(
        self, load: Load, numbers: range, nonce: str, on_done: Callable[[Outcome], None]
    ) -> Repetition:
        """Send the requests with these numbers."""
        bodies = [self.endpoint.body(self._prompts.fields(nonce, number)) for number in numbers]
        return self._run(bodies, load, nonce, on_done)

    def warm(self, load: Load, count: int) -> None:
        """Send a few short ones; raises RequestError when all of them fail."""
        fields = [self._prompts.fields(secrets.token_hex(4), number) for number in range(count)]
        bodies = [
            self.endpoint.body({**item, "max_tokens": min(WARM_TOKENS, item["max_tokens"])})
            for item in fields
        ]
        found = self._run(bodies, Load(load.streams), "warm", lambda outcome: None).outcomes
        if found and all(outcome.error is not None for outcome in found):
            raise RequestError(f"{self.endpoint.target} answers no request: {found[0].error}")

    def _run(
        self, bodies: Sequence[bytes], load: Load, nonce: str, on_done: Callable[[Outcome], None]
    ) -> Repetition:
        source = random.Random(f"{self._seed} {nonce} arrivals")
        return asyncio.run(run_load(self.endpoint, bodies, load, source=source, on_done=on_done))

    def sample(self, nonce: str, num_tokens: int) -> str:
        """Greedy text after a prompt, to see that servers compute the same."""

        async def ask() -> dict[str, Any]:
            async with Client(self.endpoint) as client:
                return await client.ask({**self._prompts.fields(nonce, 0), "max_tokens": num_tokens})

        choice = asyncio.run(ask())["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]


class EngineSubject:
    """Our engine in a child process without a server, given the same token ids by as many streams."""

    def __init__(self, worker: Worker, prompts: IdPrompts) -> None:
        self._worker, self._prompts = worker, prompts

    def prepare(self) -> None:
        """Load the model."""
        self._worker.ask("describe")

    def measure(
        self, load: Load, numbers: range, nonce: str, on_done: Callable[[Outcome], None]
    ) -> Repetition:
        """Run the requests with these numbers; arrival times are not kept: only closed loads are run."""
        prompts = [self._prompts.ids(nonce, number) for number in numbers]
        return self._run(prompts, load, self._prompts.shape.output_len, on_done)

    def warm(self, load: Load, count: int) -> None:
        """Run a few short ones."""
        nonce = secrets.token_hex(4)
        prompts = [self._prompts.ids(nonce, number) for number in range(count)]
        self._run(prompts, load, min(WARM_TOKENS, self._prompts.shape.output_len), lambda outcome: None)

    def _run(
        self, prompts: list[list[int]], load: Load, num_tokens: int, on_done: Callable[[Outcome], None]
    ) -> Repetition:
        reply = self._worker.ask(
            "serve", prompts=prompts, num_tokens=num_tokens, streams=load.streams or len(prompts)
        )
        outcomes = [
            Outcome(
                due, first, last, last, gaps,
                prompt_tokens=len(prompt), output_tokens=count, finish_reason="length",
            )
            for prompt, (due, first, last, count, gaps) in zip(prompts, reply["rows"], strict=True)
        ]  # fmt: skip
        for outcome in outcomes:
            on_done(outcome)
        return Repetition(outcomes, reply["seconds"])


def run_cases(
    subjects: Mapping[str, Subject],
    plan: Plan,
    progress: Progress,
    settle: Callable[[], None] = lambda: None,
) -> tuple[str, list[dict[str, Any]]]:
    """Measure every load on every subject; the nonce, and figures by load and subject.

    settle   called between warming up and measuring
    """
    nonce = plan.nonce or secrets.token_hex(4)
    runs: dict[tuple[Load, str], list[Repetition]] = {}
    for load in plan.loads:
        for name, subject in subjects.items():
            progress(f"warming {name}: {load.name}", 0, None)
            subject.warm(load, plan.warmup if plan.warmup is not None else load.streams or PER_STREAM)
    settle()
    for repeat in range(plan.repeats):
        for load in plan.loads:
            count = plan.count(load)
            for name, subject in subjects.items():
                tally = _Tally(progress, f"{name}: {load.name}, {repeat + 1} of {plan.repeats}", count)
                # Each load and repetition has prompts of its own, the same ones for every subject.
                key = f"{nonce} {load.name} {repeat}"
                runs.setdefault((load, name), []).append(subject.measure(load, range(count), key, tally.add))
    length = plan.shape.output_len if plan.has_fixed_length else None
    cases = [
        {
            "load": load.name,
            "streams": load.streams,
            "rate": None if load.rate == float("inf") else load.rate,
            "subjects": {
                name: figures(load, runs.get((load, name), []), plan.slo, output_len=length)
                for name in subjects
            },
        }
        for load in plan.loads
    ]
    return nonce, cases


class _Tally:
    """Tells how many requests have ended, and how many of them badly."""

    def __init__(self, progress: Progress, label: str, count: int) -> None:
        self._progress, self._label, self._count = progress, label, count
        self._done = 0
        progress(label, 0, count)

    def add(self, outcome: Outcome) -> None:
        """One more has ended."""
        self._done += 1
        self._progress(self._label, self._done, self._count)


def result(
    plan: Plan, models: list[dict[str, Any]], described: Mapping[str, Any], **flags: Any
) -> dict[str, Any]:
    """A whole result as it is saved; `described` is the machine before the run."""
    return {
        "kind": "serving",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(described),
        "flags": plan.flags() | flags,
        "models": models,
    }


def run_url(endpoint: Endpoint, prompts: Prompts, plan: Plan, progress: Progress) -> dict[str, Any]:
    """Measure one running server."""
    described, subject = machine.describe(), HttpSubject(endpoint, prompts, seed=plan.seed)
    subject.prepare()
    nonce, cases = run_cases({"server": subject}, plan, progress)
    found = {
        "model": endpoint.model, "nonce": nonce, "subjects": {"server": {"url": endpoint.url}},
        "agrees": {}, "skipped": {}, "cases": cases,
    }  # fmt: skip
    kind = "chat" if endpoint.is_chat else "completions"
    return result(plan, [found], described, endpoint=kind, prompts=type(prompts).__name__)


def with_model(endpoint: Endpoint) -> Endpoint:
    """The endpoint with the first model that its server lists, where none was named. Raises RequestError."""
    if endpoint.model:
        return endpoint

    async def ask() -> list[dict[str, Any]]:
        async with Client(endpoint) as client:
            return await client.models()

    listed = asyncio.run(ask())
    if not listed:
        raise RequestError(f"{endpoint.url} lists no model; name one with --model")
    return replace(endpoint, model=str(listed[0]["id"]))
