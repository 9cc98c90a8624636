"""What the load client itself takes: its processor time for each token of a server that computes nothing."""

import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from xjax.errors import EngineError
from xjax_server.bench.samples import percentiles, summarize
from xjax_server.bench.serving.client import Endpoint
from xjax_server.bench.serving.load import Load
from xjax_server.bench.serving.prompts import IdPrompts, Shape
from xjax_server.bench.serving.run import HttpSubject


@dataclass(frozen=True, kw_only=True)
class CostPlan:
    """How the client is driven: streams at once, tokens of each, and seconds between tokens of a stream."""

    streams: tuple[int, ...] = (1, 4, 8, 16, 64)
    output_len: int = 128
    seconds: float = 0.02
    repeats: int = 3


def measure_cost(plan: CostPlan) -> list[dict[str, Any]]:
    """For each number of streams: the client's processor seconds a token, and the TPOT that it saw."""
    command = [sys.executable, "-m", "xjax_server.bench.serving.null", str(plan.seconds)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
    assert child.stdout is not None
    try:
        port = child.stdout.readline().strip()
        if not port:
            raise EngineError("the server that computes nothing did not start")
        endpoint = Endpoint(url=f"http://127.0.0.1:{port}", model="null")
        subject = HttpSubject(
            endpoint, IdPrompts(Shape(output_len=plan.output_len), seed=0, vocab_size=30_000)
        )
        return [_measure(subject, streams, plan) for streams in plan.streams]
    finally:
        child.communicate()


def _measure(subject: HttpSubject, streams: int, plan: CostPlan) -> dict[str, Any]:
    load, costs, tpot = Load(streams), list[float](), list[float]()
    for repeat in range(plan.repeats):
        found = subject.measure(load, range(streams), f"cost {repeat}", lambda outcome: None)
        tokens = sum(outcome.output_tokens or 0 for outcome in found.outcomes)
        tpot += [outcome.tpot for outcome in found.outcomes if outcome.tpot is not None]
        if found.client_seconds is not None and tokens:
            costs.append(found.client_seconds / tokens)
    found = {"streams": streams, "seconds_per_token": summarize(costs), "tpot": percentiles(tpot)}
    return asdict(plan) | found
