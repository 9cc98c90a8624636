"""A small program around huggingface_hub, run as a process of its own.

So a download that hangs can be killed, and the slow import is paid only when it is needed.
Arguments and the answer are JSON; an uncaught error's last line is the reason shown.
Imports nothing of xjax: it is started by its path.

    client.py list      {"repo", "revision"}                     -> {"commit", "files": {name: bytes},
                                                                     "cache"}
    client.py download  {"repo", "revision", "commit", "files"}  -> {"folder"}
    client.py local     {"repo", "revision"}                     -> {"folder", "files": {name: bytes}}
    client.py cache     {}                                       -> {"cache"}
"""

import json
import sys
from pathlib import Path
from typing import Any

# pyright: reportUnknownVariableType=false
# Some of the library's own annotations are incomplete.
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)


def _list(repo: str, revision: str | None) -> dict[str, Any]:
    info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=10)
    files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return {"commit": info.sha, "files": files, "cache": constants.HF_HUB_CACHE}


def _download(repo: str, revision: str, commit: str, files: list[str]) -> dict[str, Any]:
    folder = Path()
    for file in files:
        # By the name of the branch, not the commit: so the cache knows the branch too, offline.
        folder = Path(hf_hub_download(repo, file, revision=revision)).parents[file.count("/")]
        if folder.name != commit:
            sys.exit("the repository changed during the download; try again")
    return {"folder": str(folder)}


def _local(repo: str, revision: str | None) -> dict[str, Any]:
    folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    paths = [path for path in folder.rglob("*") if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    return {"folder": str(folder), "files": files}


def _cache() -> dict[str, Any]:
    return {"cache": constants.HF_HUB_CACHE}


_COMMANDS = {"list": _list, "download": _download, "local": _local, "cache": _cache}

# The most usual reasons, in words; the order matters, a gated repository is a kind of missing one.
_REASONS: dict[type[Exception], str] = {
    GatedRepoError: "its terms must be accepted on its page, and HF_TOKEN set",
    RepositoryNotFoundError: "there is no such repository, or HF_TOKEN must be set to see it",
    RevisionNotFoundError: "the repository has no such revision",
    LocalEntryNotFoundError: "it is not there, and the hub cannot be reached",
    OfflineModeIsEnabled: "HF_HUB_OFFLINE forbids it",
}


def _main() -> str:
    try:
        return json.dumps(_COMMANDS[sys.argv[1]](**json.loads(sys.argv[2])))
    except tuple(_REASONS) as error:
        sys.exit(next(text for kind, text in _REASONS.items() if isinstance(error, kind)))


if __name__ == "__main__":
    sys.stdout.write(_main())
