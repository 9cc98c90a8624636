"""What lies in a part is compared with the manifest before orbax reads it."""

import dataclasses
import json

import pytest

from xjax.checkpoints.saved import SavedArray, SavedModel, describe_files
from xjax.errors import LoadError
from xjax.weights.saved.zarr import check_part

ARRAY = {
    "shape": [3, 5], "chunks": [2, 5], "dtype": "<f4", "compressor": None, "filters": None,
    "fill_value": None, "order": "C", "zarr_format": 2, "dimension_separator": ".",
}  # fmt: skip
CHUNKS = {"0.0": 40, "1.0": 40}  # the last one is filled up


def write(folder, described=ARRAY, chunks=CHUNKS) -> SavedModel:
    """A part of one array "w", in two chunks as orbax makes them of an array of gigabytes."""
    (folder / "params/0/w").mkdir(parents=True)
    (folder / "params/0/_METADATA").write_text("{}")
    (folder / "params/0/w/.zarray").write_text(json.dumps(described))
    for name, size in chunks.items():
        (folder / "params/0/w" / name).write_bytes(bytes(size))
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return SavedModel(
        kind="hf", architecture="", family="", config={}, dtype="", source="",
        arrays={"w": SavedArray((3, 5), "float32", 0)}, quantized={}, files=describe_files(folder, names),
    )  # fmt: skip


def test_chunks(tmp_path):
    check_part(write(tmp_path), tmp_path, 0)


@pytest.mark.parametrize(
    ("shape", "dtype", "name"),
    [([7], "bfloat16", "0"), ([], "|i1", "0"), ([1, 2, 3], "float8_e4m3fn", "0.0.0"), ([4, 2], "<f2", "0.0")],
)
def test_one_chunk(shape, dtype, name, tmp_path):
    sizes = {"bfloat16": 14, "|i1": 1, "float8_e4m3fn": 6, "<f2": 16}
    saved = write(tmp_path, {**ARRAY, "shape": shape, "chunks": shape, "dtype": dtype}, {name: sizes[dtype]})
    kind = {"|i1": "int8", "<f2": "float16"}.get(dtype, dtype)
    saved = dataclasses.replace(saved, arrays={"w": SavedArray(tuple(shape), kind, 0)})
    check_part(saved, tmp_path, 0)


@pytest.mark.parametrize(
    ("change", "chunks"),
    [
        ({"shape": [3, 6]}, CHUNKS),
        ({"shape": "3"}, CHUNKS),
        ({"chunks": [2]}, CHUNKS),
        ({"chunks": [0, 5]}, CHUNKS),
        ({"chunks": [2, True]}, CHUNKS),
        ({"chunks": [10**9, 10**9]}, {"0.0": 40}),
        ({"dtype": "<f8"}, CHUNKS),
        ({"dtype": 3}, CHUNKS),
        ({"dtype": "nope"}, CHUNKS),
        ({"compressor": {"id": "zstd"}}, CHUNKS),
        ({"filters": [{"id": "delta"}]}, CHUNKS),
        ({}, {"0.0": 40}),
        ({}, {"0.0": 40, "1.1": 40}),
        ({}, {"0.0": 40, "1.0": 20}),
        ({}, {"0.0": 40, "1.0": 40, "2.0": 40}),
    ],
)
def test_what_is_not_as_stated(change, chunks, tmp_path):
    saved = write(tmp_path, {**ARRAY, **change}, chunks)
    with pytest.raises(LoadError, match="params/0/w: not the array that the manifest describes"):
        check_part(saved, tmp_path, 0)


def test_an_array_more_or_less(tmp_path):
    saved = write(tmp_path)
    with pytest.raises(LoadError, match="params/0/w: not the array"):
        check_part(dataclasses.replace(saved, arrays={}), tmp_path, 0)
    more = {**saved.arrays, "v": SavedArray((1,), "float32", 0)}
    with pytest.raises(LoadError, match="params/0/v: not the array"):
        check_part(dataclasses.replace(saved, arrays=more), tmp_path, 0)
