"""From any model that can be loaded to a folder of xjax's own form, which loads faster and anywhere.

    1. look at OUT            nothing is replaced unasked, nothing but a converted model ever
    2. open, read the config  and see that there is room
    3. load the parameters    as the engine would, in the dtype asked for
    4. write                  arrays, text files, the manifest, into .OUT.partial/new beside OUT
    5. rename                 so that OUT is whole or not there

Knows no engine. What the folder holds is described in xjax.checkpoints.saved.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xjax.checkpoints.checkpoint import Checkpoint, open_checkpoint
from xjax.checkpoints.digest import weights_digest
from xjax.checkpoints.gguf import metadata_alone
from xjax.checkpoints.hub import pinned_sampling, resolve
from xjax.checkpoints.metadata import generation_defaults
from xjax.checkpoints.saved import MANIFEST, METADATA, SavedModel, describe_files, write_manifest
from xjax.config import DTYPES, cache_home
from xjax.errors import LoadError
from xjax.kernels.choice import choose_dtype
from xjax.weights.load import load_params, read_config
from xjax.weights.saved.orbax import name_arrays, save_arrays
from xjax.weights.saved.plain import to_plain
from xjax.weights.saved.writer import finish

Progress = Callable[[str, int, int], None]  # (what, done, total)

_NEW, _OLD = "new", "old"  # in the hidden folder: what is being written, and what it replaces
_PATIENCE = 5.0  # seconds
_GENERATION = "generation_config.json"
# What tokenizer, template, ends and sampling defaults of a Hugging Face folder are read from.
_TEXT_FILES = (
    "config.json", _GENERATION, "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja",
)  # fmt: skip


def convert(
    model: str | Path | None,
    out: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Save a model in xjax's own form; the folder is a model like any other. Returns it.

    model       folder, file, or name on the hub; None for the default model
    dtype       of the weights that are not codes; auto: float32 on CPU, else bfloat16
    overwrite   replace a converted model that is there
    progress    called with (what, done, total)

    Raises LoadError with one line. `out` is written as a whole or not at all.
    """
    if dtype not in DTYPES:
        raise LoadError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    target = Path(out).expanduser().absolute()
    _check_target(target, overwrite)
    source = resolve(
        None if model is None else str(model), revision=revision, cache_dir=cache_home(),
        progress=None if progress is None else lambda done, total, label: progress(label, done, total or 0),
    )  # fmt: skip
    checkpoint = open_checkpoint(source)
    with _folder_beside(target) as folder:
        _check_target(target, overwrite)  # a run that was killed may have had it
        _fill(checkpoint, folder, target, choose_dtype(dtype, jax.devices()[0].platform), progress)
        _check_target(target, overwrite)  # it may have come meanwhile
        _replace(folder, target)
    return target


def _check_target(target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not (target / MANIFEST).is_file() or target.is_symlink():
        raise LoadError(f"{target}: exists and is no converted model; choose another folder or remove it")
    if not overwrite:
        raise LoadError(f"{target}: exists already; --overwrite replaces it")


# ---- what is written -----------------------------------------------------------------------------


def _fill(checkpoint: Checkpoint, folder: Path, target: Path, dtype: str, progress: Progress | None) -> None:
    """Write everything that the target will hold, the manifest last."""

    def report(what: str) -> Any:
        return None if progress is None else partial(progress, what)

    family, config = read_config(checkpoint)
    params = load_params(checkpoint, family, config, dtype=jnp.dtype(dtype), progress=report("load"))
    arrays, quantized = name_arrays(params)
    _check_room(target, sum(array.nbytes for array in arrays.values()))
    saved_arrays = save_arrays(arrays, folder, where=str(target), progress=report("save"))
    _copy_text(checkpoint, folder)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    saved = SavedModel(
        kind=checkpoint.kind,
        architecture=checkpoint.architecture,
        family=family.name,
        config=to_plain(config),
        dtype=dtype,
        source=_source(checkpoint),
        arrays=saved_arrays,
        quantized=quantized,
        files=describe_files(folder, names),
    )
    write_manifest(folder, saved)


def _check_room(target: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise LoadError(
            f"{target}: the model takes {num_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free there"
        )


def _source(checkpoint: Checkpoint) -> str:
    """Digest of the weights that were converted first."""
    if checkpoint.saved is not None:
        return checkpoint.saved.source
    return weights_digest(checkpoint.files, cache_home())


def _copy_text(checkpoint: Checkpoint, folder: Path) -> None:
    """Write what tokenizer, template and sampling defaults are read from."""
    if checkpoint.kind == "gguf":
        path = checkpoint.path if checkpoint.saved is None else checkpoint.path / METADATA
        (folder / METADATA).write_bytes(metadata_alone(path))
        defaults = dict(checkpoint.generation_config)
        if not generation_defaults(checkpoint):
            defaults |= pinned_sampling(checkpoint.path)
        if defaults:
            (folder / _GENERATION).write_text(json.dumps(defaults, indent=1) + "\n")
        return
    for pattern in _TEXT_FILES:
        for path in sorted(checkpoint.path.glob(pattern)):
            copy = folder / path.relative_to(checkpoint.path)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


# ---- whole or not at all -------------------------------------------------------------------------


@contextlib.contextmanager
def _folder_beside(target: Path) -> Generator[Path]:
    """An empty folder to be renamed to the target, in a hidden one beside it that is gone at the end."""
    place = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(exist_ok=True)
        lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # a link leads to others' files
    except OSError as error:
        raise LoadError(f"{target}: cannot be written: {error.strerror}: {error.filename}") from error
    try:
        _take(lock, place, target)
        try:
            (place / _NEW).mkdir()
            yield place / _NEW
        except OSError as error:
            raise LoadError(f"{target}: cannot be written: {error.strerror or error}") from error
        finally:
            finish(partial(_remove, place))
    finally:
        os.close(lock)


def _take(lock: int, place: Path, target: Path) -> None:
    """Make the hidden folder ours alone, and empty: a run that was killed may have left something.

    A model that it was about to replace comes back. What no run has left is not touched.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it before has removed it, and it may be there again as somebody else's.
        if not os.path.samestat(os.fstat(lock), place.stat()):
            raise FileNotFoundError(place)
    except OSError as error:
        raise LoadError(f"{target}: another program is writing it") from error
    try:
        names = {path.name for path in place.iterdir()}
        if strange := sorted(names - {_NEW, _OLD}):
            raise LoadError(f"{place}: holds {strange[0]!r}, which is no conversion's; remove that folder")
        if (place / _OLD / MANIFEST).is_file() and not os.path.lexists(target):
            (place / _OLD).rename(target)
        for left in place.iterdir():
            shutil.rmtree(left)
    except OSError as error:
        raise LoadError(f"{target}: cannot be written: {error.strerror}: {error.filename}") from error


def _remove(place: Path) -> None:
    """Remove a folder into which orbax, where it failed, may still be writing for a moment."""
    end = time.monotonic() + _PATIENCE
    while True:
        shutil.rmtree(place, ignore_errors=True)
        if not place.exists() or time.monotonic() > end:
            return
        time.sleep(0.05)


def _replace(folder: Path, target: Path) -> None:
    """Rename the folder to the target; a converted model that is there goes."""
    if not target.exists():
        folder.rename(target)
        return
    old = folder.with_name(_OLD)
    target.rename(old)
    try:
        folder.rename(target)
    except BaseException:
        old.rename(target)
        raise
