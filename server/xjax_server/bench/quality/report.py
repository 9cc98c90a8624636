"""Results of the quality benchmark as tables. Reads the saved form only."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from xjax_server.bench.compare import print_head
from xjax_server.bench.samples import shown

_FIGURES = ("perplexity", "mean_difference", "agreement", "same_tokens")


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a whole result."""
    print_head(result, console)
    columns = (
        "configuration", "weights MB", "perplexity", "off by", "within 0.5 %", "log-probability off",
        "at most", "same best token", "margin of the others", "same tokens of an answer", "same answers",
    )  # fmt: skip
    for model in result["models"]:
        title = f"{model['model']}, {model['tokens']} tokens scored"
        table = Table(*columns, title=title, box=None, pad_edge=False, title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        first = model["reference"]
        table.add_row(first["name"], shown(first["weights_bytes"] / 1e6), shown(first["perplexity"], 4))
        for name, case in model["candidates"].items():
            table.add_row(
                name,
                shown(case["weights_bytes"] / 1e6),
                shown(case["perplexity"], 4),
                f"{case['ratio'] - 1:+.3%}",
                "yes" if case["is_within"] else "NO",
                f"{case['mean_difference']:.1e}",
                f"{case['most_difference']:.1e}",
                f"{case['agreement']:.2%}",
                shown(case["margin_of_others"], 4),
                f"{case['same_tokens']:.1f}, median {case['same_tokens_median']:.0f}",
                f"{case['whole_answers']} of {case['answers']}",
            )
        console.print(table)


def numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """Every figure of a result by a name that two results share."""
    found: dict[str, float] = {}
    for model in result["models"]:
        found[f"{model['model']}: reference: perplexity"] = model["reference"]["perplexity"]
        for name, case in model["candidates"].items():
            for figure in _FIGURES:
                found[f"{model['model']}: {name}: {figure}"] = case[figure]
    return found
