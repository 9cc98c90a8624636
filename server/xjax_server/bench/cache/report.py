"""Results of the cache benchmark as tables. Reads the saved form only."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from xjax_server.bench.compare import print_head
from xjax_server.bench.samples import median, shown

_COUNTS = {
    "steps": "steps", "prefill_tokens": "prompt tokens computed", "recomputed_tokens": "lost",
    "preemptions": "preempted", "swap_out_pages": "pages out", "swap_in_pages": "pages in",
    "retained_pages": "kept",
}  # fmt: skip


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, box=None, pad_edge=False, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _ms(summary: Any) -> str:
    if summary is None:
        return "-"
    low, middle, high = (summary[name] * 1e3 for name in ("low", "median", "high"))
    return f"{middle:,.1f} ({low:,.1f} to {high:,.1f})"


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a whole result."""
    print_head(result, console)
    for model in result["models"]:
        if model["hits"]:
            console.print(_hits(model))
        for kind, work in model["work"].items():
            console.print(_work(f"{model['model']}, {kind}", work))
            if not work["agrees"]:
                console.print("the settings gave DIFFERENT answers")
    if result["moves"] is not None:
        console.print(_moves(result["moves"]))


def _hits(model: Mapping[str, Any]) -> Table:
    title = f"{model['model']}, first token, ms"
    table = _table(title, "prompt", "cold", "hit", "rest alone", "hit / rest", "cold / hit", "cached")
    for length, case in model["hits"].items():
        seconds = case["seconds"]
        table.add_row(
            length,
            _ms(seconds["cold"]),
            _ms(seconds["hit"]),
            _ms(seconds["rest"]),
            shown(case["against_rest"], 2),
            shown(case["against_cold"], 1),
            str(case["cached"]),
        )
    return table


def _work(title: str, work: Mapping[str, Any]) -> Table:
    table = _table(title, "setting", "s", "of processors", "tokens/s", "time / partial", *_COUNTS.values())
    for name, seconds in work["seconds"].items():
        table.add_row(
            name,
            shown(median(seconds), 1),
            shown(median(work["work_seconds"][name]), 1),
            shown(work["tokens_per_second"][name], 1),
            shown(work["against_partial"][name], 2),
            *(shown(work["counts"][name][count]) for count in _COUNTS),
        )
    return table


def _moves(moves: Mapping[str, Any]) -> Table:
    title = f"us a page of {moves['page_bytes']:,} bytes"
    table = _table(
        title, "pages", "out", "engine's thread", "copy", "ratio", "in", "engine's thread", "ratio"
    )
    for count, case in moves["pages"].items():
        micros = {name: shown(case[name]["median"] * 1e6, 0) for name in case if "ratio" not in name}
        table.add_row(
            count,
            micros["save"], micros["save_engine"], micros["save_copy"], shown(case["save_ratio"]),
            micros["load"], micros["load_engine"], shown(case["load_ratio"]),
        )  # fmt: skip
    return table


def numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """Every figure of a result by a name that two results share; what was not measured is left out."""
    found: dict[str, float | None] = {}
    for model in result["models"]:
        for length, case in model["hits"].items():
            place = f"{model['model']}, hit of {length}"
            for name, seconds in case["seconds"].items():
                found[f"{place}: {name} ms"] = None if seconds is None else seconds["median"] * 1e3
            found[f"{place}: hit / rest"] = case["against_rest"]
            found[f"{place}: cold / hit"] = case["against_cold"]
        for kind, work in model["work"].items():
            for name, rate in work["tokens_per_second"].items():
                found[f"{model['model']}, {kind}, {name}: tokens/s"] = rate
                found[f"{model['model']}, {kind}, {name}: steps"] = work["counts"][name]["steps"]
                found[f"{model['model']}, {kind}, {name}: s of processors"] = median(
                    work["work_seconds"][name]
                )
    pages: Mapping[str, Any] = result["moves"]["pages"] if result["moves"] else {}
    for count, case in pages.items():
        for name in ("save", "load"):
            found[f"{name} of {count} pages: us a page"] = case[name]["median"] * 1e6
            found[f"{name} of {count} pages / copy"] = case[f"{name}_ratio"]
    return {name: value for name, value in found.items() if value is not None}
