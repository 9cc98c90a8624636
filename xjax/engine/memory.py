"""How memory is divided: a pure plan from numbers, and the readers of those numbers.

    budget = share of what is available
    weights + activations + programs + state must fit into it
    pages  = what is left x kv_fraction, or what max_model_len x max_num_seqs needs if that is less

Knows the cache spec and sizes; never a model's name.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xjax.config import CacheSpec, PagedLayer, PageGroup, page_groups
from xjax.errors import LoadError

HOST_SHARE = 0.85  # of the host's available memory, when the device is the CPU
DEVICE_SHARE = 0.92  # of an accelerator's memory limit
PROGRAM_BYTES = 60 << 20  # one compiled program on the CPU
RUNTIME_BYTES = 400 << 20  # libraries and the first program

# Limit, usage, and what of the usage is droppable file cache: control groups version 2 and 1.
_CONTROL_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class MemoryPlan:
    """Where the bytes go.

    num_pages        pages by group, the trash page included
    page_bytes       bytes of one page in all layers of its group
    longest          tokens of the longest single request that fits
    host_pages       pages by group that host memory holds beside
    host_states      recurrent states of sequences that it holds
    state_bytes      bytes of the recurrent state of one sequence
    total_tokens     tokens that all pages of the group that fills up first hold
    num_devices      that share the model; all bytes are those of one of them
    """

    available: int
    weights: int
    activations: int
    programs: int
    recurrent: int
    num_pages: tuple[int, ...]
    page_bytes: tuple[int, ...]
    page_size: int
    longest: int
    total_tokens: int
    host_pages: tuple[int, ...] = ()
    host_states: int = 0
    state_bytes: int = 0
    num_devices: int = 1

    @property
    def pages_total(self) -> int:
        """Bytes of all pages."""
        return sum(count * size for count, size in zip(self.num_pages, self.page_bytes, strict=True))

    def table(self) -> list[tuple[str, str]]:
        """Rows of the start-up table."""
        pages = " + ".join(str(count - 1) for count in self.num_pages)
        shared = [("on each of", f"{self.num_devices} devices")] if self.num_devices > 1 else []
        return [
            *shared,
            ("available", _mb(self.available)),
            ("weights", _mb(self.weights)),
            ("activations", _mb(self.activations)),
            ("programs", _mb(self.programs)),
            ("pages", f"{_mb(self.pages_total)} ({pages} of {self.page_size} tokens)"),
            ("pages on the host", self._host_text()),
            ("recurrent state", self._state_text()),
            ("tokens that fit", str(self.total_tokens)),
            ("longest request", f"{self.longest} tokens"),
        ]

    def _host_text(self) -> str:
        if not any(self.host_pages):
            return "none"
        size = sum(count * each for count, each in zip(self.host_pages, self.page_bytes, strict=True))
        return f"{_mb(size)} ({' + '.join(map(str, self.host_pages))})"

    def _state_text(self) -> str:
        beside = self.host_states * self.state_bytes
        return _mb(self.recurrent) + (f", {_mb(beside)} on the host" if beside else "")


def plan_memory(
    spec: CacheSpec,
    *,
    available: int,
    weights: int,
    activations: int,
    num_programs: int,
    max_model_len: int,
    max_num_seqs: int,
    page_size: int,
    chunk: int,
    kv_itemsize: int,
    kv_fraction: float,
    num_pages: int | None = None,
    recurrent: int = 0,
    state_bytes: int = 0,
    host_fold: float = 0.0,
    is_shared: bool = False,
    num_devices: int = 1,
) -> MemoryPlan:
    """Divide `available` bytes. `num_pages` overrides the pages of the largest group.

    recurrent     bytes of all recurrent state on the device
    state_bytes   of one sequence's
    host_fold     pages and states in host memory for each one on the device
    is_shared     whether host memory is the device's, so that both must fit

    Raises LoadError with the numbers when a single page does not fit.
    """
    groups = page_groups(spec)
    page_bytes = tuple(_page_bytes(spec, group.layer_ids, page_size, kv_itemsize) for group in groups)
    need = tuple(_pages_of_sequence(group.window, max_model_len, page_size, chunk) for group in groups)
    programs = RUNTIME_BYTES + num_programs * PROGRAM_BYTES
    host_states = math.ceil(max_num_seqs * host_fold) if state_bytes and groups else 0
    left = available - weights - activations - programs - recurrent
    left -= host_states * state_bytes if is_shared else 0
    beside = 1.0 + (host_fold if is_shared else 0.0)
    sequence_bytes = sum(count * size for count, size in zip(need, page_bytes, strict=True)) * beside
    if num_pages is not None:
        scale = (num_pages - 1) / max(need, default=1)
    elif sequence_bytes:
        scale = min(_steady(max(left, 0) * kv_fraction / sequence_bytes), max_num_seqs)
    else:
        scale = 0.0
    pages = tuple(int(count * scale) + 1 for count in need)
    if num_pages is not None:  # in whole numbers: that of the largest group is what was asked for
        pages = tuple(max(count * (num_pages - 1) // max(need), 1) + 1 for count in need)
    # Less than one longest sequence: window groups must still carry whatever the full group holds.
    whole = [count - 1 for group, count in zip(groups, pages, strict=True) if group.window is None]
    if whole and scale < 1:
        held = [_pages_of_sequence(group.window, whole[0] * page_size, page_size, chunk) for group in groups]
        pages = tuple(max(count, least + 1) for count, least in zip(pages, held, strict=True))
    if groups and (min(pages) < 2 or _bytes(pages, page_bytes) * beside > left):
        raise LoadError(
            f"memory: {_mb(available)} available, but weights take {_mb(weights)}, activations "
            f"{_mb(activations)}, programs {_mb(programs)}, recurrent state {_mb(recurrent)}, and "
            f"{'--num-pages asks for' if num_pages else 'a page needs'} "
            f"{_mb(_bytes(pages, page_bytes) * beside)}{_beside_text(beside)}; free memory, lower "
            f"{'--cpu-mem-fold, ' * (beside > 1)}--num-pages or --max-num-seqs, or take a smaller model"
        )
    whole_tokens = [count * page_size for count in whole]
    return MemoryPlan(
        available=available,
        weights=weights,
        activations=activations,
        programs=programs,
        recurrent=recurrent,
        num_pages=pages,
        page_bytes=page_bytes,
        page_size=page_size,
        longest=_longest(groups, pages, need, max_model_len, page_size),
        total_tokens=min([max_model_len * max_num_seqs, *whole_tokens]),
        host_pages=tuple(int((count - 1) * host_fold) for count in pages),
        host_states=host_states,
        state_bytes=state_bytes,
        num_devices=num_devices,
    )


def _longest(
    groups: Sequence[PageGroup], pages: Sequence[int], need: Sequence[int], most: int, page_size: int
) -> int:
    """Tokens of the longest sequence that so many pages hold, alone; `need` are those of one of `most`."""
    for group, count, own in zip(groups, pages, need, strict=True):
        # A window needs few pages to go on by one token; chunks shrink to what there is.
        least = own if group.window is None else -(-(group.window - 1) // page_size) + 1
        if min(own, least) > count - 1:
            most = min(most, (count - 1) * page_size)
    return most


def _steady(scale: float) -> float:
    """Round down to one of eight values an octave.

    What is available differs a little from start to start; programs saved by one start serve the
    next only if it makes the same number of pages.
    """
    if scale <= 0:
        return 0.0
    step = 2.0 ** (math.floor(math.log2(scale)) - 3)
    return math.floor(scale / step) * step


def _beside_text(beside: float) -> str:
    return f" with those of the host (--cpu-mem-fold {beside - 1:g})" if beside > 1 else ""


def _bytes(pages: tuple[int, ...], page_bytes: tuple[int, ...]) -> int:
    return sum(count * size for count, size in zip(pages, page_bytes, strict=True))


def _page_bytes(spec: CacheSpec, layer_ids: tuple[int, ...], page_size: int, itemsize: int) -> int:
    total = 0
    for layer_id in layer_ids:
        layer = spec[layer_id]
        assert isinstance(layer, PagedLayer)
        total += 2 * layer.num_kv_heads * layer.head_dim * page_size * itemsize
    return total


def _pages_of_sequence(window: int | None, length: int, page_size: int, chunk: int) -> int:
    pages = -(-length // page_size)
    return pages if window is None else min(pages, -(-(window + chunk) // page_size) + 1)


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def available_bytes(device: Any) -> int:
    """Bytes that the engine may plan with on a device: a stated share of what is free there."""
    if device.platform == "cpu":
        return int(HOST_SHARE * host_available())
    stats = device.memory_stats() or {}
    limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use", 0)
    if limit is None:
        raise LoadError(f"device {device} does not report its memory; give --num-pages")
    return int(DEVICE_SHARE * (limit - used))


def host_available(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the machine's free memory and its containers' limits.

    A limit may stand at any level above the process: inside a container its own group is the root
    of what can be seen, outside it is a path below.
    """
    available = _meminfo(root / "proc/meminfo")
    for folder in _control_groups(root):
        for limit, usage, cache in _CONTROL_FILES:
            most, used = _number(folder / limit), _number(folder / usage)
            if most is not None and used is not None:
                used -= _stat(folder / "memory.stat", cache)  # file pages that can be dropped
                available = min(available, max(most - max(used, 0), 0))
    return available


def _control_groups(root: Path) -> list[Path]:
    """Folders of this process's control groups, version 1 and 2, up to their roots."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    folders: list[Path] = []
    for line in ("0::/", ":memory:/", *lines):
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if kinds and "memory" not in kinds.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if kinds else "")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        folders += [base.joinpath(*parts[:size]) for size in range(len(parts) + 1)]
    return list(dict.fromkeys(folders))


def _stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)


def _meminfo(path: Path) -> int:
    try:
        text = path.read_text()
    except OSError:
        return 8 << 30  # not Linux: a modest guess that --num-pages overrides
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 << 30


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # no limit: the file says "max" or is not there
