"""Load random models in fresh processes: seconds, peak resident memory, and whether it is bounded.

    for each form: write it; for each dtype: once cold, then warm; the files go when asked

Peak is the process's own high-water mark, pages of mapped files and of libraries included. It
may be what the parameters take, the largest array once more, and 300 MB.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xjax.errors import EngineError
from xjax_server.bench import machine
from xjax_server.bench.loading.files import FORMATS, Shape, files_of, write_model
from xjax_server.bench.samples import summarize

SLACK = 300 * 10**6
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    child     command that loads the model named by its last two arguments, path and dtype
    repeats   warm samples of each case     is_cold   one before them with the files out of memory
    """

    child: Sequence[str]
    folder: Path
    shape: Shape = field(default_factory=Shape)
    forms: tuple[str, ...] = FORMATS
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    repeats: int = 3
    is_cold: bool = True
    keeps_files: bool = False


def drop_from_memory(path: Path) -> None:
    """Ask the system to forget what it holds of a file, so that the next reader takes it from the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that are not written yet would stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_once(child: Sequence[str], path: Path, dtype: str) -> dict[str, Any]:
    """Load a model in a process of its own. Raises EngineError with the child's last line."""
    done = subprocess.run([*child, str(path), dtype], capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise EngineError(f"loading {path.name} ended with code {done.returncode}: {lines[-1]}")
    return json.loads(done.stdout)


def measure(plan: Plan, path: Path, form: str, dtype: str, say: Say) -> dict[str, Any]:
    """Sample one case."""
    files = files_of(path)
    size = sum(file.stat().st_size for file in files)
    cold: list[float] = []
    if plan.is_cold:
        say(f"{form} as {dtype}, cold")
        for file in files:
            drop_from_memory(file)
        cold.append(load_once(plan.child, path, dtype)["seconds"])
    samples: list[dict[str, Any]] = []
    for number in range(plan.repeats):
        say(f"{form} as {dtype}, {number + 1} of {plan.repeats}")
        samples.append(load_once(plan.child, path, dtype))
    first, peak = samples[0], max(sample["peak_bytes"] for sample in samples)
    bound = first["parameter_bytes"] + first["largest_bytes"] + SLACK
    return {
        "seconds": summarize([sample["seconds"] for sample in samples]),
        "work_seconds": summarize([sample["work_seconds"] for sample in samples]),
        "cold_seconds": summarize(cold),
        "file_bytes": size,
        "parameter_bytes": first["parameter_bytes"],
        "largest_bytes": first["largest_bytes"],
        "peak_bytes": peak,
        "before_bytes": max(sample["before_bytes"] for sample in samples),
        "bound_bytes": bound,
        "is_bounded": peak <= bound,
    }


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Write, load and remove every form."""
    described, found = machine.describe(), dict[str, Any]()
    for form in plan.forms:
        say(f"writing {form}")
        path = write_model(plan.folder, form, plan.shape)
        try:
            for dtype in plan.dtypes:
                found[f"{form} as {dtype}"] = measure(plan, path, form, dtype, say)
        finally:
            if not plan.keeps_files:
                _remove(path)
    return {
        "kind": "loading",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": described,
        "flags": {**vars(plan.shape), "repeats": plan.repeats},
        "models": [{"model": "random Llama", "cases": found}],
    }


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
