"""Fetch a model from the hub into the hub client's own cache, and remember that it is whole.

    list files -> choose -> download -> record {path, files and sizes}
The record is written last and checked against the files when used, so a download that was
killed is never taken for a model. The cache is the one other programs use: what they have
downloaded is found, also without a network. Knows no file format.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xjax.checkpoints.fetch import attempt
from xjax.checkpoints.fetch.attempt import AttemptError, ProgressSink
from xjax.checkpoints.fetch.names import HubName, is_plain_path, select_files
from xjax.errors import LoadError

_CLIENT = Path(__file__).with_name("client.py")
_INDEX = "model.safetensors.index.json"
_ABANDONED_SECONDS = 60.0


def call_client(
    command: str,
    arguments: Mapping[str, Any],
    *,
    folder: Path,
    watch: Callable[[], int] = lambda: 0,
    on_bytes: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Run one command of the hub client and return its answer; AttemptError if there is none."""
    output = attempt.run(
        # -P: no module of the working folder or of ours may stand in for a library.
        [sys.executable, "-P", str(_CLIENT), command, json.dumps(arguments)],
        folder=folder,
        watch=watch,
        on_bytes=on_bytes,
        # Its other transport writes in bursts, too far apart to tell slow from dead.
        env={"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    try:
        return json.loads(output.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise AttemptError("the hub client gave no answer") from error


def download_files(
    repo: str,
    commit: str,
    files: Mapping[str, int],
    *,
    revision: str | None = None,
    cache: Path | None = None,
    folder: Path,
    progress: ProgressSink | None,
) -> Path:
    """Download files (name -> bytes) of a commit, which `revision` names; return their folder."""
    cache = cache or Path(call_client("cache", {}, folder=folder)["cache"])
    blobs = cache / f"models--{repo.replace('/', '--')}" / "blobs"
    _remove_abandoned(blobs)
    total, before = sum(files.values()), attempt.folder_bytes(blobs)

    def on_bytes(now: int) -> None:
        if progress:
            progress(min(max(now - before, 0), total), total, f"downloading {repo}")

    arguments = {"repo": repo, "revision": revision or commit, "commit": commit, "files": list(files)}
    answer = call_client(
        "download", arguments, folder=folder, watch=lambda: attempt.folder_bytes(blobs), on_bytes=on_bytes
    )
    return Path(answer["folder"])


def _remove_abandoned(blobs: Path) -> None:
    """Delete partial downloads that nobody has written to for a while."""
    for path in blobs.glob("*.incomplete"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                path.unlink()


def _checked_sizes(answer: Mapping[str, Any]) -> dict[str, int]:
    """Take only what has the form of a file list: the answer comes from outside."""
    files: Any = answer.get("files")
    if not isinstance(files, dict):
        raise AttemptError("the hub's list of files cannot be understood")
    return {
        str(name): size  # type: ignore[misc]
        for name, size in files.items()  # type: ignore[misc]
        if isinstance(size, int) and is_plain_path(str(name))  # type: ignore[arg-type]
    }


def fetch_online(
    name: HubName, revision: str | None, *, folder: Path, progress: ProgressSink | None
) -> tuple[Path, dict[str, int], str]:
    """Download a model; return its folder, its files with their sizes, and the commit."""
    answer = call_client("list", {"repo": name.repo, "revision": revision}, folder=folder)
    commit, sizes = answer.get("commit"), _checked_sizes(answer)
    if not isinstance(commit, str) or not is_plain_path(commit):
        raise AttemptError("the hub did not say which commit it has")
    files = {file: sizes[file] for file in select_files(name, list(sizes))}
    target = download_files(
        name.repo,
        commit,
        files,
        revision=revision or "main",
        cache=Path(answer["cache"]),
        folder=folder,
        progress=progress,
    )
    return target, files, commit


def find_local(name: HubName, revision: str | None, *, folder: Path) -> tuple[Path, dict[str, int], str]:
    """Find a model that another program downloaded into the hub's cache, if it is whole there."""
    answer = call_client("local", {"repo": name.repo, "revision": revision}, folder=folder)
    snapshot, sizes = Path(answer["folder"]), _checked_sizes(answer)
    try:
        files = {file: sizes[file] for file in select_files(name, list(sizes))}
    except LoadError as error:
        raise AttemptError(f"the copy here is not whole: {error}") from error
    if _INDEX in files:
        try:
            shards = set(json.loads((snapshot / _INDEX).read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise AttemptError(f"its {_INDEX} cannot be read") from error
        if missing := shards - files.keys():
            raise AttemptError(f"the copy here lacks {min(missing)}")
    return snapshot, files, snapshot.name


def record_path(name: HubName, revision: str | None, models: Path) -> Path:
    """Return where the record of this download lies."""
    key = hashlib.sha256(f"{name}@{revision or ''}".encode()).hexdigest()[:32]
    return models / "hub" / f"{key}.json"


def write_record(
    path: Path, name: HubName, revision: str | None, found: tuple[Path, dict[str, int], str]
) -> Path:
    """Write down a finished download, in one step; return the path to open."""
    folder, files, commit = found
    first = next(iter(files))
    opened = first if first.endswith(".gguf") else ""
    entry = {
        "name": str(name),
        "revision": revision,
        "commit": commit,
        "folder": str(folder),
        "files": files,
        "open": opened,
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(entry, indent=1))
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise LoadError(f"{path}: cannot be written: {error.strerror}") from error
    return folder / opened if opened else folder


def read_record(path: Path) -> tuple[str, Path, int] | None:
    """Return name, path to open and bytes of a recorded download; None unless all files are there."""
    try:
        entry = json.loads(path.read_bytes())
        folder, files = Path(entry["folder"]), entry["files"]
        for file, size in files.items():
            if (folder / file).stat().st_size != size:
                return None
        target = folder / entry["open"] if entry["open"] else folder
        return str(entry["name"]), target, sum(files.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
