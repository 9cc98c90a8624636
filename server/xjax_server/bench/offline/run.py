"""One process at work without sockets: prefill, decode, start and memory, peers in the same run.

    for each case: let peers that have settings try them
    for each repetition: for each case: ask every engine in turn, with prompts never used before

The result is plain JSON (`None` where there is no sample); `report` prints it.
"""

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xjax.errors import XjaxError
from xjax_server.bench import machine
from xjax_server.bench.offline import worker
from xjax_server.bench.offline.cases import Case, Plan, cases_of, new_prompt
from xjax_server.bench.offline.peers import MISSING, TUNED
from xjax_server.bench.offline.startup import Start, generate_command, time_start
from xjax_server.bench.offline.worker import Worker
from xjax_server.bench.samples import divide, median, summarize

OURS, STEP = "xjax", "xjax step alone"
CHECK_TOKENS = 8
_FLOAT = 4.0  # bytes of a number where an engine says nothing else
Say = Callable[[str], None]
Extra = Callable[[str], Mapping[str, Sequence[str]]]


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
        self.tuned: dict[str, dict[str, Any]] = {}
        self._source = random.Random(time.time_ns())
        self._samples: dict[str, dict[str, list[float]]] = {}
        self._host: dict[str, list[float]] = {}
        self._workers: dict[str, Worker] = {}
        commands = {**self._our_commands(), **extra, **self._peer_commands()}
        # Those whose tokens and times are set against ours.
        self._compared = [name for name in commands if name != OURS and name not in extra]
        try:
            for name, command in commands.items():
                say(f"starting {name}")
                self._workers[name] = Worker(name, command)
            self.told = {OURS: self._workers[OURS].ask("describe")}
        except BaseException:
            self.close()
            raise

    def _our_commands(self) -> dict[str, Sequence[str]]:
        """The first of the kernels is what others are set against, under the plain name."""
        plan, found = self.plan, dict[str, Sequence[str]]()
        for kernels in plan.kernels:
            found[f"{OURS} {kernels}" if found else OURS] = worker.command(
                OURS, self.model, threads=plan.threads, rows=max(plan.rows, default=1),
                tokens=plan.most_tokens, pages=plan.num_pages, kernels=kernels,
            )  # fmt: skip
        return found

    def _peer_commands(self) -> dict[str, Sequence[str]]:
        found: dict[str, Sequence[str]] = {}
        for name, path in self.plan.peers.items():
            reason = MISSING[name](path) if name in MISSING else "not known"
            if reason is None:
                where = {"path": path} if path else {}
                found[name] = worker.command(name, self.model, threads=self.plan.threads, **where)
            else:
                self.skipped[name] = reason
        return found

    def prompts(self, case: Case) -> list[list[int]]:
        """Fresh prompts for a case."""
        length = self.plan.context if case.tokens is None else case.tokens
        return [new_prompt(length, self.told[OURS]["vocab_size"], self._source) for _ in range(case.rows)]

    def check(self) -> dict[str, Any]:
        """Compare greedy ids with ours on a fresh prompt; a peer that cannot start is skipped.

        Who can give no ids is left out of the answer.
        """
        prompt = self.prompts(Case("check", 1))[0]
        ids: dict[str, list[int] | None] = {}
        for name in [OURS, *self._compared]:
            try:
                ids[name] = self._workers[name].ask("check", prompt=prompt, num_tokens=CHECK_TOKENS)["ids"]
                self.told[name] = self.told.get(name) or self._workers[name].ask("describe")
            except XjaxError as error:
                if name not in self.plan.peers:
                    raise
                self._skip(name, error)
        return {name: found == ids[OURS] for name, found in ids.items() if name != OURS and found is not None}

    def _skip(self, name: str, error: XjaxError) -> None:
        self.skipped[name] = str(error)
        self._compared.remove(name)
        self._workers.pop(name).close()

    def warm(self) -> None:
        """Run cases once and forget them: programs are compiled here, small cases first.

        Peers compile nothing: for them one row is enough to touch every weight.
        """
        for case in sorted(cases_of(self.plan), key=lambda case: case.rows):
            for name, subject in self._workers.items():
                if name in TUNED or (name in self.plan.peers and case.rows > 1):
                    continue
                self._say(f"warming {name}: {case.name}")
                ask(subject, case, self.prompts(case), self.plan.steps)

    def tune(self) -> None:
        """Let peers that have settings find the best for each case; who cannot run one is skipped."""
        for name in [name for name in self._compared if name in TUNED]:
            try:
                for case in cases_of(self.plan):
                    self._say(f"trying settings of {name}: {case.name}")
                    reply = self._workers[name].ask(
                        "tune", rows=case.rows, tokens=case.tokens or 0, context=self.plan.context,
                        num_tokens=self.plan.steps,
                    )  # fmt: skip
                    self.tuned.setdefault(name, {})[case.name] = reply
            except XjaxError as error:
                self._skip(name, error)

    def round(self, probe: machine.Probe) -> None:
        """Take one sample of every case from every engine, and of the machine."""
        for case in cases_of(self.plan):
            probe.measure()
            prompts = self.prompts(case)
            for name, subject in self._workers.items():
                reply = ask(subject, case, prompts, self.plan.steps)
                self._samples.setdefault(case.name, {}).setdefault(name, []).extend(reply["seconds"])
                if name == OURS and "host_seconds" in reply:
                    self._host.setdefault(case.name, []).append(reply["host_seconds"])

    def result(self, probe: machine.Probe) -> dict[str, Any]:
        """Everything measured, summarized."""
        found: dict[str, Any] = {}
        for case in cases_of(self.plan):
            samples = self._samples.get(case.name, {})
            seconds = {name: summarize(samples.get(name, [])) for name in self._workers}
            works = {name: self._work(case, name) for name in seconds}
            floors = {name: probe.floor(work) for name, work in works.items()}
            reads = {name: probe.floor(machine.Work(work.read_bytes, 0)) for name, work in works.items()}
            ours, tokens = median(seconds[OURS]), case.tokens or case.rows
            found[case.name] = {
                "rows": case.rows,
                "seconds": seconds,
                "tokens_per_second": {name: divide(tokens, median(time)) for name, time in seconds.items()},
                "read_bytes": {name: work.read_bytes for name, work in works.items()},
                "floor_seconds": floors,
                "times_the_floor": {name: divide(median(seconds[name]), floors[name]) for name in seconds},
                "times_reading": {name: divide(median(seconds[name]), reads[name]) for name in seconds},
                "ratio": {name: divide(median(seconds[name]), ours) for name in self._compared},
                "host_seconds": summarize(self._host.get(case.name, [])),
            }
        return found

    def _work(self, case: Case, name: str) -> machine.Work:
        """What an engine has to read, by what it says of its own weights, and to compute."""
        sizes, count = self.told[OURS], case.tokens or case.rows
        own = sizes if name == STEP else self.told.get(name, {})
        weights, head = sizes["read_weights"], sizes["head_weights"]
        length = self.plan.context if case.tokens is None else case.tokens
        kv = sum(numbers * min(length, window or length) for numbers, window in sizes["kv"]) * case.rows
        # The head scores one position of a prompt, and every row of a decode.
        products = (weights - head) * count + head * case.rows
        reads = own.get("read_bytes") or _FLOAT * weights
        return machine.Work(reads + own.get("kv_width", _FLOAT) * kv, 2 * products)

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
            command = generate_command(
                model, prompt, threads=plan.threads, num_tokens=16, kernels=plan.kernels[0]
            )
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
        bench.tune()
        for number in range(plan.repeats):
            say(f"round {number + 1} of {plan.repeats}")
            bench.round(probe)
        cases = bench.result(probe)
    finally:
        bench.close()
    return {
        "model": Path(model).name,
        "sizes": bench.told[OURS],
        "told": {name: told for name, told in bench.told.items() if name != OURS},
        "tuned": bench.tuned,
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
        "flags": vars(plan) | {"dtype": "float32"},
        "rates": {"read_bytes_per_second": summarize(probe.reads), "gemm_flops": summarize(probe.gemms)},
        "models": found,
        "host": None,
    }
