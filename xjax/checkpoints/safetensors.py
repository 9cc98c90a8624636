"""Read a folder of safetensors files: one file, or shards named by an index.

The format is eight bytes of header length, a JSON header, then the tensors without gaps.
All of a header is checked before a tensor is offered. Knows no model and no config.
"""

import json
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

from xjax.checkpoints.dequantize import num_bytes
from xjax.checkpoints.metadata import parse_json, read_json
from xjax.checkpoints.tensor import MappedFile, TensorView
from xjax.errors import LoadError

TENSOR_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
INDEX_NAME = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"[^/\\\0]+\.safetensors")
_MAX_HEADER = 100_000_000
_MAX_DIMS = 16


class SafetensorsFolder(NamedTuple):
    """Tensors by name and the files they lie in."""

    tensors: dict[str, TensorView]
    files: tuple[Path, ...]


def _is_counts(values: Any, limit: int) -> bool:
    """Whether this is a list of at most `limit` whole numbers, none negative."""
    if not isinstance(values, list) or len(values) > limit:  # type: ignore[arg-type]
        return False
    return all(type(value) is int and value >= 0 for value in values)  # type: ignore[misc]


def _read_header(mapped: MappedFile) -> tuple[dict[str, Any], int]:
    """Return the JSON header and the byte at which the tensors begin."""
    path, size = mapped.path, mapped.size
    if size < 8:
        raise LoadError(f"{path}: {size} bytes are too few for a safetensors file")
    (length,) = struct.unpack_from("<Q", mapped.buffer())
    if length > min(size - 8, _MAX_HEADER):
        raise LoadError(
            f"{path}: a header of {length} bytes does not fit; the file is cut off or not safetensors"
        )
    return parse_json(bytes(mapped.buffer()[8 : 8 + length]), f"{path}: header"), 8 + length


def _view(mapped: MappedFile, name: str, entry: Any, data_start: int) -> TensorView:
    where = f"{mapped.path}: tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise LoadError(f"{where}: the header entry lacks dtype, shape or data_offsets")
    fields: dict[str, Any] = entry  # type: ignore[assignment]
    kind, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(kind, str) or kind not in TENSOR_TYPES:
        raise LoadError(f"{where}: type {kind!r} cannot be read")
    if not _is_counts(shape, _MAX_DIMS):
        raise LoadError(f"{where}: {json.dumps(shape)[:80]} is not a shape")
    if not _is_counts(offsets, 2) or len(offsets) != 2:
        raise LoadError(f"{where}: {json.dumps(offsets)[:80]} is not a pair of offsets")
    start, end = offsets
    dims: tuple[int, ...] = tuple(shape)
    dtype = TENSOR_TYPES[kind]
    if end - start != num_bytes(dtype, dims):
        raise LoadError(
            f"{where}: {kind} {list(dims)} takes {num_bytes(dtype, dims)} bytes, not {end - start}"
        )
    if data_start + end > mapped.size:
        raise LoadError(
            f"{where}: should end at byte {data_start + end}, but the file has {mapped.size}; it is cut off"
        )
    return TensorView(name, dims, dtype, mapped.path.name, mapped, data_start + start)


def read_file(path: Path) -> dict[str, TensorView]:
    """Open one safetensors file; LoadError naming file and tensor when anything is wrong."""
    mapped = MappedFile(path)
    header, data_start = _read_header(mapped)
    header.pop("__metadata__", None)
    tensors = {name: _view(mapped, name, entry, data_start) for name, entry in header.items()}
    position, last = data_start, "the header"
    for view in sorted(tensors.values(), key=lambda view: (view.start, view.num_bytes)):
        if view.start != position:
            problem = "overlaps" if view.start < position else "leaves a gap after"
            raise LoadError(f"{path}: tensor {view.name!r} {problem} {last}")
        position, last = view.start + view.num_bytes, f"tensor {view.name!r}"
    if position != mapped.size:
        raise LoadError(f"{path}: {mapped.size - position} bytes follow the last tensor")
    return tensors


def _read_shards(folder: Path) -> SafetensorsFolder:
    index = folder / INDEX_NAME
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{index}: 'weight_map' is missing or empty")
    names: dict[str, str] = {}
    for tensor, file in weight_map.items():  # type: ignore[misc]
        # The index may come from anywhere: only plain names, inside the folder.
        if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
            raise LoadError(f"{index}: {file!r} is not the name of a file in this folder")
        names[str(tensor)] = file  # type: ignore[arg-type]
    files = sorted(set(names.values()))
    for file in files:
        if not (folder / file).is_file():
            raise LoadError(f"{folder / file}: missing, but {INDEX_NAME} names it")
    shards = {file: read_file(folder / file) for file in files}
    tensors: dict[str, TensorView] = {}
    for tensor, file in names.items():
        if tensor not in shards[file]:
            raise LoadError(f"{folder / file}: has no tensor {tensor!r}, but {INDEX_NAME} says so")
        tensors[tensor] = shards[file][tensor]
    return SafetensorsFolder(tensors, tuple(folder / file for file in files))


def read_safetensors(folder: Path) -> SafetensorsFolder:
    """Open the weights of a model folder; the tensors stay in their files.

    Takes model.safetensors, else the shards of model.safetensors.index.json, else the only
    *.safetensors file there is.
    """
    single = folder / "model.safetensors"
    if not single.exists() and (folder / INDEX_NAME).exists():
        return _read_shards(folder)
    if not single.exists():
        found = sorted(folder.glob("*.safetensors"))
        if len(found) != 1:
            reason = f"{len(found)} files of other names" if found else "no safetensors file"
            if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
                reason += "; weights in .bin or .pth files cannot be read, convert them to safetensors"
            raise LoadError(f"{folder}: expected model.safetensors or {INDEX_NAME}, found {reason}")
        single = found[0]
    return SafetensorsFolder(read_file(single), (single,))
