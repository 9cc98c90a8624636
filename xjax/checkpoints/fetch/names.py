"""What a model's name means, and which files of a repository belong to a model. Pure.

Names: a file or folder here, `user/repo`, `user/repo:TAG` (a GGUF quantization of it) or
`user/repo/path/file.gguf`. Every part of a name from outside is checked before it can
become part of a path.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from xjax.errors import LoadError

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SPLIT = re.compile(r"^(.+)-(\d{5})-of-(\d{5})\.gguf$")
# The usual small ones first, as other GGUF programs choose when no quantization is named.
_PREFERRED_TAGS = ("Q4_K_M", "Q4_0", "Q8_0")
_SIDE_FILES = re.compile(
    r"(config|generation_config|preprocessor_config|processor_config|params)\.json"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|(tokenizer|spiece|sentencepiece\.bpe)\.model|merges\.txt|.*\.jinja|.*\.tiktoken"
)


@dataclass(frozen=True)
class HubName:
    """A name on the hub: repository, and at most one of quantization tag and file."""

    repo: str
    tag: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return (
            f"{self.repo}:{self.tag}" if self.tag else f"{self.repo}/{self.file}" if self.file else self.repo
        )


def is_plain_path(path: str) -> bool:
    """Whether a relative path has only plain parts: none empty, hidden, `..` or with odd characters."""
    return all(_PART.fullmatch(part) and ".." not in part for part in path.split("/"))


def parse_hub_name(name: str) -> HubName:
    """Read `user/repo[:TAG]` or `user/repo/.../file.gguf`; LoadError for anything else."""
    body, colon, tag = name.partition(":")
    parts = body.split("/")
    if not is_plain_path(body) or len(parts) < 2 or (colon and (len(parts) > 2 or not _TAG.fullmatch(tag))):
        raise LoadError(
            f"{name!r} is no model: expected a folder, a .gguf file, user/repo, user/repo:Q4_K_M "
            "or user/repo/file.gguf"
        )
    repo = "/".join(parts[:2])
    if len(parts) == 2:
        return HubName(repo, tag=tag or None)
    if not body.endswith(".gguf"):
        raise LoadError(f"{name!r}: a file of a repository must be a .gguf file")
    return HubName(repo, file="/".join(parts[2:]))


def check_revision(revision: str | None) -> None:
    """Refuse a revision that is not a plain branch, tag or commit name."""
    if revision is not None and not is_plain_path(revision):
        raise LoadError(f"revision {revision!r} is not the name of a branch, a tag or a commit")


def _first_part(file: str) -> bool:
    match = _SPLIT.match(file)
    return match is None or int(match[2]) == 1


def _with_all_parts(file: str, files: Sequence[str], where: str) -> list[str]:
    match = _SPLIT.match(file)
    if match is None:
        return [file]
    names = [f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]
    for name in names:
        if name not in files:
            raise LoadError(f"{where}: part {name} of the model is missing in the repository")
    return names


def _has_tag(file: str, tag: str) -> bool:
    pattern = rf"(^|[-._/]){re.escape(tag)}([-._/]|$)"
    return re.search(pattern, file, re.IGNORECASE) is not None


def _select_gguf(name: HubName, files: Sequence[str]) -> list[str]:
    # Vision projectors and calibration data are GGUF files too, but no language model.
    models = [f for f in files if _first_part(f) and not re.search(r"mmproj|imatrix", f, re.IGNORECASE)]
    if name.tag:
        found = [file for file in models if _has_tag(file, name.tag)]
    elif len(models) == 1:
        found = models
    else:
        tagged = [[f for f in models if _has_tag(f, tag)] for tag in _PREFERRED_TAGS]
        found = next((names for names in tagged if names), models[:0])
    if not found:
        wanted = (
            f"no GGUF file for {name.tag}" if name.tag else "several GGUF files: name one as user/repo:TAG"
        )
        raise LoadError(f"{name}: {wanted}; it has {', '.join(sorted(models)[:8])}")
    return _with_all_parts(min(found, key=lambda file: (len(file), file)), files, str(name))


def select_files(name: HubName, files: Sequence[str]) -> list[str]:
    """Choose what to download of a repository's files, the file to open first for GGUF.

    A safetensors model comes with its config, tokenizer and template files; weights in
    pickle formats are never chosen. Raises LoadError when nothing there can be read.
    """
    files = [file for file in files if is_plain_path(file)]
    if name.file:
        if name.file not in files:
            raise LoadError(f"{name}: the repository has no such file")
        return _with_all_parts(name.file, files, str(name))
    gguf = [file for file in files if file.endswith(".gguf")]
    weights = [file for file in files if file.endswith(".safetensors") and "/" not in file]
    if name.tag or (gguf and not weights):
        if not gguf:
            raise LoadError(f"{name}: the repository has no GGUF files")
        return _select_gguf(name, gguf)
    if "config.json" not in files or not weights:
        raise LoadError(
            f"{name}: the repository has neither config.json with safetensors files nor GGUF files"
        )
    named = [file for file in weights if file.startswith("model")]
    index = [file for file in files if file == "model.safetensors.index.json"]
    return sorted(f for f in files if _SIDE_FILES.fullmatch(f)) + index + sorted(named or weights)
