"""Read the header of a GGUF file (versions 2 and 3, little-endian, split or not).

The header is walked once over the mapped file. Every count and offset is checked against
the bytes that are there before it is used, so a broken or hostile file ends in a LoadError
and costs no more time or memory than its own size. Knows no model and no key's meaning but
those of the format itself.
"""

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, overload

import numpy as np

from xjax.checkpoints.dequantize import BLOCK_TYPES, num_bytes
from xjax.checkpoints.tensor import MappedFile, TensorView
from xjax.errors import LoadError

TENSOR_TYPES = {
    0: "float32", 1: "float16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1",
    10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs",
    18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "int8",
    25: "int16", 26: "int32", 27: "int64", 28: "float64", 29: "iq1_m", 30: "bfloat16", 34: "tq1_0",
    35: "tq2_0", 39: "mxfp4", 40: "nvfp4", 41: "q1_0",
}  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_NESTING = 4
_MAX_NAME = 1 << 16
_DEFAULT_ALIGNMENT = 32
_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_U64 = struct.Struct("<Q")


class GGUFFile(NamedTuple):
    """Metadata, tensors and files of one model."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorView]
    files: tuple[Path, ...]


class StringArray(Sequence[str]):
    """Strings of a metadata array, decoded all together when one is first asked for."""

    def __init__(self, buffer: memoryview, count: int, where: str) -> None:
        self._buffer = buffer
        self._count = count
        self._where = where
        self._strings: list[str] | None = None

    def _decoded(self) -> list[str]:
        if self._strings is None:
            data = bytes(self._buffer)
            strings: list[str] = []
            position = 0
            try:
                for _ in range(self._count):
                    start = position + 8
                    position = start + int.from_bytes(data[position:start], "little")
                    strings.append(data[start:position].decode())
            except UnicodeDecodeError as error:
                raise LoadError(f"{self._where}: string {len(strings)} is not UTF-8") from error
            self._strings = strings
        return self._strings

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._decoded()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return False
        items: Sequence[object] = other  # type: ignore[assignment]
        return list(self) == list(items)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


class _Cursor:
    """A position in the header; every step is checked against the end of the file."""

    def __init__(self, mapped: MappedFile) -> None:
        self.buffer = mapped.buffer()
        self.size = mapped.size
        self.file = str(mapped.path)
        self.position = 0
        self.what = "header"

    def fail(self, message: str) -> NoReturn:
        raise LoadError(f"{self.file}: {message}")

    def advance(self, count: int) -> int:
        start = self.position
        if count > self.size - start:
            self.fail(f"the file ends inside the {self.what}; it is cut off or not a GGUF file")
        self.position = start + count
        return start

    def number(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self.buffer, self.advance(layout.size))[0]

    def count(self, item_size: int, things: str) -> int:
        """Read a 64-bit count of things that take at least `item_size` bytes each."""
        count = self.number("Q")
        if count * item_size > self.size - self.position:
            self.fail(f"{self.what}: {count} {things} cannot fit in the rest of the file")
        return count

    def text(self, things: str) -> str:
        start = self.advance(self.count(1, f"bytes of {things}"))
        try:
            return str(self.buffer[start : self.position], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{self.what}: the {things} is not UTF-8")

    def skip_strings(self, count: int) -> memoryview:
        """Walk over `count` strings and return their bytes, lengths included."""
        # The one hot loop of opening a model: a vocabulary and its merges, about a million steps.
        first = position = self.position
        unpack, buffer, last = _U64.unpack_from, self.buffer, self.size - 8
        for _ in range(count):
            if position > last:
                break
            position += 8 + unpack(buffer, position)[0]
        else:
            if position <= self.size:
                self.position = position
                return buffer[first:position]
        self.fail(f"the file ends inside the {self.what}; it is cut off or a string has a wrong length")


def _read_value(cursor: _Cursor, kind: int, depth: int = 0) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.text("value")
    if kind != _ARRAY:
        cursor.fail(f"{cursor.what}: value type {kind} is unknown")
    item, depth = cursor.number("I"), depth + 1
    if item in _SCALARS:
        dtype = np.dtype("<" + _SCALARS[item])
        count = cursor.count(dtype.itemsize, "array items")
        start = cursor.advance(count * dtype.itemsize)
        values = np.frombuffer(cursor.buffer, dtype, count, start).copy()
        values.flags.writeable = False
        return values
    if item == _STRING:
        count = cursor.count(8, "strings")
        return StringArray(cursor.skip_strings(count), count, f"{cursor.file}: {cursor.what}")
    if item != _ARRAY:
        cursor.fail(f"{cursor.what}: array item type {item} is unknown")
    if depth > _MAX_NESTING:
        cursor.fail(f"{cursor.what}: arrays are nested more than {_MAX_NESTING} deep")
    return [_read_value(cursor, _ARRAY, depth) for _ in range(cursor.count(12, "arrays"))]


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        cursor.what = f"metadata entry {index}"
        key = cursor.text("key")
        if not 0 < len(key) <= _MAX_NAME:
            cursor.fail(f"{cursor.what}: a key of {len(key)} characters is not allowed")
        if key in metadata:
            cursor.fail(f"metadata key {key!r} occurs twice")
        cursor.what = f"metadata entry {key!r}"
        metadata[key] = _read_value(cursor, cursor.number("I"))
    return metadata


def _read_tensor_info(cursor: _Cursor, index: int) -> _TensorInfo:
    cursor.what = f"entry of tensor {index}"
    name = cursor.text("name")
    if not 0 < len(name) <= _MAX_NAME:
        cursor.fail(f"{cursor.what}: a name of {len(name)} characters is not allowed")
    cursor.what = f"entry of tensor {name!r}"
    num_dims = cursor.number("I")
    if not 0 <= num_dims <= _MAX_DIMS:
        cursor.fail(f"tensor {name!r} has {num_dims} dimensions, at most {_MAX_DIMS} are allowed")
    shape = tuple(cursor.number("Q") for _ in range(num_dims))[::-1]
    if 0 in shape:
        cursor.fail(f"tensor {name!r} has an empty dimension: {list(shape)}")
    kind = cursor.number("I")
    if kind not in TENSOR_TYPES:
        cursor.fail(f"tensor {name!r} has type {kind}, which is unknown")
    dtype = TENSOR_TYPES[kind]
    block_size = BLOCK_TYPES[dtype].block_size
    if (shape[-1] if shape else 1) % block_size:
        cursor.fail(f"tensor {name!r} is {list(shape)}, but {dtype} needs rows of a multiple of {block_size}")
    return _TensorInfo(name, shape, dtype, cursor.number("Q"))


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment!r}, expected a power of two")
    return alignment


def _place_tensors(
    cursor: _Cursor, mapped: MappedFile, infos: list[_TensorInfo], alignment: int
) -> dict[str, TensorView]:
    """Check where each tensor lies: aligned, inside the file, none over another."""
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorView] = {}
    spans: list[tuple[int, int, str]] = []
    for info in infos:
        size = num_bytes(info.dtype, info.shape)
        start = data_start + info.offset
        if info.name in tensors:
            cursor.fail(f"tensor {info.name!r} occurs twice")
        if info.offset % alignment:
            cursor.fail(f"tensor {info.name!r} begins at {info.offset}, not a multiple of {alignment}")
        if start + size > mapped.size:
            cursor.fail(
                f"tensor {info.name!r} should end at byte {start + size}, but the file has {mapped.size}; "
                "it is cut off, or its header is wrong"
            )
        spans.append((start, start + size, info.name))
        tensors[info.name] = TensorView(info.name, info.shape, info.dtype, mapped.path.name, mapped, start)
    spans.sort()
    for (_, end, name), (start, _, other) in zip(spans, spans[1:], strict=False):
        if end > start:
            cursor.fail(f"tensors {name!r} and {other!r} overlap")
    return tensors


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Read what a file begins with; returns how many tensors and metadata entries it says it has."""
    if bytes(cursor.buffer[:4]) != _MAGIC:
        cursor.fail("not a GGUF file: it does not begin with 'GGUF'")
    cursor.position = 4
    version = cursor.number("I")
    if version and version & 0xFFFF == 0:
        cursor.fail("a big-endian GGUF file; only little-endian files can be read")
    if version not in (2, 3):
        cursor.fail(f"GGUF version {version} cannot be read, only 2 and 3")
    return cursor.count(24, "tensors"), cursor.count(13, "metadata entries")


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, TensorView]]:
    mapped = MappedFile(path)
    cursor = _Cursor(mapped)
    num_tensors, num_entries = _read_counts(cursor)
    metadata = _read_metadata(cursor, num_entries)
    infos = [_read_tensor_info(cursor, index) for index in range(num_tensors)]
    return metadata, _place_tensors(cursor, mapped, infos, _alignment(cursor, metadata))


def metadata_alone(path: Path) -> bytes:
    """Make a GGUF file of the metadata of another, as it is but for what belongs to parts of a split one."""
    cursor = _Cursor(MappedFile(path))
    _, num_entries = _read_counts(cursor)
    entries: list[bytes] = []
    for _ in range(num_entries):
        start = cursor.position
        key = cursor.text("key")
        _read_value(cursor, cursor.number("I"))
        if not key.startswith("split."):
            entries.append(bytes(cursor.buffer[start : cursor.position]))
    return _MAGIC + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries)


def split_names(name: str) -> list[str] | None:
    """List the names of all parts of a split model, given one of them; None if it is not split."""
    match = _SPLIT_NAME.match(name)
    if not match:
        return None
    stem, count = match["stem"], match["count"]
    return [f"{stem}-{number:05d}-of-{count}.gguf" for number in range(1, int(count) + 1)]


def _read_parts(paths: list[Path]) -> GGUFFile:
    first: dict[str, Any] = {}
    tensors: dict[str, TensorView] = {}
    for number, path in enumerate(paths):
        if not path.is_file():
            raise LoadError(f"{path}: part {number + 1} of {len(paths)} of the model is missing")
        metadata, part = _read_file(path)
        found = (metadata.get("split.count", 1), metadata.get("split.no", 0))
        if found != (len(paths), number):
            raise LoadError(
                f"{path}: by its name part {number + 1} of {len(paths)}, "
                f"by its header part {found[1]!r} (from 0) of {found[0]!r}"
            )
        if twice := tensors.keys() & part.keys():
            raise LoadError(f"{path}: tensor {min(twice)!r} lies in an earlier part too")
        first = first or metadata
        tensors |= part
    expected = first.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise LoadError(f"{paths[0]}: the parts hold {len(tensors)} tensors, the header says {expected}")
    return GGUFFile(first, tensors, tuple(paths))


def read_gguf(path: Path) -> GGUFFile:
    """Open a model from its file, or from any part of a split one; tensors stay in the file.

    Arrays of numbers in the metadata are read-only numpy arrays, arrays of strings are
    sequences decoded on first use. Raises LoadError naming the file and what is wrong.
    """
    names = split_names(path.name)
    if names and len(names) > 1:
        return _read_parts([path.with_name(name) for name in names])
    metadata, tensors = _read_file(path)
    count = metadata.get("split.count", 1)
    if count not in (0, 1):
        raise LoadError(
            f"{path}: one of {count} parts; name the parts NAME-00001-of-{count:05d}.gguf and so on"
        )
    return GGUFFile(metadata, tensors, (path,))
