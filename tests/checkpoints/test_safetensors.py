"""Safetensors folders against the safetensors package, and everything that can be wrong with one."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from xjax.checkpoints.safetensors import INDEX_NAME, read_file, read_safetensors
from xjax.errors import LoadError


def _arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {
        "matrix": rng.standard_normal((5, 7)).astype(np.float32),
        "half": rng.standard_normal((3, 2, 4)).astype(np.float16),
        "double": rng.standard_normal(3),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "flags": np.array([True, False, True]),
    }
    for kind in (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64):
        arrays[np.dtype(kind).name] = rng.integers(0, 100, (2, 3)).astype(kind)
    return arrays


def test_values_equal_the_reference_reader(tmp_path: Path) -> None:
    save_file(_arrays(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors, files = read_safetensors(tmp_path)
    assert files == (tmp_path / "model.safetensors",)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as reference:
        assert tensors.keys() == set(reference.keys()) == _arrays().keys()
        for name, view in tensors.items():
            expected = reference.get_tensor(name)
            assert view.shape == expected.shape
            values = view.read()
            assert values.dtype == np.float32
            np.testing.assert_array_equal(values, expected.astype(np.float32))
            assert view.raw().tobytes() == expected.tobytes()


def _file(header: Any, data: bytes, *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def test_bfloat16_is_the_upper_half_of_float32(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3e38, 1e-40, np.inf, 0.0], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    header = {"x": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
    (tmp_path / "model.safetensors").write_bytes(_file(header, bits.tobytes()))
    read = read_safetensors(tmp_path).tensors["x"].read()
    expected = np.array(np.float64(values), np.float32).view(np.uint32) & 0xFFFF0000
    np.testing.assert_array_equal(read.reshape(-1).view(np.uint32), expected)


def _one(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


def _two(start: int, end: int, count: int = 4) -> dict[str, Any]:
    return _one() | {"y": {"dtype": "F32", "shape": [count], "data_offsets": [start, end]}}


HUGE = 2**64 - 1
BAD_FILES = {
    "empty": (b"", "empty"),
    "few bytes": (b"1234", "too few"),
    "header past the end": (_file(_one(), bytes(16), length=5000), "header of 5000 bytes"),
    "huge header": (_file(_one(), bytes(16), length=HUGE), f"header of {HUGE} bytes"),
    "no JSON": (_file(b"nonsense", b""), "not valid JSON"),
    "not UTF-8": (_file(b'{"\xff": 1}', b""), "not UTF-8"),
    "a list": (_file([1], b""), "expected a JSON object"),
    "nested too deeply": (_file(b'{"a":' * 100_000, b""), "nested too deeply"),
    "number too long": (_file(b'{"a":' + b"1" * 10_000 + b"}", b""), "not valid JSON"),
    "a name twice": (_file(b'{"x": {}, "x": {}}', b""), "'x' occurs twice"),
    "entry no object": (_file({"x": 3}, b""), "lacks dtype"),
    "entry incomplete": (_file({"x": {"dtype": "F32"}}, b""), "lacks dtype, shape or data_offsets"),
    "unknown type": (_file(_one(dtype="C64"), bytes(16)), "type 'C64'"),
    "type no string": (_file(_one(dtype=["F32"]), bytes(16)), "type ['F32']"),
    "negative shape": (_file(_one(shape=[-4]), bytes(16)), "is not a shape"),
    "shape of text": (_file(_one(shape=["4"]), bytes(16)), "is not a shape"),
    "shape of flags": (_file(_one(shape=[True]), bytes(16)), "is not a shape"),
    "overflowing shape": (_file(_one(shape=[2**62, 4]), bytes(16)), f"takes {2**66} bytes, not 16"),
    "offsets no pair": (_file(_one(data_offsets=[0]), bytes(16)), "pair of offsets"),
    "offsets reversed": (_file(_one(data_offsets=[16, 0]), bytes(16)), "takes 16 bytes, not -16"),
    "offsets negative": (_file(_one(data_offsets=[-16, 0]), bytes(16)), "pair of offsets"),
    "size differs": (_file(_one(shape=[5]), bytes(20)), "takes 20 bytes, not 16"),
    "cut off": (_file(_one(), bytes(15)), "cut off"),
    "offsets past the end": (_file(_one(data_offsets=[2**40, 2**40 + 16]), bytes(16)), "cut off"),
    "overlap": (_file(_two(8, 24), bytes(24)), "'y' overlaps tensor 'x'"),
    "gap": (_file(_two(20, 36), bytes(36)), "'y' leaves a gap after tensor 'x'"),
    "more at the end": (_file(_one(), bytes(17)), "1 bytes follow the last tensor"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_broken_files_get_one_clear_line(tmp_path: Path, case: str) -> None:
    data, message = BAD_FILES[case]
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(LoadError, match=r"model\.safetensors") as caught:
        read_safetensors(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


VALID = _file(
    {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
    },
    bytes(range(22)),
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(
    changes=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=3),
    length=st.integers(0, len(VALID)),
    is_cut=st.booleans(),
)
def test_no_mutation_does_worse_than_a_load_error(
    tmp_path: Path, changes: list[tuple[int, int]], length: int, is_cut: bool
) -> None:
    data = bytearray(VALID)
    for position, value in changes:
        data[position] = value
    path = tmp_path / "model.safetensors"
    path.write_bytes(data[:length] if is_cut else data)
    try:
        for view in read_file(path).values():
            view.read()
    except LoadError as error:
        assert "\n" not in str(error)


# ---- folders ------------------------------------------------------------------------------


def _sharded(folder: Path) -> dict[str, str]:
    save_file({"a": np.ones(2, np.float32)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.zeros(3, np.float32)}, folder / "model-00002-of-00002.safetensors")
    return {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def _write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_by_their_index(tmp_path: Path) -> None:
    weight_map = _sharded(tmp_path)
    _write_index(tmp_path, weight_map)
    tensors, files = read_safetensors(tmp_path)
    assert {name: view.file for name, view in tensors.items()} == weight_map
    assert [file.name for file in files] == sorted(weight_map.values())
    np.testing.assert_array_equal(tensors["a"].read(), [1, 1])


def test_shards_with_something_wrong(tmp_path: Path) -> None:
    weight_map = _sharded(tmp_path)
    for bad in ({}, [], None):
        _write_index(tmp_path, bad)
        with pytest.raises(LoadError, match="'weight_map' is missing or empty"):
            read_safetensors(tmp_path)
    for bad in ("../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a\0b", 3, ""):
        _write_index(tmp_path, weight_map | {"c": bad})
        with pytest.raises(LoadError, match="not the name of a file in this folder"):
            read_safetensors(tmp_path)
    _write_index(tmp_path, weight_map | {"c": weight_map["a"]})
    with pytest.raises(LoadError, match="00001-of-00002.safetensors: has no tensor 'c'"):
        read_safetensors(tmp_path)
    _write_index(tmp_path, weight_map)
    (tmp_path / weight_map["b"]).unlink()
    with pytest.raises(LoadError, match="00002-of-00002.safetensors: missing, but .*index.json names it"):
        read_safetensors(tmp_path)
    (tmp_path / INDEX_NAME).write_text("{")
    with pytest.raises(LoadError, match="index.json: not valid JSON"):
        read_safetensors(tmp_path)


def test_one_file_of_another_name_is_taken_and_none_is_explained(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="expected model.safetensors or .*, found no safetensors file$"):
        read_safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(LoadError, match="convert them to safetensors"):
        read_safetensors(tmp_path)
    _sharded(tmp_path)
    with pytest.raises(LoadError, match="found 2 files of other names"):
        read_safetensors(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert read_safetensors(tmp_path).tensors.keys() == {"a"}
