"""Hits beside cold prompts, and the same work under each way to run out of pages.

    hits    cold, again (a hit), and a prompt as long as what the hit left to compute, in turn
    work    prompts that come at once, in a pool that holds a part of them; each setting in turn

The result is plain JSON (`None` where there is no sample); `report` prints it.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xjax_server.bench import machine
from xjax_server.bench.offline.cases import new_prompt
from xjax_server.bench.offline.worker import Worker
from xjax_server.bench.samples import divide, median, summarize

HIT, PARTIAL, WHOLE, RECOMPUTE = "hit", "partial swap", "whole swap", "recompute"
_PAGE = 16
_HOST_FOLD = 4.0  # room for whatever is swapped
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    PARTIAL: {"preemption_mode": "swap", "cpu_mem_fold": _HOST_FOLD},
    WHOLE: {"preemption_mode": "swap", "cpu_mem_fold": _HOST_FOLD, "disable_prefix_cache": True},
    RECOMPUTE: {"preemption_mode": "recompute"},
}
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    lengths     of the prompts of hits               repeats   prompts of each length
    sequences   of the work, at once                 rounds    over the work; 0: none
    shared      tokens that their prompts begin with, where they share any
    own         further tokens of each prompt        answer    tokens of each answer
    pool        share of the pages that they would need in all
    """

    lengths: tuple[int, ...] = (256, 1024, 4096)
    repeats: int = 5
    sequences: int = 8
    shared: int = 512
    own: int = 256
    answer: int = 256
    pool: float = 0.4
    rounds: int = 3
    threads: int = 2

    @property
    def pages(self) -> int:
        """Pages of the pool of the work."""
        return int(self.pool * self.sequences * -(-(self.shared + self.own + self.answer) // _PAGE))


def command(model: str, options: Mapping[str, Any]) -> list[str]:
    """How to start a subject."""
    return [sys.executable, "-m", "xjax_server.bench.cache.subject", model, json.dumps(options)]


def measure_hits(model: str, plan: Plan, say: Say) -> dict[str, Any]:
    """Time first tokens; by length of the prompt."""
    longest = max(plan.lengths) + 2 * _PAGE
    options = {
        "max_num_seqs": 1, "max_model_len": longest, "threads": plan.threads, "page_size": _PAGE,
        "num_pages": 2 * -(-longest // _PAGE) + 1,
    }  # fmt: skip
    subject, found = Worker(HIT, command(model, options)), dict[str, Any]()
    try:
        subject.ask("warm")  # nothing is measured beside the compiler
        vocab_size = subject.ask("describe")["vocab_size"]
        source = random.Random(time.time_ns())
        for length in plan.lengths:
            say(f"hits of {length} tokens")
            samples: dict[str, list[float]] = {"cold": [], "hit": [], "rest": []}
            cached = 0
            for number in range(plan.repeats + 1):
                prompt = new_prompt(length, vocab_size, source)
                cold, hit = subject.ask("first", prompt=prompt), subject.ask("first", prompt=prompt)
                cached = int(hit["cached"])
                rest = subject.ask("first", prompt=new_prompt(length - cached, vocab_size, source))
                for name, reply in (("cold", cold), ("hit", hit), ("rest", rest)):
                    if number:  # the first of each warms
                        samples[name].append(reply["seconds"])
            seconds = {name: summarize(values) for name, values in samples.items()}
            found[str(length)] = {
                "seconds": seconds,
                "cached": cached,
                "against_rest": divide(median(seconds["hit"]), median(seconds["rest"])),
                "against_cold": divide(median(seconds["cold"]), median(seconds["hit"])),
            }
    finally:
        subject.close()
    return found


class Work:
    """The settings side by side, and what was measured of them so far."""

    def __init__(self, model: str, plan: Plan, say: Say) -> None:
        self._plan, self._say = plan, say
        options = {
            "max_num_seqs": plan.sequences, "max_model_len": plan.shared + plan.own + plan.answer,
            "threads": plan.threads, "page_size": _PAGE, "num_pages": plan.pages + 1,
        }  # fmt: skip
        self._subjects = {
            name: Worker(name, command(model, {**options, **changes})) for name, changes in SETTINGS.items()
        }
        self._samples: dict[str, dict[str, list[dict[str, Any]]]] = {}
        self._source = random.Random(time.time_ns())

    def warm(self) -> dict[str, Any]:
        """Compile everything; what the first of them says of its sizes."""
        sizes: dict[str, Any] = {}
        for name, subject in self._subjects.items():
            self._say(f"warming {name}")
            subject.ask("warm")
            sizes = sizes or subject.ask("describe")
        self._vocab_size = sizes["vocab_size"]
        return sizes

    def round(self, *, turned: bool) -> None:
        """Do both kinds of work once with each setting; `turned`: in the other order."""
        plan = self._plan
        for kind, shared in (("shared", plan.shared), ("apart", 0)):
            start = new_prompt(shared, self._vocab_size, self._source)
            length = plan.shared + plan.own - shared
            prompts = [
                start + new_prompt(length, self._vocab_size, self._source) for _ in range(plan.sequences)
            ]
            for name in tuple(SETTINGS)[:: -1 if turned else 1]:
                self._say(f"{kind}: {name}")
                subject = self._subjects[name]
                subject.ask("clear")
                reply = subject.ask("work", prompts=prompts, num_tokens=plan.answer)
                self._samples.setdefault(kind, {}).setdefault(name, []).append(reply)

    def result(self) -> dict[str, Any]:
        """By kind of work and setting: seconds, tokens a second, events of the last round."""
        found: dict[str, Any] = {}
        tokens = self._plan.sequences * self._plan.answer
        for kind, by_name in self._samples.items():
            seconds, work = (
                {name: summarize([reply[key] for reply in replies]) for name, replies in by_name.items()}
                for key in ("seconds", "work_seconds")
            )
            found[kind] = {
                "seconds": seconds,
                "work_seconds": work,
                "tokens_per_second": {name: divide(tokens, median(time)) for name, time in seconds.items()},
                "against_partial": {
                    name: divide(median(time), median(seconds[PARTIAL])) for name, time in seconds.items()
                },
                "counts": {name: replies[-1]["counts"] for name, replies in by_name.items()},
                "agrees": all(
                    len({reply["digest"] for reply in replies}) == 1
                    for replies in zip(*by_name.values(), strict=True)
                ),
            }
        return found

    def close(self) -> None:
        """End every engine."""
        for subject in self._subjects.values():
            subject.close()


def measure_work(model: str, plan: Plan, say: Say) -> dict[str, Any]:
    """Sizes, and the work under each setting."""
    work = Work(model, plan, say)
    try:
        sizes = work.warm()
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}")
            work.round(turned=bool(number % 2))
        return {"sizes": sizes, "work": work.result()}
    finally:
        work.close()


def run(models: Sequence[str], plan: Plan, say: Say) -> dict[str, Any]:
    """Measure some model files."""
    described, found = machine.describe(), list[dict[str, Any]]()
    for model in models:
        one: dict[str, Any] = {"model": Path(model).name, "sizes": None, "work": {}, "hits": {}}
        if plan.lengths and plan.repeats:
            one["hits"] = measure_hits(model, plan, say)
        if plan.rounds:
            one |= measure_work(model, plan, say)
        found.append(one)
    return {
        "kind": "cache",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": described,
        "flags": {**vars(plan), "lengths": list(plan.lengths), "dtype": "float32"},
        "models": found,
        "moves": None,
    }
