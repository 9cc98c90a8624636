"""xjax's own form of a model: what `xjax convert` writes, as far as it can be told without JAX.

    xjax_model.json        the manifest: what the model is, its arrays, size and checksum of every file and
                           of itself
    params/0, 1, ...       the arrays, in parts that are saved and read as one
    config.json, ...       of a Hugging Face folder what tokenizer, template and defaults are read from
    metadata.gguf          of a GGUF file the same: its metadata, without tensors

The manifest is written last, so a folder that has one is whole. How arrays lie in their parts is known to
xjax.weights.saved.orbax, what the configuration means to xjax.models.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from xjax.checkpoints.metadata import read_json
from xjax.errors import LoadError

MANIFEST = "xjax_model.json"
METADATA = "metadata.gguf"
PARAMS = "params"
_FORMAT = "xjax model"
_VERSION = 1  # of the format; a reader takes its own and older ones
_CHUNK = 1 << 20
_CHECKSUM = "crc32"
_MAX_DIMS = 16
_T = TypeVar("_T")


@dataclass(frozen=True)
class SavedArray:
    """An array by its shape and dtype, and the part that it lies in."""

    shape: tuple[int, ...]
    dtype: str
    part: int


@dataclass(frozen=True)
class SavedFile:
    """Bytes of a file and their CRC-32."""

    size: int
    crc32: int


@dataclass(frozen=True, eq=False, kw_only=True)
class SavedModel:
    """What the manifest of a converted model says.

    kind           form of the model that was converted, "hf" or "gguf"
    architecture   its word for what it is
    family         name of the family that read it
    config         that family's Config, as JSON has it
    dtype          of the weights that are not codes
    source         digest of the weights that were converted
    arrays         by name: the path of a parameter, of a quantized one with a field behind it
    quantized      by path of a parameter that is codes: what is to be known of it beside its arrays
    files          by path inside the folder, the manifest itself left out
    """

    kind: Literal["hf", "gguf"]
    architecture: str
    family: str
    config: Mapping[str, Any]
    dtype: str
    source: str
    arrays: Mapping[str, SavedArray]
    quantized: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, SavedFile]

    @property
    def num_parts(self) -> int:
        """How many parts the arrays lie in."""
        return max((array.part for array in self.arrays.values()), default=-1) + 1

    def part_files(self, part: int | None = None) -> list[str]:
        """Files of one part, or of all."""
        front = f"{PARAMS}/" if part is None else f"{PARAMS}/{part}/"
        return [name for name in self.files if name.startswith(front)]


def is_saved(folder: Path) -> bool:
    """Whether a folder is a converted model, whole or not."""
    return (folder / MANIFEST).exists() or (folder / PARAMS / "0").is_dir()


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, SavedFile]:
    """Size and checksum of files as they are now."""
    return {name: _describe(folder / name) for name in names}


def _describe(path: Path) -> SavedFile:
    size = checksum = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
    return SavedFile(size, checksum)


def check_files(folder: Path, saved: SavedModel, names: Iterable[str]) -> None:
    """Read files and compare them with what was written; raises LoadError naming the first that differs."""
    for name in names:
        if _describe(folder / name) != saved.files[name]:
            raise LoadError(f"{folder / name}: not the bytes that were written; convert the model again")


def write_manifest(folder: Path, saved: SavedModel) -> None:
    """Write the manifest of a folder in which everything else is."""
    values = {"format": _FORMAT, "version": _VERSION, **asdict(saved)}
    (folder / MANIFEST).write_text(json.dumps(seal(values), indent=1) + "\n")


def seal(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a manifest with their checksum, which does not go by how they are laid out."""
    kept = {key: value for key, value in values.items() if key != _CHECKSUM}
    return kept | {_CHECKSUM: zlib.crc32(json.dumps(kept, sort_keys=True).encode())}


def read_manifest(folder: Path) -> SavedModel:
    """Read the manifest of a converted model and see that its files are there, by their sizes.

    Raises LoadError with one line for a folder without one, for one of a newer version and for one that
    is broken.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise LoadError(f"{path}: missing, so this is no whole converted model; convert the model again")
    fields = _Fields(read_json(path), str(path))
    if fields.text("format") != _FORMAT:
        raise fields.error(f"'format' must be {_FORMAT!r}")
    if not 1 <= fields.count("version") <= _VERSION:
        raise LoadError(
            f"{path}: version {fields.count('version')} of the format, this xjax reads up to {_VERSION}; "
            "take a newer xjax, or convert the model again"
        )
    # A setting that changed would give wrong numbers as quietly as a weight.
    if fields.count(_CHECKSUM) != seal(fields.values)[_CHECKSUM]:
        raise LoadError(f"{path}: not what was written; convert the model again")
    kind = fields.text("kind")
    if kind not in ("hf", "gguf"):
        raise fields.error("'kind' must be 'hf' or 'gguf'")
    saved = SavedModel(
        kind=kind,
        architecture=fields.text("architecture"),
        family=fields.text("family"),
        config=fields.table("config").values,
        dtype=fields.text("dtype"),
        source=fields.text("source"),
        arrays=fields.each("arrays", _read_array),
        quantized=fields.each("quantized", lambda entry: entry.values),
        files=fields.each("files", lambda entry: SavedFile(entry.count("size"), entry.count("crc32"))),
    )
    _check_parts(saved, fields)
    for name, file in saved.files.items():
        _check_file(folder / name, name, file, fields)
    return saved


def _read_array(entry: "_Fields") -> SavedArray:
    shape = entry.values.get("shape")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS:  # type: ignore[arg-type]
        raise entry.error("'shape' is no shape")
    dims = tuple[Any, ...](shape)  # type: ignore[arg-type]
    if not all(type(size) is int and size >= 0 for size in dims):
        raise entry.error("'shape' is no shape")
    return SavedArray(dims, entry.text("dtype"), entry.count("part"))


def _check_parts(saved: SavedModel, fields: "_Fields") -> None:
    # A number of its own for each array at most, or a list of them would take any memory.
    if saved.num_parts > len(saved.arrays):
        raise fields.error("the arrays lie in more parts than there are arrays")


def _check_file(path: Path, name: str, file: SavedFile, fields: "_Fields") -> None:
    if (
        name.startswith("/")
        or "\\" in name
        or "\0" in name
        or not {"", ".", ".."}.isdisjoint(name.split("/"))
    ):
        raise fields.error(f"{name!r} is not the name of a file in this folder")
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
    if size is None:
        raise LoadError(f"{path}: missing, but {MANIFEST} names it; convert the model again")
    if size != file.size:
        raise LoadError(f"{path}: has {size} bytes, {file.size} were written; convert the model again")


class _Fields:
    """An object of the manifest, read key by key."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self._where = where

    def error(self, problem: str) -> LoadError:
        return LoadError(f"{self._where}: {problem}; the file is broken, convert the model again")

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str):
            raise self.error(f"{key!r} must be a text")
        return value

    def count(self, key: str) -> int:
        value = self.values.get(key)
        if type(value) is not int or value < 0:
            raise self.error(f"{key!r} must be a whole number")
        return value

    def table(self, key: str) -> "_Fields":
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.error(f"{key!r} must be an object")
        return _Fields(value, f"{self._where}: {key[:80]}")  # type: ignore[arg-type]

    def each(self, key: str, read: Callable[["_Fields"], _T]) -> dict[str, _T]:
        entries = self.table(key)
        return {name: read(entries.table(name)) for name in entries.values}
