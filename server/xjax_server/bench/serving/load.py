"""Many requests: a number of them at once, or at random times of a given rate.

closed   `streams` requests are always under way; the next is sent when one ends
open     requests are due at the times of a Poisson process, whatever the server does;
         times count from there, so that a late start of ours is not to the server's advantage
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xjax_server.bench.serving.client import Client, Endpoint, Outcome

OnDone = Callable[[Outcome], None]


@dataclass(frozen=True)
class Load:
    """How requests come: at most `streams` at once (None: any number), `rate` a second (inf: at once)."""

    streams: int | None = None
    rate: float = math.inf

    @property
    def name(self) -> str:
        """For tables and for comparing results."""
        parts = [] if math.isinf(self.rate) else [f"{self.rate:g} requests/s"]
        if self.streams is not None:
            parts.append(f"{self.streams} stream{'' if self.streams == 1 else 's'}")
        return ", ".join(parts) or "all at once"


@dataclass(frozen=True)
class Repetition:
    """Outcomes of one run of a load, how long it took, and the processor time of this process."""

    outcomes: list[Outcome]
    seconds: float
    client_seconds: float | None = None


def arrivals(count: int, rate: float, source: random.Random) -> list[float]:
    """Seconds after the start at which requests are due; the first at once."""
    if math.isinf(rate):
        return [0.0] * count
    found, now = list[float](), 0.0
    for _ in range(count):
        found.append(now)
        now += source.expovariate(rate)
    return found


async def run_load(
    endpoint: Endpoint, bodies: Sequence[bytes], load: Load, *, source: random.Random, on_done: OnDone
) -> Repetition:
    """Send every body and wait for every answer."""
    outcomes: list[Outcome] = []

    def finish(outcome: Outcome) -> None:
        outcomes.append(outcome)
        on_done(outcome)

    async with Client(endpoint) as client:
        worked, began = time.process_time(), time.perf_counter()
        if math.isinf(load.rate):
            await _closed(client, bodies, load.streams or len(bodies), finish)
        else:
            dues = [began + due for due in arrivals(len(bodies), load.rate, source)]
            await _open(client, bodies, dues, load.streams or len(bodies), finish)
        seconds, work = time.perf_counter() - began, time.process_time() - worked
    return Repetition(outcomes, seconds, work)


async def _closed(client: Client, bodies: Sequence[bytes], streams: int, finish: OnDone) -> None:
    queue = iter(bodies)

    async def stream() -> None:
        for body in queue:
            finish(await client.stream(body, time.perf_counter()))

    await asyncio.gather(*(stream() for _ in range(min(streams, len(bodies)))))


async def _open(
    client: Client, bodies: Sequence[bytes], dues: Sequence[float], streams: int, finish: OnDone
) -> None:
    free = asyncio.Semaphore(streams)

    async def send(body: bytes, due: float) -> None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        async with free:
            finish(await client.stream(body, due))

    await asyncio.gather(*(send(body, due) for body, due in zip(bodies, dues, strict=True)))
