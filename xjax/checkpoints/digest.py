"""A digest of the weights' bytes, remembered from run to run.

Hashing a file once is enough while size, modification time, inode and device stay as they
were; each file's digest is kept under those in a small JSON file of its own. What is
remembered for a file that changed, or changed so lately that its time proves nothing, is
never used. Names and folders do not count: the same bytes have the same digest anywhere.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xjax.errors import LoadError

_CHUNK = 1 << 20
# File systems stamp times as coarsely as two seconds: a younger file may change unseen.
_SETTLED_SECONDS = 3.0


def _identity(path: Path) -> dict[str, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "inode": status.st_ino,
        "device": status.st_dev,
    }


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _remembered(entry: Path, identity: dict[str, int]) -> str | None:
    try:
        found: Any = json.loads(entry.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("identity") != identity:  # type: ignore[union-attr]
        return None
    value: object = found.get("sha256")  # type: ignore[union-attr]
    return value if isinstance(value, str) and len(value) == 64 else None


def _remember(entry: Path, identity: dict[str, int], sha256: str) -> None:
    """Write atomically; a folder that cannot be written only costs hashing again."""
    temporary = entry.with_name(f".{entry.name}.{os.getpid()}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"identity": identity, "sha256": sha256}))
        os.replace(temporary, entry)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


def file_digest(path: Path, cache_dir: Path, *, opened: dict[str, int] | None = None) -> str:
    """Return the SHA-256 of a file in hex, from the manifest in `cache_dir` where it still holds.

    opened   what the file must still be
    Raises LoadError when it is not, or cannot be read.
    """
    path = path.resolve()
    key = hashlib.sha256(os.fsencode(path)).hexdigest()
    entry = cache_dir / "digests" / f"{key}.json"
    before = _identity(path)
    if opened is not None and before != opened:
        raise LoadError(f"{path}: changed since it was opened")
    if known := _remembered(entry, before):
        return known
    sha256 = _hash(path)
    if _identity(path) != before:
        raise LoadError(f"{path}: changed while it was read")
    if time.time() - before["mtime_ns"] / 1e9 > _SETTLED_SECONDS:
        _remember(entry, before, sha256)
    return sha256


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a model as they are when it is opened, in order.

    A digest that is made later is of the bytes that were read only while size, time, inode and device are
    what they were before.
    """

    files: tuple[Path, ...]
    opened: tuple[dict[str, int], ...]

    @classmethod
    def of(cls, files: Sequence[Path]) -> "WeightFiles":
        """Note what the files are now. Raises LoadError for one that is not there."""
        return cls(tuple(files), tuple(_identity(path.resolve()) for path in files))

    def digest(self, cache_dir: Path) -> str:
        """Return one SHA-256 in hex over all of them. Raises LoadError when one has changed."""
        digest = hashlib.sha256(b"xjax weights 1")
        for path, opened in zip(self.files, self.opened, strict=True):
            digest.update(bytes.fromhex(file_digest(path, cache_dir, opened=opened)))
        return digest.hexdigest()


def weights_digest(files: Sequence[Path], cache_dir: Path) -> str:
    """Return one SHA-256 in hex over the weight files of a model as they are now, in the order given."""
    return WeightFiles.of(files).digest(cache_dir)
