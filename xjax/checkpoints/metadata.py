"""Read the JSON files beside the weights, and what they say about stopping and sampling.

`eos_ids` and `generation_defaults` work on an open checkpoint of either kind. Knows no
tokenizer and no architecture.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from xjax.errors import LoadError

_MAX_JSON_BYTES = 256 << 20
_GGUF_EOS_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
_GGUF_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
# name -> (lowest, highest, lowest is allowed)
_SAMPLING_RANGES = {
    "temperature": (0.0, 100.0, True),
    "top_k": (-1.0, 2.0**31, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.01, 100.0, True),
}


class Described(Protocol):
    """What this module reads of a checkpoint."""

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...
    @property
    def path(self) -> Path: ...


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; LoadError with one line for anything else, doubled keys included."""

    def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            raise LoadError(f"{where}: {next(n for n in names if names.count(n) > 1)!r} occurs twice")
        return result

    try:
        value = json.loads(text, object_pairs_hook=without_doubles)
    except UnicodeDecodeError as error:
        raise LoadError(f"{where}: not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise LoadError(f"{where}: not valid JSON: {error.msg} in line {error.lineno}") from error
    except RecursionError as error:
        raise LoadError(f"{where}: the JSON is nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise LoadError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value  # type: ignore[return-value]


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; LoadError if it is not there or is anything else."""
    try:
        if path.exists() and not path.is_file():
            raise LoadError(f"{path}: cannot be read: not a regular file")
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise LoadError(f"{path}: larger than {_MAX_JSON_BYTES >> 20} MB, too large for a JSON file")
        text = path.read_bytes()
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_json(text, str(path))


def read_optional_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; an empty one if there is no such file."""
    return read_json(path) if path.exists() else {}


def _token_ids(value: object, where: str) -> set[int]:
    values: list[object] = list(value) if isinstance(value, list) else [value]  # type: ignore[arg-type]
    ids: set[int] = set()
    for item in values:
        if item is None:
            continue
        if isinstance(item, bool) or not isinstance(item, int):
            raise LoadError(f"{where}: {item!r} is not a token id")
        ids.add(item)
    return ids


def eos_ids(checkpoint: Described) -> frozenset[int]:
    """Return every token id that any source of the checkpoint names as an end of sequence."""
    config, where = checkpoint.config, checkpoint.path
    text_config: Any = config.get("text_config")
    sources: list[Mapping[str, Any]] = [config, checkpoint.generation_config]
    if isinstance(text_config, dict):
        sources.append(text_config)  # type: ignore[arg-type]
    ids: set[int] = set()
    for source in sources:
        ids |= _token_ids(source.get("eos_token_id"), f"{where}: eos_token_id")
    for key in _GGUF_EOS_KEYS:
        ids |= _token_ids(config.get(key), f"{where}: {key}")
    return frozenset(id for id in ids if id >= 0)  # -1 is how some converters write "none"


def generation_defaults(checkpoint: Described) -> dict[str, float | int]:
    """Return the sampling settings that the model's authors recommend, by our names.

    Only what is written down is returned. An explicit `do_sample: false` asks for greedy
    decoding: its temperature and cut-offs are then not meant, and temperature is 0.
    """
    stated: dict[str, Any] = {
        name: checkpoint.generation_config.get(name, checkpoint.config.get(key))
        for name, key in _GGUF_SAMPLING_KEYS.items()
    }
    defaults: dict[str, float | int] = {}
    for name, value in stated.items():
        if value is not None:
            defaults[name] = _checked_setting(name, value, f"{checkpoint.path}: generation setting {name}")
    if checkpoint.generation_config.get("do_sample") is False:
        kept = {name: value for name, value in defaults.items() if name == "repetition_penalty"}
        return {"temperature": 0.0, **kept}
    return defaults


def _checked_setting(name: str, value: object, where: str) -> float | int:
    low, high, with_low = _SAMPLING_RANGES[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high or (value == low and not with_low):  # type: ignore[operator]
        raise LoadError(f"{where}: {value!r} is not a number from {low:g} to {high:g}")
    return int(value) if name == "top_k" else float(value)  # type: ignore[arg-type]
