"""Arrays as orbax lays them on disk, looked at before it reads them: an error there is neither one nor quiet.

    NAME/.zarray     JSON: shape, chunks, dtype, no compressor
    NAME/0.0, ...    the chunks, of one size; an array up to a few GB is a single one

Knows no model and no orbax.
"""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from xjax.checkpoints.metadata import read_json
from xjax.checkpoints.saved import PARAMS, SavedArray, SavedFile, SavedModel
from xjax.errors import LoadError


def check_part(saved: SavedModel, folder: Path, number: int) -> None:
    """Compare what lies in a part with what the manifest says of its arrays. Raises LoadError."""
    files: dict[str, dict[str, SavedFile]] = {}
    for path in saved.part_files(number):
        _, _, name, *file = path.split("/")
        files.setdefault(name, {})["/".join(file)] = saved.files[path]
    stated = {name: array for name, array in saved.arrays.items() if array.part == number}
    there = {name for name, found in files.items() if ".zarray" in found}
    wrong = there.symmetric_difference(stated) or {
        name for name, array in stated.items() if not _is_as_stated(folder, number, name, array, files[name])
    }
    if wrong:
        raise LoadError(
            f"{folder / PARAMS / str(number) / min(wrong)}: not the array that the manifest describes; "
            "convert the model again"
        )


def _is_as_stated(
    folder: Path, number: int, name: str, array: SavedArray, files: Mapping[str, SavedFile]
) -> bool:
    shape, chunks = array.shape, {file: found for file, found in files.items() if file != ".zarray"}
    stated: dict[str, Any] = read_json(folder / PARAMS / str(number) / name / ".zarray")
    sides = stated.get("chunks")
    if not isinstance(sides, list) or len(sides) != len(shape):
        return False
    if not all(type(side) is int and side > 0 for side in sides):
        return False
    try:
        is_of_dtype = jnp.dtype(stated.get("dtype")) == jnp.dtype(array.dtype)
    except TypeError:
        return False
    counts = [-(-size // side) for size, side in zip(shape, sides, strict=True)]
    size = math.prod(sides) * jnp.dtype(array.dtype).itemsize
    return (
        stated.get("shape") == list(shape)
        and is_of_dtype
        and stated.get("compressor") is None
        and not stated.get("filters")
        and math.prod(counts) == len(chunks)
        and chunks.keys() == {".".join(map(str, at)) or "0" for at in itertools.product(*map(range, counts))}
        and all(file.size == size for file in chunks.values())
    )
