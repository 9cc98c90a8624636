"""Our server and its peers on one model, in one run: each started with its best settings, asked in turn."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xjax.errors import XjaxError
from xjax_server.bench.beside import peers
from xjax_server.bench.beside.peers import Peer, Setting, Sizes
from xjax_server.bench.beside.servers import Server, settle
from xjax_server.bench.offline import worker
from xjax_server.bench.samples import median
from xjax_server.bench.serving.client import Endpoint
from xjax_server.bench.serving.load import Load
from xjax_server.bench.serving.measure import Slo, figures
from xjax_server.bench.serving.prompts import IdPrompts
from xjax_server.bench.serving.run import EngineSubject, HttpSubject, Plan, Progress, Subject, run_cases

ENGINE = "xjax engine alone"
OURS = "xjax"
START_SECONDS, SETTLE_SECONDS = 600.0, 120.0  # a peer may compile for minutes
_TRIAL_REQUESTS, _TRIAL_TOKENS = 2, 32  # for each stream; of each answer
_SAMPLE_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What runs beside our server: peers by name with their paths, and our engine without a server."""

    threads: int = 2
    peers: Mapping[str, str]
    has_engine: bool = True


def _subject(server: Server, prompts: IdPrompts, plan: Plan) -> HttpSubject:
    return HttpSubject(Endpoint(url=server.url, model=peers.SERVED), prompts, seed=plan.seed)


def _started(stack: ExitStack, peer: Peer, setting: Setting, sizes: Sizes) -> Server:
    server = peer.start(setting, sizes)
    stack.callback(server.stop)
    server.wait(START_SECONDS)
    server.settle(SETTLE_SECONDS)
    return server


def try_settings(
    peer: Peer, prompts: IdPrompts, plan: Plan, sizes: Sizes, progress: Progress
) -> tuple[Setting, list[dict[str, Any]]]:
    """The setting with the highest output rate at the most streams, and what each of them gave."""
    if len(peer.settings) == 1:
        return peer.settings[0], []
    load, tried = Load(plan.most_streams), list[dict[str, Any]]()
    shape = replace(prompts.shape, output_len=min(_TRIAL_TOKENS, prompts.shape.output_len))
    short = IdPrompts(shape, seed=plan.seed, vocab_size=prompts.vocab_size)
    for number, setting in enumerate(peer.settings):
        progress(f"trying {peer.name}: {setting.name}", number, len(peer.settings))
        rate, error = None, None
        with ExitStack() as stack:
            try:
                subject = _subject(_started(stack, peer, setting, sizes), short, plan)
                subject.warm(load, plan.most_streams)
                count = range(_TRIAL_REQUESTS * plan.most_streams)
                found = subject.measure(load, count, f"trial {number}", lambda outcome: None)
                case = figures(load, [found], Slo(), output_len=shape.output_len)
                rate = median(case["output_tokens_per_second"]) if not case["failed"] else None
            except XjaxError as failure:
                error = str(failure)
        tried.append(
            {"name": setting.name, "flags": setting.flags, "tokens_per_second": rate, "error": error}
        )
    rates = [item["tokens_per_second"] or 0.0 for item in tried]
    return peer.settings[rates.index(max(rates))], tried


class Run:
    """The servers of one model. Use it as a context."""

    def __init__(
        self, model: str, plan: Plan, beside: Beside, *, vocab_size: int, progress: Progress
    ) -> None:
        self.model, self.plan, self._beside, self._progress = model, plan, beside, progress
        tokens = plan.shape.input_len + plan.shape.output_len + 16
        self._sizes = Sizes(threads=beside.threads, streams=plan.most_streams, tokens=tokens)
        self._prompts = IdPrompts(plan.shape, seed=plan.seed, vocab_size=vocab_size)
        self._stack = ExitStack()
        self._subjects: dict[str, Subject] = {}
        self._servers: dict[str, Server] = {}
        self._told: dict[str, dict[str, Any]] = {}
        self._skipped: dict[str, str] = {}
        self._pids: list[int] = []

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def start(self, folder: Path) -> None:
        """Start ours and every peer that can be had; raises XjaxError when ours does not start."""
        found = [peers.ours(self.model)]
        for name, path in self._beside.peers.items():
            try:
                found += peers.find(name, path, self.model, self._sizes, folder)
            except XjaxError as error:
                self._skipped[name] = str(error)
        # All settings are tried before anything else is running.
        chosen = [
            (peer, *try_settings(peer, self._prompts, self.plan, self._sizes, self._progress))
            for peer in found
        ]
        for peer, setting, tried in chosen:
            self._progress(f"starting {peer.name}", 0, None)
            try:
                server = _started(self._stack, peer, setting, self._sizes)
            except XjaxError as error:
                if peer.name == OURS:
                    raise
                self._skipped[peer.name] = str(error)
                continue
            self._servers[peer.name] = server
            self._pids.append(server.pid)
            self._subjects[peer.name] = _subject(server, self._prompts, self.plan)
            self._told[peer.name] = {
                "command": server.command, "setting": setting.name, "tried": tried, "build": dict(peer.build),
            }  # fmt: skip
        if self._beside.has_engine:
            self._start_engine()

    def _start_engine(self) -> None:
        sizes = self._sizes
        command = worker.command(
            "xjax", self.model, threads=sizes.threads, rows=sizes.streams, tokens=sizes.tokens
        )
        child = worker.Worker(ENGINE, command)
        self._stack.callback(child.close)
        self._pids.append(child.pid)
        self._subjects[ENGINE] = EngineSubject(child, self._prompts)

    def _settle(self) -> None:
        self._progress("waiting until nothing is compiled any more", 0, None)
        for pid in self._pids:
            settle(pid, SETTLE_SECONDS)

    def measure(self) -> dict[str, Any]:
        """Every load on every server in turn, and what they answer to one prompt."""
        samples: dict[str, str] = {}
        for name, subject in self._subjects.items():
            subject.prepare()
            if isinstance(subject, HttpSubject):
                samples[name] = subject.sample("sample", _SAMPLE_TOKENS)
        nonce, cases = run_cases(self._subjects, self.plan, self._progress, self._settle)
        for name, server in self._servers.items():
            self._told[name]["peak_bytes"] = server.peak_bytes()
        return {
            "model": Path(self.model).name,
            "nonce": nonce,
            "subjects": self._told,
            # A file of few bits is computed with rounded activations, and need not say the same.
            "agrees": {name: text == samples[OURS] for name, text in samples.items() if name != OURS},
            "skipped": self._skipped,
            "cases": cases,
        }


def run_model(
    model: str, plan: Plan, beside: Beside, *, vocab_size: int, folder: Path, progress: Progress
) -> dict[str, Any]:
    """Measure one model file. `folder`: where a copy of it in float32 may be made."""
    with Run(model, plan, beside, vocab_size=vocab_size, progress=progress) as run:
        run.start(folder)
        return run.measure()
