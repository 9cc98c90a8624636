"""Samples and their summary: a median with its spread, or None where nothing was measured."""

import statistics
from collections.abc import Sequence
from typing import Any

Summary = dict[str, float]


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
