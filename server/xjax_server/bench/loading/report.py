"""Results of the loading benchmark as a table. Reads the saved form only."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from xjax_server.bench.compare import print_head
from xjax_server.bench.samples import divide, median, shown


def _mb(count: float | None) -> str:
    return shown(None if count is None else count / 1e6, 0)


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a whole result."""
    print_head(result, console)
    columns = (
        "case", "s", "of processors", "s, cold", "file MB", "file MB/s", "parameters MB", "largest MB",
        "peak MB", "above imports", "bound MB", "kept",
    )  # fmt: skip
    for model in result["models"]:
        table = Table(*columns, title=model["model"], box=None, pad_edge=False, title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for name, case in model["cases"].items():
            seconds = median(case["seconds"])
            table.add_row(
                name,
                shown(seconds, 2),
                shown(median(case["work_seconds"]), 2),
                shown(median(case["cold_seconds"]), 2),
                _mb(case["file_bytes"]),
                _mb(divide(case["file_bytes"], seconds)),
                _mb(case["parameter_bytes"]),
                _mb(case["largest_bytes"]),
                _mb(case["peak_bytes"]),
                _mb(case["peak_bytes"] - case["before_bytes"]),
                _mb(case["bound_bytes"]),
                "yes" if case["is_bounded"] else "NO",
            )
        console.print(table)


def numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """Every figure of a result by a name that two results share; what was not measured is left out."""
    found: dict[str, float | None] = {}
    for model in result["models"]:
        for name, case in model["cases"].items():
            for kind in ("seconds", "work_seconds", "cold_seconds"):
                found[f"{name}: {kind}"] = median(case[kind])
            found[f"{name}: peak_bytes"] = case["peak_bytes"]
    return {name: value for name, value in found.items() if value is not None}
