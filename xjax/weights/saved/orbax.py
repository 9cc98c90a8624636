"""Parameters of a converted model, saved and restored with orbax.

    save      leaves in the order of the tree ─ arrays by name ─ parts of up to 32 MB, one after another
    restore   part by part: checksums of the files ─ each array straight to its dtype and sharding

A part is an orbax checkpoint of its own, a flat table of arrays: so memory stays near that of the parameters,
progress can be told, and an interrupted save ends soon. An array lies there as a single chunk, uncompressed:
weights hardly shrink, and nothing is faster to read. Orbax takes a while to import: it is, when it is needed.
"""

import dataclasses
import errno
import logging
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp

from xjax.checkpoints.saved import PARAMS, SavedArray, SavedModel, check_files
from xjax.errors import LoadError
from xjax.models.family import Family
from xjax.models.layers import Params
from xjax.models.registry import family_for
from xjax.state.quantized import QuantizedArray, is_quantized, spread
from xjax.weights.saved.plain import from_plain, to_plain
from xjax.weights.saved.writer import Writer
from xjax.weights.saved.zarr import check_part

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_PART_BYTES = 32 << 20
_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")


def leaf_name(path: tuple[Any, ...]) -> str:
    """Name of a leaf: its path in the tree, "layers.0.attention.qkv"."""
    return ".".join(str(getattr(step, "name", getattr(step, "idx", None))) for step in path)


def _code_fields() -> tuple[list[str], list[str]]:
    """Fields of a QuantizedArray that are arrays, and those that say something about them."""
    fields = dataclasses.fields(QuantizedArray)
    arrays = [item.name for item in fields if item.metadata.get("pytree_node", True)]
    return arrays, [item.name for item in fields if item.name not in arrays]


# ---- saving --------------------------------------------------------------------------------------


def name_arrays(params: Params) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Name every array of a parameter tree; returns them, and by leaf what is to be known of codes beside."""
    arrays: dict[str, Any] = {}
    quantized: dict[str, dict[str, Any]] = {}
    parts, settings = _code_fields()
    for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)[0]:
        name = leaf_name(path)
        if not is_quantized(leaf):
            arrays[name] = leaf
            continue
        assert isinstance(leaf, QuantizedArray), "packed weights are made when a model is loaded"
        arrays |= {f"{name}.{part}": value for part in parts if (value := getattr(leaf, part)) is not None}
        quantized[name] = {setting: to_plain(getattr(leaf, setting)) for setting in settings}
    return arrays, quantized


def save_arrays(
    arrays: Mapping[str, Any], folder: Path, *, where: str, progress: Progress | None = None
) -> dict[str, SavedArray]:
    """Write arrays to the parts of a folder that has none yet; returns where each lies.

    where   what errors call the folder

    Raises LoadError when they cannot be written. An interrupt waits for the part that is being written.
    """
    total, done = sum(array.nbytes for array in arrays.values()), 0
    saved: dict[str, SavedArray] = {}
    # A thread of its own: an interrupt would leave orbax's tasks writing behind our back.
    with Writer() as writer:
        for number, names in enumerate(_parts(arrays)):
            part = {name: arrays[name] for name in names}
            size = sum(array.nbytes for array in part.values())
            if shutil.disk_usage(folder).free < size:  # orbax is loud about a full disk
                raise LoadError(f"{where}: cannot be written: {os.strerror(errno.ENOSPC)}")
            writer.do(partial(_save_part, part, folder / PARAMS / str(number), where))
            saved |= {name: SavedArray(tuple(x.shape), x.dtype.name, number) for name, x in part.items()}
            done += size
            if progress is not None:
                progress(done, total)
    return saved


def _parts(arrays: Mapping[str, Any]) -> Iterator[list[str]]:
    """Names of the arrays of each part: few enough, or a single one."""
    names: list[str] = []
    size = 0
    for name, array in arrays.items():
        if names and size + array.nbytes > _PART_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += array.nbytes
    if names:
        yield names


def _save_part(part: Mapping[str, Any], folder: Path, where: str) -> None:
    with _orbax(f"{where}: cannot be written") as (orbax, checkpointer):
        checkpointer.save(folder, args=orbax.args.PyTreeSave(dict(part)))


# ---- restoring -----------------------------------------------------------------------------------


def read_saved_config(saved: SavedModel, where: str) -> tuple[Family, Any]:
    """Find the family of a converted model and rebuild its Config. Raises LoadError."""
    family = family_for(saved.architecture)
    if family.name != saved.family:
        raise LoadError(
            f"{where}: converted as {saved.family!r}, but {saved.architecture!r} is {family.name!r} in this "
            "version of xjax; convert the model again"
        )
    config = from_plain(
        get_type_hints(family.config_from_hf)["return"], dict(saved.config), f"{where}: config"
    )
    if config.num_layers > len(saved.arrays):
        raise LoadError(f"{where}: config.num_layers is {config.num_layers}, more than there are arrays")
    return family, config


def restore_params(
    saved: SavedModel,
    folder: Path,
    specs: Params,
    *,
    dtype: jnp.dtype,
    sharding: Any = None,
    progress: Progress | None = None,
) -> Params:
    """Read the parameters that `specs` describe, each straight to its sharding.

    dtype      of what neither its spec nor its codes say the dtype of
    sharding   as `load_params` takes it

    Raises LoadError when files are not what was written, or are another model's.
    """
    found, tree = jax.tree_util.tree_flatten_with_path(specs)
    targets = tree.flatten_up_to(sharding) if isinstance(sharding, Params) else [sharding] * len(found)
    wanted: dict[str, jax.ShapeDtypeStruct] = {}
    for (path, spec), target in zip(found, targets, strict=True):
        wanted |= _wanted(saved, folder, leaf_name(path), spec, jnp.dtype(spec.dtype or dtype), target)
    if left := sorted(saved.arrays.keys() - wanted.keys()):
        raise LoadError(f"{folder}: array {left[0]} has no place in the model that the manifest describes")
    if lost := sorted(saved.quantized.keys() - {leaf_name(path) for path, _ in found}):
        raise LoadError(f"{folder}: codes {lost[0]} have no place in the model that the manifest describes")
    arrays = _restore(saved, folder, wanted, progress)
    return jax.tree.unflatten(tree, [_leaf(saved, arrays, leaf_name(path), str(folder)) for path, _ in found])


def _wanted(
    saved: SavedModel, folder: Path, name: str, spec: Any, dtype: jnp.dtype, target: Any
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of one parameter as they shall be."""
    is_codes = name in saved.quantized
    names = [f"{name}.{part}" for part in _code_fields()[0]] if is_codes else [name]
    found = {each: _stored(saved, each, folder) for each in names if each in saved.arrays}
    if names[0] not in found:
        raise LoadError(f"{folder}: array {names[0]} is missing; convert the model again")
    shape = _code_settings(saved, name, str(folder))["shape"] if is_codes else found[name].shape
    if shape != spec.shape:
        raise LoadError(f"{folder}: array {name} must have shape {spec.shape}, found {shape}")
    if not is_codes:
        return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(target))}
    codes = _leaf(saved, found, name, str(folder))
    if codes.scales is None or not _are_rows(codes):
        raise LoadError(f"{folder}: the codes of {name} do not fit each other; convert the model again")
    places = spread(codes, _sharding(target))
    return {
        f"{name}.{part}": jax.ShapeDtypeStruct(item.shape, item.dtype, sharding=getattr(places, part))
        for part in _code_fields()[0]
        if (item := getattr(codes, part)) is not None
    }


def _stored(saved: SavedModel, name: str, folder: Path) -> jax.ShapeDtypeStruct:
    array = saved.arrays[name]
    try:
        return jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype))
    except TypeError as error:
        raise LoadError(f"{folder}: array {name}: {error}") from error


def _are_rows(codes: QuantizedArray) -> bool:
    """Whether all that is kept by output has as many rows as there are outputs."""
    parts = [codes.codes, codes.scales, codes.minimum, codes.zeros]
    return all(part is None or (part.ndim == 2 and part.shape[0] == codes.shape[0]) for part in parts)


def _code_settings(saved: SavedModel, name: str, where: str) -> dict[str, Any]:
    """What is to be known of codes beside their arrays."""
    hints, stated = get_type_hints(QuantizedArray), saved.quantized[name]
    settings = _code_fields()[1]
    for setting in settings:
        if setting not in stated:
            raise LoadError(f"{where}: {name}.{setting} is missing; convert the model again")
    return {each: from_plain(hints[each], stated[each], f"{where}: {name}.{each}") for each in settings}


def _sharding(target: Any) -> jax.sharding.Sharding:
    if isinstance(target, jax.sharding.Sharding):
        return target
    return jax.sharding.SingleDeviceSharding(target or jax.devices()[0])


def _restore(
    saved: SavedModel, folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct], progress: Progress | None
) -> dict[str, jax.Array]:
    total, done = sum(_num_bytes(item) for item in wanted.values()), 0
    arrays: dict[str, jax.Array] = {}
    # A thread of its own: an interrupt inside orbax's import can be lost, and leave locks taken.
    with ThreadPoolExecutor(1, thread_name_prefix="xjax-restore") as pool:
        for number in _checked_parts(saved, folder):
            part = {name: wanted[name] for name, array in saved.arrays.items() if array.part == number}
            arrays |= pool.submit(_restore_part, part, folder / PARAMS / str(number)).result()
            done += sum(_num_bytes(item) for item in part.values())
            if progress is not None:
                progress(done, total)
    return arrays


def _num_bytes(item: jax.ShapeDtypeStruct) -> int:
    return item.size * item.dtype.itemsize


def _checked_parts(saved: SavedModel, folder: Path) -> Iterator[int]:
    """Numbers of the parts, each once its files have proved whole; the next are looked at meanwhile."""
    with ThreadPoolExecutor(1, thread_name_prefix="xjax-check") as pool:
        pending: deque[Future[None]] = deque()
        try:
            for number in range(saved.num_parts):
                pending.append(pool.submit(_check_part, saved, folder, number))
            for number in range(saved.num_parts):
                pending.popleft().result()
                yield number
        finally:
            for future in pending:
                future.cancel()


def _check_part(saved: SavedModel, folder: Path, number: int) -> None:
    check_files(folder, saved, saved.part_files(number))
    check_part(saved, folder, number)


def _restore_part(part: Mapping[str, jax.ShapeDtypeStruct], folder: Path) -> dict[str, jax.Array]:
    with _orbax(f"{folder}: cannot be read") as (orbax, checkpointer):
        items = dict(part)
        how = orbax.checkpoint_utils.construct_restore_args(items)
        whole = folder.resolve()  # tensorstore takes no ".." at the beginning
        return checkpointer.restore(whole, args=orbax.args.PyTreeRestore(items, restore_args=how))


def _leaf(saved: SavedModel, arrays: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in saved.quantized:
        return arrays[name]
    parts = {part: arrays.get(f"{name}.{part}") for part in _code_fields()[0]}
    return QuantizedArray(**parts, **_code_settings(saved, name, where))  # type: ignore[arg-type]


# ---- orbax ---------------------------------------------------------------------------------------


@contextmanager
def _orbax(problem: str) -> Generator[tuple[Any, Any]]:
    """The package and a checkpointer; what goes wrong inside is a LoadError that begins with `problem`."""
    import orbax.checkpoint as orbax

    # Of its work, and of errors that it raises as well, it tells loggers that write to the terminal. Where
    # it fails, what else it had begun ends later, for an event loop that is closed by then.
    loggers, earlier = [logging.getLogger(name) for name in ("absl", "asyncio")], sys.unraisablehook
    for logger in loggers:
        logger.addFilter(_is_of_others)
    sys.unraisablehook = ours = partial(_tell_of_others, earlier)
    try:
        handler = orbax.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False)
        with orbax.Checkpointer(handler) as checkpointer:
            yield orbax, checkpointer
    except Exception as error:  # orbax raises bare Exception
        # The filters stay: threads of orbax's own may still tell of the same.
        raise LoadError(f"{problem}: {_reason(error)}") from error
    for logger in loggers:
        logger.removeFilter(_is_of_others)
    if sys.unraisablehook is ours:
        sys.unraisablehook = earlier


def _is_of_others(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname + record.getMessage()


def _tell_of_others(tell: Callable[[Any], object], unraisable: Any) -> None:
    """Pass on what could not be raised, but for a result that came when nobody waited any more."""
    if str(unraisable.exc_value) != "Event loop is closed":
        tell(unraisable)


def _reason(error: Exception) -> str:
    """The system's word for what went wrong if it has one, else the first line of the error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip()
    if code := _SYSTEM_ERROR.search(text):
        return os.strerror(int(code[1]))
    return text.splitlines()[0] if text else type(error).__name__
