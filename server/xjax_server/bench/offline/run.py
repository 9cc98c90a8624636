"""One process at work without sockets: prefill, decode, start and memory, peers in the same run.

    for each repetition: for each case: ask every engine in turn, with prompts never used before

The result is plain JSON (`None` where there is no sample); `report` prints it.
"""

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xjax.errors import XjaxError
from xjax_server.bench import machine
from xjax_server.bench.offline import torch_peer, worker
from xjax_server.bench.offline.ours import DECODE_ROOM
from xjax_server.bench.offline.startup import Start, generate_command, time_start
from xjax_server.bench.offline.worker import Worker
from xjax_server.bench.samples import divide, median, summarize

OURS, STEP = "xjax", "xjax step alone"
PEERS: Mapping[str, Callable[[], str | None]] = {
    "transformers": torch_peer.missing,
    "llama.cpp": lambda: "no adapter yet: it comes with the quantized kernels",
}
DECODE_PROMPT = 64
CHECK_TOKENS = 8
Say = Callable[[str], None]
Extra = Callable[[str], Mapping[str, Sequence[str]]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    rows       of the decode cases            steps     timed in each repetition of one
    prefill    tokens of the prefill case     starts    warm starts; 0: none, cold ones neither
    """

    rows: tuple[int, ...] = (1, 8, 16)
    prefill: int = 512
    steps: int = 12
    threads: int = 2
    repeats: int = 5
    starts: int = 3
    peers: tuple[str, ...] = ()

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest sequence of any case."""
        return max(self.prefill + 1, DECODE_PROMPT + DECODE_ROOM)


@dataclass(frozen=True)
class Case:
    """One thing to time: `rows` sequences; prefill of `tokens`, or decode where that is None."""

    name: str
    rows: int
    tokens: int | None = None


def cases_of(plan: Plan) -> list[Case]:
    """Prefill, then decode at each number of rows."""
    decode = [Case(f"decode {rows}", rows) for rows in plan.rows]
    return [Case(f"prefill {plan.prefill}", 1, plan.prefill), *decode]


def new_prompt(length: int, vocab_size: int, source: random.Random) -> list[int]:
    """Token ids that no cache has seen; the first few ids, often special tokens, are left out."""
    low = min(300, vocab_size // 2)
    return [source.randrange(low, vocab_size) for _ in range(length)]


def ask(subject: Worker, case: Case, prompts: Sequence[Sequence[int]], steps: int) -> dict[str, Any]:
    """Run a case once on one engine."""
    if case.tokens is not None:
        return subject.ask("prefill", prompt=prompts[0])
    return subject.ask("decode", prompts=prompts, num_tokens=steps)


class Bench:
    """The engines of one model, and what was measured so far."""

    def __init__(self, model: str, plan: Plan, extra: Mapping[str, Sequence[str]], say: Say) -> None:
        self.model, self.plan, self._say = model, plan, say
        self.skipped: dict[str, str] = {}
        self._source = random.Random(time.time_ns())
        self._samples: dict[str, dict[str, list[float]]] = {}
        self._host: dict[str, list[float]] = {}
        commands: dict[str, Sequence[str]] = {OURS: self._command(OURS), **extra}
        for name in plan.peers:
            reason = PEERS[name]() if name in PEERS else "not known"
            if reason is None:
                commands[name] = self._command(name)
            else:
                self.skipped[name] = reason
        self._workers: dict[str, Worker] = {}
        for name, command in commands.items():
            say(f"starting {name}")
            self._workers[name] = Worker(name, command)
        self.sizes = self._workers[OURS].ask("describe")

    def _command(self, name: str) -> list[str]:
        plan = self.plan
        rows, tokens = max(plan.rows), plan.most_tokens
        return worker.command(name, self.model, threads=plan.threads, rows=rows, tokens=tokens)

    def prompts(self, case: Case) -> list[list[int]]:
        """Fresh prompts for a case."""
        length = DECODE_PROMPT if case.tokens is None else case.tokens
        return [new_prompt(length, self.sizes["vocab_size"], self._source) for _ in range(case.rows)]

    def check(self) -> dict[str, Any]:
        """Compare every peer's greedy ids with ours on a fresh prompt; one that cannot start is skipped."""
        prompt = self.prompts(Case("check", 1))[0]
        ids: dict[str, list[int]] = {}
        for name in [OURS, *[name for name in self._workers if name in PEERS]]:
            try:
                ids[name] = self._workers[name].ask("check", prompt=prompt, num_tokens=CHECK_TOKENS)["ids"]
            except XjaxError as error:
                if name == OURS:
                    raise
                self.skipped[name] = str(error)
                self._workers.pop(name).close()
        return {name: found == ids[OURS] for name, found in ids.items() if name != OURS}

    def warm(self) -> None:
        """Run cases once and forget them: programs are compiled here, small cases first.

        Peers compile nothing: for them one row is enough to touch every weight.
        """
        for case in sorted(cases_of(self.plan), key=lambda case: case.rows):
            for name, subject in self._workers.items():
                if name in PEERS and case.rows > 1:
                    continue
                self._say(f"warming {name}: {case.name}")
                ask(subject, case, self.prompts(case), self.plan.steps)

    def round(self, probe: machine.Probe) -> None:
        """Take one sample of every case from every engine, and of the machine."""
        for case in cases_of(self.plan):
            probe.measure()
            prompts = self.prompts(case)
            for name, subject in self._workers.items():
                reply = ask(subject, case, prompts, self.plan.steps)
                self._samples.setdefault(case.name, {}).setdefault(name, []).extend(reply["seconds"])
                if "host_seconds" in reply:
                    self._host.setdefault(case.name, []).append(reply["host_seconds"])

    def result(self, probe: machine.Probe) -> dict[str, Any]:
        """Everything measured, summarized."""
        found: dict[str, Any] = {}
        for case in cases_of(self.plan):
            samples = self._samples.get(case.name, {})
            seconds = {name: summarize(samples.get(name, [])) for name in self._workers}
            floor = probe.floor(self._work(case))
            ours, tokens = median(seconds[OURS]), case.tokens or case.rows
            found[case.name] = {
                "rows": case.rows,
                "seconds": seconds,
                "tokens_per_second": {name: divide(tokens, median(time)) for name, time in seconds.items()},
                "floor_seconds": floor,
                "times_the_floor": {name: divide(median(time), floor) for name, time in seconds.items()},
                "ratio": {name: divide(median(seconds[name]), ours) for name in seconds if name in PEERS},
                "host_seconds": summarize(self._host.get(case.name, [])),
            }
        return found

    def _work(self, case: Case) -> machine.Work:
        sizes, count = self.sizes, case.tokens or case.rows
        weights, head = sizes["read_weights"], sizes["head_weights"]
        kv_tokens = case.rows * DECODE_PROMPT if case.tokens is None else case.tokens
        # The head scores one position of a prompt, and every row of a decode.
        products = (weights - head) * count + head * case.rows
        return machine.Work(4 * weights + sizes["kv_bytes_per_token"] * kv_tokens, 2 * products)

    def close(self) -> None:
        """End every engine."""
        for subject in self._workers.values():
            subject.close()


def measure_starts(model: str, plan: Plan, say: Say) -> dict[str, Any] | None:
    """Start `xjax generate` once cold, then warm; None when the plan asks for none."""
    if not plan.starts:
        return None
    starts: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="xjax-bench-") as home:
        for number in range(plan.starts + 1):
            say(f"start {number} of {plan.starts}" if number else "cold start")
            prompt = f"Why is the sky blue? ({random.randrange(10**9)})"
            command = generate_command(model, prompt, threads=plan.threads, num_tokens=16)
            starts.append(time_start(command, Path(home)))
    cold, warm = starts[:1], starts[1:]
    return {
        "cold_seconds": summarize([start.first_seconds for start in cold]),
        "warm_seconds": summarize([start.first_seconds for start in warm]),
        "cold_peak_bytes": summarize([start.peak_bytes for start in cold]),
        "warm_peak_bytes": summarize([start.peak_bytes for start in warm]),
    }


def run_model(
    model: str, plan: Plan, *, extra: Mapping[str, Sequence[str]], probe: machine.Probe, say: Say
) -> dict[str, Any]:
    """Measure one model file. `extra`: more subjects by name, with the commands that start them."""
    bench = Bench(model, plan, extra, say)
    try:
        agrees = bench.check()
        bench.warm()
        for number in range(plan.repeats):
            say(f"round {number + 1} of {plan.repeats}")
            bench.round(probe)
        cases = bench.result(probe)
    finally:
        bench.close()
    return {
        "model": Path(model).name,
        "sizes": bench.sizes,
        "agrees": agrees,
        "skipped": bench.skipped,
        "cases": cases,
        "start": measure_starts(model, plan, say),
    }


def run(models: Sequence[str], plan: Plan, *, extra: Extra, say: Say) -> dict[str, Any]:
    """Measure some model files. `extra`: for a model, more subjects by name with their commands."""
    described, probe, found = machine.describe(), machine.Probe(plan.threads), list[dict[str, Any]]()
    try:
        for model in models:
            found.append(run_model(model, plan, extra=extra(model), probe=probe, say=say))
    finally:
        probe.close()
    return {
        "kind": "offline",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": described,
        "flags": vars(plan) | {"dtype": "float32", "decode_prompt": DECODE_PROMPT},
        "rates": {"read_bytes_per_second": summarize(probe.reads), "gemm_flops": summarize(probe.gemms)},
        "models": found,
        "host": None,
    }
