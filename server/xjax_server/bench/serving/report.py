"""Results of the serving benchmark as tables. Reads the saved form only."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from xjax_server.bench.compare import print_head
from xjax_server.bench.samples import divide, median, shown
from xjax_server.bench.serving.measure import KINDS, RATES

Case = Mapping[str, Any]
# Others are compared with our server where it was measured, and it with the engine that has no server.
_FIRST, _ENGINE = "xjax", "xjax engine alone"


def _times(summary: Mapping[str, float] | None, scale: float, digits: int) -> str:
    if summary is None:
        return "-"
    return " ".join(f"{summary[name] * scale:,.{digits}f}" for name in ("p50", "p90", "p99"))


def _table(found: Mapping[str, Any]) -> Table:
    head = (
        "load", "server", "tokens/s", "ratio", "requests/s", "goodput",
        "TTFT ms", "TPOT ms", "ITL ms", "E2E s", "failed",
    )  # fmt: skip
    title = f"{found['model']}: medians of repetitions; times are p50 p90 p99 over all requests"
    table = Table(*head, title=title, box=None, pad_edge=False, title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for case in found["cases"]:
        first = case["subjects"].get(_FIRST)
        load = case["load"]
        for name, figures in case["subjects"].items():
            table.add_row(load, name, *_cells(figures, first))
            load = ""
    return table


def _cells(figures: Case, first: Case | None) -> Iterator[str]:
    rate = median(figures["output_tokens_per_second"])
    yield shown(rate)
    yield shown(divide(rate, median(first["output_tokens_per_second"])), 2) if first else ""
    yield shown(median(figures["requests_per_second"]), 2)
    yield shown(median(figures["goodput"]), 2)
    yield _times(figures["ttft"], 1e3, 0)
    yield _times(figures["tpot"], 1e3, 1)
    yield _times(figures["itl"], 1e3, 1)
    yield _times(figures["e2e"], 1, 2)
    yield f"{figures['failed']} of {figures['completed'] + figures['failed']}"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    for name, told in found["subjects"].items():
        if told.get("tried"):
            tried = ", ".join(f"{item['name']} {shown(item['tokens_per_second'])}" for item in told["tried"])
            yield f"{name}: {told['setting']}, the fastest in tokens/s of: {tried}"
        if told.get("build"):
            yield f"{name}: " + ", ".join(f"{key} {value}" for key, value in told["build"].items())
        if told.get("peak_bytes"):
            yield f"{name}: peak memory {told['peak_bytes'] / 1e6:,.0f} MB"
    for name, agrees in found["agrees"].items():
        yield f"{name}: {'same text' if agrees else 'other text'} after one prompt, greedily"
    for name, reason in found["skipped"].items():
        yield f"{name}: skipped: {reason}"
    for case in found["cases"]:
        served, alone = (case["subjects"].get(name) for name in (_FIRST, _ENGINE))
        if served and alone:
            rates = [median(item["output_tokens_per_second"]) for item in (served, alone)]
            share = divide(*rates)
            told = "-" if share is None else f"{share:.0%}"
            yield f"{case['load']}: the server gives {told} of the tokens/s of the engine alone"
        for name, figures in case["subjects"].items():
            yield from _remarks(f"{case['load']}, {name}", figures)


def _remarks(place: str, figures: Case) -> Iterator[str]:
    for error, count in figures["errors"].items():
        yield f"{place}: {count} failed: {error}"
    if figures["other_length"]:
        yield f"{place}: {figures['other_length']} answers had another length than was asked for"
    cost, share = median(figures["client_seconds_per_token"]), median(figures["client_share"])
    if cost is not None and share is not None:
        yield f"{place}: the load client took {cost * 1e6:,.0f} µs of a processor a token, {share:.1%} of one"


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a whole result."""
    print_head(result, console)
    for found in result["models"]:
        console.print()
        console.print(_table(found))
        for line in _lines(found):
            console.print(line)


def numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """Every figure of a result by a name that two results share; what was not measured is left out."""
    found: dict[str, float | None] = {}
    for model in result["models"]:
        # One model may have another name at another server.
        before = f"{model['model']}: " if len(result["models"]) > 1 else ""
        for case in model["cases"]:
            for name, figures in case["subjects"].items():
                place = f"{before}{case['load']}: {name}"
                for rate in RATES:
                    found[f"{place}: {rate.replace('_', ' ')}"] = median(figures[rate])
                for kind in KINDS:
                    for percent in ("p50", "p90", "p99"):
                        summary = figures[kind]
                        found[f"{place}: {kind} {percent} s"] = None if summary is None else summary[percent]
    return {name: value for name, value in found.items() if value is not None}
