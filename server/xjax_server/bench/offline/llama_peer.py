"""llama.cpp as a subject of the benchmark: its own `llama-bench`, and `llama-batched-bench` beside it.

    prefill          llama-bench -p TOKENS
    decode, 1 row    llama-bench -n STEPS -d CONTEXT
    decode, more     llama-batched-bench -npp CONTEXT -ntg STEPS -npl ROWS,ROWS,1

The programs read the very GGUF file that we read and time themselves, after a warm-up; loading is not
counted. `tune` runs a case with each of some settings, and that case runs with the fastest from then
on. They take random tokens of their own, so that there is nothing to compare tokens with.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from xjax.errors import EngineError, LoadError, XjaxError
from xjax_server.bench.programs import find_program, llama_build, output_of

BATCHED = "llama-batched-bench"
_CELLS = 256  # the number of tokens that a cache is made for is rounded up to a multiple of this
_NS = 1e-9
_DECODES, _PREFILLS = 3, 1  # samples of a question
_TRIES = 3  # the batched program's log may lose what it printed last


@dataclass(frozen=True)
class Setting:
    """Flags that are tried, and what to call them."""

    name: str
    flags: tuple[str, ...] = ()


SETTINGS = (
    Setting("defaults"),
    Setting("micro-batch 128", ("-b", "512", "-ub", "128")),
    Setting("micro-batch 2048", ("-b", "2048", "-ub", "2048")),
    Setting("flash attention", ("-fa", "on")),
    Setting("no flash attention", ("-fa", "off")),
    Setting("8-bit cache", ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")),
)
ONE_CACHE = Setting("one cache for all rows", ("-kvu",))  # which the batched program alone can have

Case = tuple[int, int]  # rows; tokens of a prefill, 0: decode


def missing(path: str) -> str | None:
    """Say why the peer cannot run, None when it can."""
    if find_program("llama-bench", path) is None:
        return f"{path} is no program" if path else "not installed; give llama-bench=PATH"
    return None


class LlamaPeer:
    """llama.cpp's benchmarks of one file, a process for each question."""

    def __init__(self, model: str, *, threads: int, path: str = "") -> None:
        program = find_program("llama-bench", path)
        if program is None:
            raise LoadError(f"the llama.cpp peer cannot run: {missing(path)}")
        self._program, self._model, self._threads = program, model, str(threads)
        self._chosen: dict[Case, Setting] = {}

    @property
    def _batched(self) -> str:
        path = Path(self._program).resolve().with_name(BATCHED)
        if not path.is_file():
            raise EngineError(f"decoding of several rows needs {BATCHED} beside {self._program}")
        return str(path)

    def describe(self) -> dict[str, Any]:
        """How it was built, and the bytes of the file's tensors."""
        entry = self._bench(["-p", "1", "-n", "0"], SETTINGS[0])
        size = entry.get("model_size")
        return {
            "build": llama_build(self._program),
            "options": {"threads": self._threads},
            "read_bytes": size if isinstance(size, int) else None,
            "kv_width": 2.0,
        }

    def check(self, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
        """No `ids`: see the module's description; raises where the file cannot be run."""
        del prompt, num_tokens
        self._bench(["-p", "1", "-n", "0"], SETTINGS[0])
        return {"ids": None}

    def tune(self, *, rows: int, tokens: int, context: int, num_tokens: int) -> dict[str, Any]:
        """Run a case with each setting and keep the fastest: its name, and what each of them gave.

        tokens   of a prefill, 0 for a decode of `num_tokens` behind `context` tokens
        Raises EngineError with the first failure where none of them runs.
        """
        tried: list[dict[str, Any]] = []
        settings = SETTINGS if tokens or rows == 1 else (*SETTINGS, ONE_CACHE)
        for setting in settings:
            seconds, error = None, None
            try:
                seconds = min(self._time(rows, tokens, context, num_tokens, setting))
            except XjaxError as failure:
                error = str(failure)
            tried.append({"name": setting.name, "flags": setting.flags, "seconds": seconds, "error": error})
        times = [item["seconds"] or float("inf") for item in tried]
        best = times.index(min(times))
        if tried[best]["seconds"] is None:
            raise EngineError(str(tried[0]["error"]))
        self._chosen[rows, tokens] = settings[best]
        return {"setting": settings[best].name, "tried": tried}

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """`seconds` of a prompt of that length."""
        return {"seconds": self._time(1, len(prompt), 0, 0, self._setting(1, len(prompt)))}

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
        """`seconds` of a step, the mean of `num_tokens` of them behind prompts of that length."""
        rows = len(prompts)
        return {"seconds": self._time(rows, 0, len(prompts[0]), num_tokens, self._setting(rows, 0))}

    def _setting(self, rows: int, tokens: int) -> Setting:
        return self._chosen.get((rows, tokens), SETTINGS[0])

    def _time(self, rows: int, tokens: int, context: int, num_tokens: int, setting: Setting) -> list[float]:
        if tokens:
            return _samples(self._bench(["-p", str(tokens), "-n", "0"], setting), 1)
        if rows == 1:
            flags = ["-p", "0", "-n", str(num_tokens), "-d", str(context)]
            return _samples(self._bench(flags, setting, _DECODES), num_tokens)
        for _ in range(_TRIES - 1):
            with suppress(NoTimes):
                return self._batch(rows, context, num_tokens, setting)
        return self._batch(rows, context, num_tokens, setting)

    def _bench(self, flags: Sequence[str], setting: Setting, samples: int = _PREFILLS) -> dict[str, Any]:
        """What `llama-bench` tells of one test."""
        command = [self._program, "-m", self._model, "-t", self._threads, "-r", str(samples), "-o", "json"]
        return bench_entry(output_of([*command, *flags, *setting.flags], with_errors=False))

    def _batch(self, rows: int, context: int, num_tokens: int, setting: Setting) -> list[float]:
        """Seconds of a step of several rows, of each sample.

        The single row at the end keeps the program alive until its log has written the lines before.
        """
        cells = rows * -(-(context + num_tokens) // _CELLS) * _CELLS
        command = [self._batched, "-m", self._model, "-t", self._threads, "-tb", self._threads]
        sizes = ["-c", str(cells), "-npp", str(context), "-ntg", str(num_tokens), "-npl", f"{rows},{rows},1"]
        printed = output_of([*command, *sizes, "--output-format", "jsonl", *setting.flags], with_errors=False)
        return [seconds / num_tokens for seconds in batch_seconds(printed, rows, num_tokens)]

    def close(self) -> None:
        """Nothing to let go of."""


def bench_entry(printed: str) -> dict[str, Any]:
    """The one test that `llama-bench -o json` tells of. Raises EngineError for anything else."""
    try:
        found: Any = json.loads(printed)
    except ValueError as error:
        raise EngineError(f"llama-bench printed no JSON: {_start(printed)}") from error
    entries = cast("list[Any]", found) if isinstance(found, list) else []
    if len(entries) != 1 or not isinstance(entries[0], dict):
        raise EngineError(f"llama-bench printed no list of one test: {_start(printed)}")
    return cast("dict[str, Any]", entries[0])


def _samples(entry: dict[str, Any], count: int) -> list[float]:
    """Seconds of each sample over `count`."""
    found = entry.get("samples_ns")
    samples = cast("list[Any]", found) if isinstance(found, list) else []
    if not samples or not all(isinstance(sample, int | float) and sample > 0 for sample in samples):
        raise EngineError(f"llama-bench told no times: expected samples_ns above 0, got {found!r}")
    return [sample * _NS / count for sample in samples]


class NoTimes(EngineError):
    """The batched program ended well and told no times."""


def batch_seconds(printed: str, rows: int, num_tokens: int) -> list[float]:
    """Seconds of decoding that `llama-batched-bench` tells of, of each sample; raises NoTimes for none."""
    found: list[float] = []
    for line in printed.splitlines():
        try:
            value: Any = json.loads(line)
        except ValueError:
            continue
        entry = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        seconds = entry.get("t_tg")
        if entry.get("pl") == rows and entry.get("tg") == num_tokens and isinstance(seconds, float):
            found += [seconds] if seconds > 0 else []
    if not found:
        raise NoTimes(f"{BATCHED} told no time of {num_tokens} tokens of {rows} rows: {_start(printed)}")
    return found


def _start(printed: str) -> str:
    return repr(printed[:80]) if printed else "it printed nothing"
