"""GGUF headers: equality with the gguf package's reader, hostile files, split files."""

import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xjax.checkpoints.gguf import StringArray, metadata_alone, read_gguf
from xjax.errors import LoadError

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str, dims: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_entries)
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


ARCH = entry("general.architecture", STRING, text("llama"))


def write(folder: Path, data: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


# ---- equality with the reference reader ---------------------------------------------------


def _written(folder: Path) -> Path:
    """A file with every kind of value and every tensor type, written by the gguf package."""
    writer = gguf.GGUFWriter(folder / "all.gguf", "llama")
    for name, value in {
        "uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 2**32 - 1,
        "int32": -(2**31), "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.1, "float64": 0.1,
        "bool": True, "string": "é🙂\n",
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(f"test.{name}", value)
    writer.add_array("test.strings", ["", "a", "ü🙂", "x" * 300])
    writer.add_array("test.ints", [1, -2, 3])
    writer.add_array("test.floats", [0.5, -1.25, 1e30])
    writer.add_array("test.bools", [True, False, True])
    writer.add_array("test.nested", [[1, 2], [3]])
    rng = np.random.default_rng(1)
    for kind, (_, type_size) in gguf.GGML_QUANT_SIZES.items():
        data = rng.integers(0, 256, (3, 2 * type_size), np.uint8)
        writer.add_tensor(f"t.{kind.name}", data, raw_dtype=kind)
    writer.add_tensor("t.cube", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "all.gguf"


def _plain(value: Any) -> Any:
    if isinstance(value, StringArray | list):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_metadata_equals_the_reference_reader(tmp_path: Path) -> None:
    path = _written(tmp_path)
    metadata = read_gguf(path).metadata
    fields = {k: v for k, v in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
    assert metadata.keys() == fields.keys()
    assert len(fields) > 15
    for key, field in fields.items():
        if key != "test.nested":  # the reference flattens these
            assert _plain(metadata[key]) == field.contents(), key
    assert _plain(metadata["test.nested"]) == [[1, 2], [3]]


def test_tensors_equal_the_reference_reader(tmp_path: Path) -> None:
    path = _written(tmp_path)
    tensors = read_gguf(path).tensors
    reference = gguf.GGUFReader(path).tensors
    assert list(tensors) == [item.name for item in reference]
    assert len(reference) == len(gguf.GGML_QUANT_SIZES) + 1
    for item in reference:
        view = tensors[item.name]
        assert view.shape == tuple(int(n) for n in reversed(item.shape.tolist()))
        np.testing.assert_array_equal(view.raw(), item.data.reshape(-1).view(np.uint8))
        assert not view.raw().flags.writeable
    np.testing.assert_array_equal(tensors["t.cube"].read(), np.arange(24).reshape(2, 3, 4))


def test_reading_a_type_without_decoder_names_tensor_and_type(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"all\.gguf: tensor t\.Q8_K is stored as q8_k"):
        read_gguf(_written(tmp_path)).tensors["t.Q8_K"].read()


@pytest.mark.parametrize("version", [2, 3])
def test_a_large_vocabulary_opens_fast(tmp_path: Path, version: int) -> None:
    count = 262_144
    tokens = b"".join(text(f"token{i}") for i in range(count))
    scores = np.arange(count, dtype=np.float32)
    data = gguf_bytes(
        [
            ARCH,
            entry("tokens", ARRAY, struct.pack("<IQ", STRING, count) + tokens),
            entry("scores", ARRAY, struct.pack("<IQ", F32, count) + scores.tobytes()),
        ],
        version=version,
    )
    path = write(tmp_path, data)
    times: list[float] = []
    for _ in range(3):
        start = time.process_time()
        metadata = read_gguf(path).metadata
        times.append(time.process_time() - start)
    assert min(times) < 0.2
    assert len(metadata["tokens"]) == count
    assert metadata["tokens"][count - 1] == f"token{count - 1}"
    assert metadata["tokens"][:2] == ["token0", "token1"]
    np.testing.assert_array_equal(metadata["scores"], scores)


# ---- broken and hostile files -------------------------------------------------------------

FLOATS = np.zeros(64, np.float32).tobytes()
HUGE = 2**63 + 5
BAD_FILES = {
    "empty": (b"", "empty"),
    "short": (b"GG", "not a GGUF file"),
    "other magic": (gguf_bytes([ARCH], magic=b"PK\3\4"), "not a GGUF file"),
    "only magic": (b"GGUF", "ends inside the header"),
    "version 1": (gguf_bytes([ARCH], version=1), "version 1"),
    "version 9": (gguf_bytes([ARCH], version=9), "version 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "huge tensor count": (gguf_bytes([ARCH], counts=(HUGE, 1)), f"{HUGE} tensors cannot fit"),
    "huge entry count": (gguf_bytes([ARCH], counts=(0, HUGE)), f"{HUGE} metadata entries cannot fit"),
    "too many entries": (gguf_bytes([ARCH, bytes(64)], counts=(0, 4)), "metadata"),
    "huge key": (gguf_bytes([struct.pack("<Q", HUGE) + bytes(64)]), "cannot fit"),
    "huge string": (gguf_bytes([text("k") + struct.pack("<IQ", STRING, HUGE)]), "metadata entry 'k'"),
    "huge array": (gguf_bytes([entry("k", ARRAY, struct.pack("<IQ", U8, HUGE))]), "array items cannot fit"),
    "huge string array": (gguf_bytes([entry("k", ARRAY, struct.pack("<IQ", STRING, HUGE))]), "strings"),
    "string past the end": (
        gguf_bytes([entry("k", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE) + bytes(64))]),
        "ends inside the metadata entry 'k'",
    ),
    "unknown value type": (gguf_bytes([entry("k", 13, bytes(8))]), "value type 13"),
    "unknown item type": (gguf_bytes([entry("k", ARRAY, struct.pack("<IQ", 77, 1))]), "item type 77"),
    "deep nesting": (
        gguf_bytes([entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000 + struct.pack("<IQ", U8, 0))]),
        "nested",
    ),
    "key not UTF-8": (gguf_bytes([entry(b"\xff\xfe", U8, b"\0")]), "not UTF-8"),
    "no key": (gguf_bytes([entry("", U8, b"\0")]), "key of 0"),
    "key twice": (gguf_bytes([ARCH, ARCH]), "occurs twice"),
    "tensor twice": (gguf_bytes([ARCH], [tensor("a", [4]), tensor("a", [4], 0, 32)], FLOATS), "'a' occurs"),
    "tensors overlap": (
        gguf_bytes([ARCH], [tensor("a", [16]), tensor("b", [16], offset=32)], FLOATS),
        "'a' and 'b' overlap",
    ),
    "unaligned": (gguf_bytes([ARCH], [tensor("a", [4], offset=4)], FLOATS), "not a multiple of 32"),
    "unknown tensor type": (gguf_bytes([ARCH], [tensor("a", [4], kind=4)], FLOATS), "type 4"),
    "too many dimensions": (gguf_bytes([ARCH], [tensor("a", [1] * 5)], FLOATS), "5 dimensions"),
    "billions of dimensions": (
        gguf_bytes([ARCH], [text("a") + struct.pack("<I", 2**32 - 1) + bytes(64)], FLOATS),
        "dimensions",
    ),
    "empty dimension": (gguf_bytes([ARCH], [tensor("a", [4, 0])], FLOATS), "empty dimension"),
    "dimensions that overflow": (gguf_bytes([ARCH], [tensor("a", [2**32] * 4)], FLOATS), "should end at"),
    "dimensions that wrap to 0": (gguf_bytes([ARCH], [tensor("a", [2**63, 2])], FLOATS), "should end at"),
    "rows of broken blocks": (gguf_bytes([ARCH], [tensor("a", [33], kind=2)], FLOATS), "multiple of 32"),
    "offset past the end": (gguf_bytes([ARCH], [tensor("a", [4], offset=2**40)], FLOATS), "should end"),
    "cut data": (gguf_bytes([ARCH], [tensor("a", [64])], FLOATS[:-1]), "cut off"),
    "alignment 0": (gguf_bytes([entry("general.alignment", U32, bytes(4))]), "power of two"),
    "alignment 24": (gguf_bytes([entry("general.alignment", U32, b"\x18\0\0\0")]), "power of two"),
    "alignment a string": (gguf_bytes([entry("general.alignment", STRING, text("32"))]), "power of two"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_broken_files_get_one_clear_line(tmp_path: Path, case: str) -> None:
    data, message = BAD_FILES[case]
    path = write(tmp_path, data)
    start = time.process_time()
    with pytest.raises(LoadError, match="model.gguf") as caught:
        read_gguf(path)
    assert time.process_time() - start < 0.5
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(LoadError, match="cannot be read"):
            read_gguf(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(LoadError, match="cannot be read: not a regular file"):
        read_gguf(tmp_path / "pipe.gguf")


def test_a_string_that_is_not_utf8_is_found_when_decoded(tmp_path: Path) -> None:
    strings = text("a") + text(b"\xc3\x28")
    path = write(tmp_path, gguf_bytes([entry("k", ARRAY, struct.pack("<IQ", STRING, 2) + strings)]))
    with pytest.raises(LoadError, match="entry 'k': string 1 is not UTF-8"):
        list(read_gguf(path).metadata["k"])


VALID = gguf_bytes(
    [
        ARCH,
        entry("general.alignment", U32, struct.pack("<I", 32)),
        entry("strings", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("bc") + text("")),
        entry("numbers", ARRAY, struct.pack("<IQ3f", F32, 3, 1, 2, 3)),
        entry("nested", ARRAY, struct.pack("<IQIQ2B", ARRAY, 1, U8, 2, 1, 2)),
    ],
    [tensor("x", [8, 2]), tensor("y", [32, 2], kind=3, offset=64), tensor("z", [4], kind=1, offset=128)],
    bytes(range(256)),
)


def _open_all(path: Path) -> None:
    file = read_gguf(path)
    for value in file.metadata.values():
        if isinstance(value, StringArray):
            list(value)
    for view in file.tensors.values():
        view.read()


def test_the_file_that_is_mutated_is_valid(tmp_path: Path) -> None:
    _open_all(write(tmp_path, VALID))


@settings(max_examples=400, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(
    changes=st.lists(st.tuples(st.integers(0, len(VALID) - 256), st.integers(0, 255)), max_size=4),
    words=st.lists(
        st.tuples(
            st.integers(0, len(VALID) - 264), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1])
        ),
        max_size=2,
    ),
    length=st.integers(len(VALID) // 8, len(VALID) * 3 // 2),
)
def test_no_mutation_does_worse_than_a_load_error(
    tmp_path: Path, changes: list[tuple[int, int]], words: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(VALID)
    for position, value in changes:
        data[position] = value
    for position, value in words:
        data[position : position + 8] = struct.pack("<Q", value)
    path = write(tmp_path, bytes(data[:length]))
    start = time.process_time()
    try:
        _open_all(path)
    except LoadError as error:
        assert "\n" not in str(error)
    assert time.process_time() - start < 1


# ---- split models -------------------------------------------------------------------------


def _part(number: int, count: int, tensors: Sequence[str], *, total: int = 2, first: bool = False) -> bytes:
    entries = [
        entry("split.no", U16, struct.pack("<H", number)),
        entry("split.count", U16, struct.pack("<H", count)),
        entry("split.tensors.count", I32, struct.pack("<i", total)),
    ]
    infos = [tensor(name, [4], offset=32 * index) for index, name in enumerate(tensors)]
    data = b"".join(np.full(8, number, np.float32).tobytes() for _ in tensors)
    return gguf_bytes([ARCH, *entries] if first else entries, infos, data)


def _split_model(folder: Path) -> list[Path]:
    parts = [_part(0, 3, [], first=True), _part(1, 3, ["a"]), _part(2, 3, ["b"])]
    return [write(folder, data, f"m-{i + 1:05d}-of-00003.gguf") for i, data in enumerate(parts)]


def test_a_split_model_opens_from_any_part(tmp_path: Path) -> None:
    paths = _split_model(tmp_path)
    for path in paths:
        file = read_gguf(path)
        assert file.files == tuple(paths)
        assert file.metadata["general.architecture"] == "llama"
        assert {name: view.read()[0] for name, view in file.tensors.items()} == {"a": 1, "b": 2}
        assert file.tensors["b"].file == "m-00003-of-00003.gguf"


def test_split_models_with_something_wrong(tmp_path: Path) -> None:
    first, second, third = _split_model(tmp_path)
    second.write_bytes(_part(2, 3, ["a"]))
    with pytest.raises(LoadError, match="by its name part 2 of 3, by its header part 2 .from 0. of 3"):
        read_gguf(first)
    second.write_bytes(_part(1, 4, ["a"]))
    with pytest.raises(LoadError, match="of 4"):
        read_gguf(first)
    second.write_bytes(_part(1, 3, ["b"]))
    with pytest.raises(LoadError, match="tensor 'b' lies in an earlier part too"):
        read_gguf(first)
    second.write_bytes(_part(1, 3, []))
    with pytest.raises(LoadError, match="hold 1 tensors, the header says 2"):
        read_gguf(first)
    second.unlink()
    with pytest.raises(LoadError, match=r"m-00002-of-00003\.gguf: part 2 of 3 of the model is missing"):
        read_gguf(third)
    alone = third.rename(tmp_path / "renamed.gguf")
    with pytest.raises(LoadError, match="one of 3 parts"):
        read_gguf(alone)


@pytest.mark.model
def test_the_default_model_equals_the_reference_reader(smollm2_path: Path) -> None:
    file, reference = read_gguf(smollm2_path), gguf.GGUFReader(smollm2_path)
    assert {item.name for item in reference.tensors} == file.tensors.keys()
    for item in reference.tensors[1:12]:  # the embedding takes the reference seconds
        values = gguf.quants.dequantize(item.data, item.tensor_type)
        np.testing.assert_array_equal(
            file.tensors[item.name].read(), values.reshape(file.tensors[item.name].shape)
        )
    tokens = reference.fields["tokenizer.ggml.tokens"].contents()
    assert file.metadata["tokenizer.ggml.tokens"] == tokens


# ---- metadata alone -----------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_alone_is_that_of_the_file(version: int, tmp_path: Path) -> None:
    words = struct.pack("<IQ", STRING, 2) + text("a") + text("\u00e9")
    entries = [ARCH, entry("tokenizer.ggml.tokens", ARRAY, words), entry("x.y", F32, struct.pack("<f", 0.1))]
    path = write(tmp_path, gguf_bytes(entries, [tensor("w", [2])], bytes(8), version=version))
    alone = write(tmp_path, metadata_alone(path), "metadata.gguf")
    found, wanted = read_gguf(alone), read_gguf(path)
    assert dict(found.metadata) == dict(wanted.metadata)
    assert list(found.metadata) == list(wanted.metadata)
    assert found.tensors == {}
    assert metadata_alone(alone) == alone.read_bytes()


def test_metadata_alone_of_a_part_is_of_no_parts(tmp_path: Path) -> None:
    first = _split_model(tmp_path)[0]
    alone = write(tmp_path, metadata_alone(first), "metadata.gguf")
    wanted = {key: value for key, value in read_gguf(first).metadata.items() if not key.startswith("split.")}
    assert dict(read_gguf(alone).metadata) == wanted
