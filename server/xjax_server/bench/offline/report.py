"""Results of the offline benchmark as tables. Reads the saved form only."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from xjax_server.bench.compare import print_head
from xjax_server.bench.samples import median, shown

_NOTHING: Mapping[str, Any] = {}
HOST_KINDS = ("host_seconds", "work_seconds")  # on the clock; processor time of the engine's thread


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _spread(summary: Mapping[str, float] | None) -> str:
    if summary is None:
        return "-"
    return f"{summary['low'] * 1e3:,.1f} – {summary['high'] * 1e3:,.1f} of {summary['count']:.0f}"


def _model_table(found: Mapping[str, Any]) -> Table:
    columns = (
        "case", "engine", "ms", "range", "tokens/s", "reads MB", "x reading", "x floor", "slower than xjax",
    )  # fmt: skip
    table = Table(*columns, title=found["model"], box=None, pad_edge=False, title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for name, case in found["cases"].items():
        floor = case["floor_seconds"][next(iter(case["seconds"]))]
        table.add_row(name, "floor", shown(_ms(floor)), "", "", "", "", "1.00", "")
        for engine, summary in case["seconds"].items():
            table.add_row(
                "",
                engine,
                shown(_ms(median(summary))),
                _spread(summary),
                shown(case["tokens_per_second"][engine]),
                shown(case["read_bytes"][engine] / 1e6, 0),
                shown(case["times_reading"][engine], 2),
                shown(case["times_the_floor"][engine], 2),
                shown(case["ratio"][engine], 2) if engine in case["ratio"] else "",
            )
    return table


def _model_lines(found: Mapping[str, Any]) -> Iterator[str]:
    sizes = found["sizes"]
    kv = sizes["kv_width"] * sum(numbers for numbers, _ in sizes["kv"])
    yield (
        f"parameters {sizes['weights_bytes'] / 1e6:,.0f} MB, of which a step reads "
        f"{sizes['read_bytes'] / 1e6:,.0f}; pages {kv / 1e3:,.1f} kB a token"
    )
    for name, agrees in found["agrees"].items():
        yield f"{name}: {'same greedy tokens' if agrees else 'OTHER TOKENS: the comparison means little'}"
    for name, reason in found["skipped"].items():
        yield f"{name}: skipped: {reason}"
    for name, told in found["told"].items():
        if told.get("build"):
            yield f"{name}: " + ", ".join(f"{key} {value}" for key, value in told["build"].items())
    for name, cases in found["tuned"].items():
        for case, reply in cases.items():
            tried = ", ".join(f"{item['name']} {shown(_ms(item['seconds']))}" for item in reply["tried"])
            yield f"{name}, {case}: with {reply['setting']} (ms: {tried})"
    for name, case in found["cases"].items():
        if case["host_seconds"] is not None:
            yield f"host time of a step, {name}: {shown(_ms(median(case['host_seconds'])), 2)} ms"
    start = found["start"]
    if start is not None:
        for kind in ("cold", "warm"):
            peak = median(start[f"{kind}_peak_bytes"])
            yield (
                f"xjax generate, {kind}: first token after {shown(median(start[f'{kind}_seconds']))} s, "
                f"peak memory {shown(None if peak is None else peak / 1e6, 0)} MB"
            )


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a whole result."""
    print_head(result, console)
    rates = result["rates"]
    read, gemm = rates["read_bytes_per_second"], rates["gemm_flops"]
    if read is not None and gemm is not None:
        console.print(
            f"reads {read['median'] / 1e9:.1f} GB/s (best {read['high'] / 1e9:.1f}), multiplies "
            f"{gemm['median'] / 1e9:.0f} GFLOP/s (best {gemm['high'] / 1e9:.0f}); the floor takes the best"
        )
    machine = result["machine"]
    if result["flags"].get("peers") and machine["load"] > machine["cores"] / 4:
        console.print(
            f"OTHER WORK WAS RUNNING (load {machine['load']}): peers whose threads wait for each other by "
            "spinning suffer more than we do, so their ratios mean nothing"
        )
    for found in result["models"]:
        console.print()
        console.print(_model_table(found))
        for line in _model_lines(found):
            console.print(line)
    host: Mapping[str, Any] | None = result["host"]
    if host is not None:
        console.print()
        for rows, kinds in host.items():
            clock, work = (shown(_ms(median(kinds[name])), 3) for name in HOST_KINDS)
            console.print(f"host time of a step, null model, {rows} rows: {clock} ms, {work} ms of work")


def numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """Every median of a result by a name that two results share; what was not measured is left out."""
    found: dict[str, float | None] = {}
    for model in result["models"]:
        for name, case in model["cases"].items():
            for engine, summary in case["seconds"].items():
                found[f"{model['model']}: {name}: {engine}: seconds"] = median(summary)
            found[f"{model['model']}: {name}: host seconds"] = median(case["host_seconds"])
        start: Mapping[str, Any] = model["start"] or _NOTHING
        for name, summary in start.items():
            found[f"{model['model']}: start: {name}"] = median(summary)
    host: Mapping[str, Any] = result["host"] or _NOTHING
    for rows, kinds in host.items():
        for name in HOST_KINDS:
            found[f"null model: {rows} rows: {name}"] = median(kinds[name])
    return {name: value for name, value in found.items() if value is not None}
