"""Outcomes of a load as figures: rates of each repetition, percentiles over all requests.

What failed is counted apart, with its reasons, and is in no time and no rate. Where there is no
sample, or the server told no usage, there is None and never 0.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xjax_server.bench.samples import divide, percentiles, summarize
from xjax_server.bench.serving.client import Outcome
from xjax_server.bench.serving.load import Load, Repetition

KINDS = ("ttft", "tpot", "itl", "e2e")
RATES = ("output_tokens_per_second", "total_tokens_per_second", "requests_per_second", "goodput")
_MOST_ERRORS = 5


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What a request must keep to count for goodput, in seconds; None: anything."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is anything to keep."""
        return any(limit is not None for limit in (self.ttft, self.tpot, self.e2e))

    def is_met(self, outcome: Outcome) -> bool:
        """Whether a request kept all of it; a time that is not known is not kept."""
        has_one_token = outcome.output_tokens == 1
        return (
            outcome.error is None
            and _keeps(outcome.ttft, self.ttft)
            and (has_one_token or _keeps(outcome.tpot, self.tpot))
            and _keeps(outcome.e2e, self.e2e)
        )


def _keeps(seconds: float | None, limit: float | None) -> bool:
    return limit is None or (seconds is not None and seconds <= limit)


def _tokens(outcomes: Sequence[Outcome], *, of_prompt: bool) -> int | None:
    """Tokens of all of them; None where there are none, or one did not tell."""
    found = [outcome.prompt_tokens if of_prompt else outcome.output_tokens for outcome in outcomes]
    known = [count for count in found if count is not None]
    return sum(known) if known and len(known) == len(found) else None


def _rates(repetition: Repetition, slo: Slo) -> dict[str, float | None]:
    good = [outcome for outcome in repetition.outcomes if outcome.error is None]
    prompt, output = _tokens(good, of_prompt=True), _tokens(good, of_prompt=False)
    total = None if prompt is None or output is None else prompt + output
    num_kept = sum(map(slo.is_met, good)) if slo.is_set and repetition.outcomes else None
    seconds = repetition.seconds
    return {
        "output_tokens_per_second": divide(output, seconds),
        "total_tokens_per_second": divide(total, seconds),
        "requests_per_second": divide(len(good) or None, seconds),
        "goodput": divide(num_kept, seconds),
        "client_seconds_per_token": divide(repetition.client_seconds, output),
        "client_share": divide(repetition.client_seconds, seconds),
    }


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def figures(
    load: Load, repetitions: Sequence[Repetition], slo: Slo, *, output_len: int | None
) -> dict[str, Any]:
    """Everything about one load on one server, as it is saved.

    output_len   tokens that every answer was to have; None where that is not fixed
    """
    outcomes = [outcome for repetition in repetitions for outcome in repetition.outcomes]
    good = [outcome for outcome in outcomes if outcome.error is None]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    rates = [_rates(repetition, slo) for repetition in repetitions]
    times: dict[str, Callable[[Outcome], float | None]] = {
        "ttft": lambda outcome: outcome.ttft,
        "tpot": lambda outcome: outcome.tpot,
        "e2e": lambda outcome: outcome.e2e,
    }
    is_other = [output_len is not None and outcome.output_tokens != output_len for outcome in good]
    return {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": dict(errors.most_common(_MOST_ERRORS)),
        "other_length": sum(is_other),
        "prompt_tokens": percentiles(_known([outcome.prompt_tokens for outcome in good])),
        "output_tokens": percentiles(_known([outcome.output_tokens for outcome in good])),
        "seconds": summarize([repetition.seconds for repetition in repetitions]),
        **{kind: percentiles(_known([time(outcome) for outcome in good])) for kind, time in times.items()},
        "itl": percentiles([gap for outcome in good for gap in outcome.gaps]),
        **{
            name: summarize(_known([rate[name] for rate in rates]))
            for name in (*RATES, "client_seconds_per_token", "client_share")
        },
    }
