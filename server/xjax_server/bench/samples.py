"""Samples and their summary: a median with its spread, or None where nothing was measured."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

Summary = dict[str, float]
PERCENTS = (50, 90, 99)


def summarize(samples: Sequence[float]) -> Summary | None:
    """Give median, range and count; None, never 0, of no samples."""
    if not samples:
        return None
    return {
        "median": statistics.median(samples),
        "low": min(samples),
        "high": max(samples),
        "count": len(samples),
    }


def nearest_rank(ordered: Sequence[float], percent: float) -> float:
    """Give the smallest of the ascending samples that `percent` of them do not exceed."""
    return ordered[max(0, math.ceil(percent * len(ordered) / 100) - 1)]


def percentiles(samples: Sequence[float]) -> Summary | None:
    """Give p50, p90 and p99 by nearest rank, mean, range and count; None of no samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    return {
        **{f"p{percent}": nearest_rank(ordered, percent) for percent in PERCENTS},
        "mean": statistics.fmean(ordered),
        "low": ordered[0],
        "high": ordered[-1],
        "count": len(ordered),
    }


def median(summary: Summary | None) -> float | None:
    """Take the median out of a summary."""
    return None if summary is None else summary["median"]


def divide(a: float | None, b: float | None) -> float | None:
    """Give a / b, None where either is missing or b is 0."""
    return None if a is None or not b else a / b


def shown(value: Any, digits: int = 1) -> str:
    """Write a number for a table, "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.{digits}f}" if isinstance(value, float) else str(value)
