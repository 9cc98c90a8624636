"""Saved results of any kind: where and with what they were measured, and two of them side by side."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from xjax.errors import RequestError
from xjax_server.bench.samples import divide, shown

Numbers = Callable[[Mapping[str, Any]], dict[str, float]]


def load(path: Path, kinds: Mapping[str, Numbers]) -> dict[str, Any]:
    """Read a saved result. Raises RequestError where the file holds none of these kinds."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RequestError(f"{path} cannot be read as a saved result: {error}") from error
    found = cast("dict[str, Any]", result) if isinstance(result, dict) else {}
    if found.get("kind") not in kinds:
        raise RequestError(f"{path} is no result of a benchmark; expected what --json wrote")
    return found


def save(result: Mapping[str, Any], path: Path) -> None:
    """Write a result. Raises RequestError where that cannot be done."""
    try:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"the result cannot be written to {path}: {error.strerror}") from error


def print_head(result: Mapping[str, Any], console: Console) -> None:
    """Print machine, versions and flags."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {text}" for name, text in machine["versions"].items() if text)
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"load {machine['load']}; Python {machine['python']}; {versions}"
    )
    console.print("flags: " + ", ".join(f"{name}={value}" for name, value in result["flags"].items()))


def compare(a: Mapping[str, Any], b: Mapping[str, Any], numbers: Numbers, console: Console) -> None:
    """Print what two results of one kind have in common, with b / a; `numbers` names their figures."""
    first, second = numbers(a), numbers(b)
    table = Table("measured", "A", "B", "B / A", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in [name for name in first if name in second]:
        ratio = divide(second[name], first[name])
        table.add_row(name, f"{first[name]:.5g}", f"{second[name]:.5g}", shown(ratio, 2))
    for key in ("processor", "cores"):
        if a["machine"][key] != b["machine"][key]:
            console.print(f"not the same machine: {key} {a['machine'][key]} and {b['machine'][key]}")
    models = [", ".join(model["model"] for model in result["models"]) for result in (a, b)]
    if models[0] != models[1]:
        console.print(f"not the same models: {models[0]} and {models[1]}")
    if a["flags"] != b["flags"]:
        console.print("not the same flags")
    console.print(table)
