"""One configuration against another on the same text: perplexity, and how often the best token is the same.

    text -> tokens -> windows -- each engine in its turn --> log-probabilities, best tokens
            beginnings of windows -------------------------> greedy continuations

Each window is scored token by token with the true tokens before it, so that one difference does not
bring about the next; continuations are where it does. The result is plain JSON; `report` prints it.
"""

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xjax.errors import RequestError
from xjax_server.bench import machine
from xjax_server.bench.offline.worker import Worker

BAR = 0.005  # by which a perplexity may be off
_PROMPT = 64  # tokens of a beginning, or half a window
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    reference, candidates   options of engines; each candidate is compared with the reference
    tokens                  of the text              window    scored at a time
    prompts                 to be continued          answer    tokens of each continuation
    """

    reference: Mapping[str, Any]
    candidates: tuple[Mapping[str, Any], ...]
    tokens: int = 8704  # the first of a window may be scored by nothing
    window: int = 512
    prompts: int = 16
    answer: int = 64
    threads: int = 2

    def __post_init__(self) -> None:
        if not 4 <= self.window <= self.tokens:
            raise RequestError(f"--window must be from 4 to --tokens, {self.tokens}, not {self.window}")
        if self.prompts < 1 or self.answer < 1:
            raise RequestError("--prompts and --answer must be 1 or more")


def options_of(text: str) -> dict[str, Any]:
    """Engine options of `kernels=numba,threads=2`. Raises RequestError."""
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, is_there, value = part.partition("=")
        if not is_there or not value:
            raise RequestError(f"expected NAME=VALUE with commas between them, got {part!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def name_of(options: Mapping[str, Any]) -> str:
    """What a configuration is called."""
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "defaults"


def _ask(model: str, plan: Plan, options: Mapping[str, Any], text: str, say: Say) -> dict[str, Any]:
    """Everything of one configuration, in a process that is gone afterwards."""
    settings = {
        "threads": plan.threads,
        "max_num_seqs": min(8, plan.prompts),
        "max_model_len": max(plan.window, _PROMPT + plan.answer) + 16,
        **options,
    }
    command = [sys.executable, "-m", "xjax_server.bench.quality.subject", model, json.dumps(settings)]
    child = Worker(name_of(options), command)
    try:
        found = child.ask("describe")
        coded = child.ask("encode", text=text, num_tokens=plan.tokens)
        prefix, ids = coded["prefix"], coded["ids"]
        windows = [ids[start : start + plan.window] for start in range(0, len(ids), plan.window)]
        # Without a prefix the first token of a window has nothing to be scored by.
        given, parts = max(len(prefix), 1), list[dict[str, Any]]()
        for number, window in enumerate(windows):
            say(f"{name_of(options)}: window {number + 1} of {len(windows)}")
            parts.append(child.ask("score", windows=[prefix + window], num_given=given))
        long = [window for window in windows if len(window) >= min(_PROMPT, plan.window // 2)]
        starts = [prefix + window[: min(_PROMPT, plan.window // 2)] for window in long[: plan.prompts]]
        say(f"{name_of(options)}: {len(starts)} continuations")
        answers = child.ask("go_on", prompts=starts, num_tokens=plan.answer)["ids"]
    finally:
        child.close()
    joined = {key: [value for part in parts for value in part[key][0]] for key in parts[0]}
    return {**found, **joined, "ids": ids, "answers": answers}


def perplexity(logprobs: Sequence[float]) -> float:
    """Give exp of the mean surprise."""
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def same_start(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def against(reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> dict[str, Any]:
    """Compare what two configurations gave. Raises RequestError where their tokens are not the same.

    margins_of_others   median margin of the reference's best token where the candidate has another
    """
    if reference["ids"] != candidate["ids"]:
        raise RequestError("the two models cut the text into other tokens: there is nothing to compare")
    first, second = reference["logprobs"], candidate["logprobs"]
    a, b = perplexity(first), perplexity(second)
    others = [i for i, best in enumerate(reference["best"]) if best != candidate["best"][i]]
    lengths = [same_start(x, y) for x, y in zip(reference["answers"], candidate["answers"], strict=True)]
    return {
        "perplexity": b,
        "ratio": b / a,
        "is_within": abs(b / a - 1) <= BAR,
        "mean_difference": statistics.fmean(abs(x - y) for x, y in zip(first, second, strict=True)),
        "most_difference": max(abs(x - y) for x, y in zip(first, second, strict=True)),
        "agreement": 1 - len(others) / len(first),
        "margin_of_others": statistics.median(reference["margins"][i] for i in others) if others else None,
        "same_tokens": statistics.fmean(lengths),
        "same_tokens_median": statistics.median(lengths),
        "whole_answers": sum(length == len(reference["answers"][0]) for length in lengths),
        "answers": len(lengths),
        "weights_bytes": candidate["weights_bytes"],
        "options": candidate["options"],
    }


def run_model(model: str, text: str, plan: Plan, say: Say) -> dict[str, Any]:
    """Measure one model: the reference once, then each candidate."""
    reference, found = _ask(model, plan, plan.reference, text, say), dict[str, Any]()
    for options in plan.candidates:
        found[name_of(options)] = against(reference, _ask(model, plan, options, text, say))
    return {
        "model": Path(model).name,
        "tokens": len(reference["logprobs"]),
        "reference": {
            "name": name_of(plan.reference),
            "perplexity": perplexity(reference["logprobs"]),
            "weights_bytes": reference["weights_bytes"],
            "options": reference["options"],
        },
        "candidates": found,
    }


def run(models: Sequence[str], file: Path, plan: Plan, say: Say) -> dict[str, Any]:
    """Measure some models on a text. Raises RequestError where it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{file} cannot be read as a text in UTF-8: {error}") from error
    return {
        "kind": "quality",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "flags": {
            "text": file.name, "tokens": plan.tokens, "window": plan.window, "prompts": plan.prompts,
            "answer": plan.answer, "threads": plan.threads,
        },
        "models": [run_model(model, text, plan, say) for model in models],
    }  # fmt: skip
