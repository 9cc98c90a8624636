"""The one mover of pages and recurrent state: between device and host, and on the device, beside the steps.

    save   gather -> (before the next step) -> its own thread -> host slots -> report
    copy   pages on the device, gathered before they are written
    load   host slots -> staging -> scatter into the donated state

What moves is a part of the state: the pages of a group, or, as one part more, the slots of all recurrent
layers, of which one slot goes along with its sequence's pages.
Everything is dispatched before the step that was planned with it, so the device's own order keeps a page
from being written before it was read. Counts come in runs of 64 (not on CPU), 16, 4 and 1 pages, each with a
compiled program; while programs are made ahead, moves take those that are there. What a program donates
is audited as a step is. Memory that pages pass through on their way back is used again: touching new
memory takes longer than the copy. Knows no sequence.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from xjax.config import CacheSpec, has_recurrent, page_groups
from xjax.engine.audit import audit_donation
from xjax.errors import EngineError
from xjax.scheduler import Moves, Transfer
from xjax.state.kv import EngineState, LayerKV
from xjax.state.recurrent import Recurrent
from xjax.storage.host import Array, HostPages

_log = logging.getLogger(__name__)

RUNS = (64, 16, 4, 1)
_CPU_RUNS = RUNS[1:]  # what passes through a processor's cache
_MOST_SPARE = 4  # pieces of memory of each size that wait to be used again
Pages = tuple[LayerKV, ...] | tuple[Recurrent, ...]  # of the layers of one group, or the recurrent ones
Run = tuple[np.ndarray, np.ndarray]  # device pages or rows, and their host slots
Report = Callable[[int, bool, int, float], None]  # serial, whether it worked, bytes, seconds


def _gather(pages: Pages, ids: jax.Array) -> Pages:
    """Read pages, or slots of recurrent state.

    ids       [n] int32
    returns   k, v [n, K, S, D] of each layer; s [n, H, Dk, Dv], conv [n, C, W-1] of each recurrent one
    """
    return jax.tree.map(lambda array: array.at[ids].get(mode="promise_in_bounds"), pages)


def _scatter(pages: Pages, ids: jax.Array, values: Pages) -> tuple[Pages, jax.Array]:
    """Write pages, or slots of recurrent state. DONATES them.

    ids       [n] int32
    values    [n, ...] as `_gather` returns them
    returns   pages, and a number that is ready when `values` have been read
    """

    def put(array: jax.Array, new: jax.Array) -> jax.Array:
        return array.at[ids].set(new, mode="promise_in_bounds", unique_indices=True)

    return jax.tree.map(put, pages, values), ids.sum()


def _copy(pages: Pages, sources: jax.Array, targets: jax.Array) -> Pages:
    """Copy pages onto others. DONATES pages.

    sources, targets   [n] int32
    """
    return _scatter(pages, targets, _gather(pages, sources))[0]


class Mover:
    """Moves pages of an engine's state.

    state        for its shapes and shardings
    num_slots    host slots by group, 0 or None for none
    on_saved     called on the mover's own thread when a save has landed or failed
    num_states   host slots for recurrent state
    """

    def __init__(
        self,
        spec: CacheSpec,
        state: EngineState,
        num_slots: Sequence[int] | None,
        on_saved: Report,
        *,
        num_states: int = 0,
    ) -> None:
        self._layer_ids = [group.layer_ids for group in page_groups(spec)]
        self._num_groups, self._on_saved = len(self._layer_ids), on_saved
        counts = [*(num_slots or (0,) * self._num_groups)]
        if has_recurrent(spec):  # the part after those of the groups
            self._layer_ids.append(tuple(i for i, layer in enumerate(state.recurrent) if layer is not None))
            counts.append(num_states)
        placed = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
        )
        self._abstract = [self._pages(placed, part) for part in range(len(self._layer_ids))]
        self.hosts = [
            HostPages([leaf.shape[1:] for leaf in leaves], leaves[0].dtype, count)
            for count, pages in zip(counts, self._abstract, strict=True)
            if (leaves := jax.tree.leaves(pages))
        ]
        self._has_host = any(counts)
        # Where results lie in reach, asking for them ahead only costs the wake-up of a thread.
        self.is_remote = next(iter(jax.tree.leaves(state)[0].devices())).platform != "cpu"
        self.runs = RUNS if self.is_remote else _CPU_RUNS
        self._programs: dict[tuple[str, int, int], Any] = {}
        self._compiling = threading.Lock()
        self._is_ahead = self._is_closed = False
        # By group and count: memory that was loaded from, and what is ready once it has been read.
        self._staged: dict[tuple[int, int], list[tuple[list[Array], Any]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="xjax-mover")

    def _pages(self, state: EngineState, part: int) -> Pages:
        layers = state.kv if part < self._num_groups else state.recurrent
        return tuple(layers[i] for i in self._layer_ids[part])  # pyright: ignore[reportReturnType]

    # ---- programs ----

    def prepare(self, *, singly: bool = False) -> None:
        """Compile what serving may need: copies, and both directions where there is a host pool; any thread.

        singly   for one page at a time, which is enough for every move, if slowly
        Ends early when the mover is closed or the process wants to end.
        """
        self._is_ahead = True
        kinds = ("copy", "gather", "scatter") if self._has_host else ("copy",)
        for count in (1,) if singly else reversed(self.runs):
            for kind in kinds:
                for part in range(len(self._layer_ids)):
                    if self._is_closed or not threading.main_thread().is_alive():
                        return
                    if part < self._num_groups or (count == 1 and kind != "copy"):
                        self._program(kind, part, count)

    def _sizes(self, kind: str, part: int) -> Sequence[int]:
        """Runs to cut a move into: those that have programs, where these are made ahead."""
        if not self._is_ahead:
            return self.runs
        return [count for count in self.runs if count == 1 or (kind, part, count) in self._programs]

    def _program(self, kind: str, part: int, count: int) -> Any:
        key = (kind, part, count)
        program = self._programs.get(key)
        if program is None:
            with self._compiling:
                try:
                    program = self._made(kind, part, count)
                except (jax.errors.JaxRuntimeError, MemoryError) as error:
                    line = (str(error).splitlines() or [type(error).__name__])[0]
                    raise EngineError(f"{kind} of {count} pages could not be compiled: {line}") from error
        return program

    def _made(self, kind: str, part: int, count: int) -> Any:
        key = (kind, part, count)
        if key not in self._programs:
            pages = self._abstract[part]
            ids = jax.ShapeDtypeStruct((count,), np.int32)
            outputs = jax.tree.map(lambda leaf: leaf.sharding, pages)  # each device moves its own heads
            if kind == "gather":
                self._programs[key] = jax.jit(_gather, out_shardings=outputs).lower(pages, ids).compile()
                return self._programs[key]
            values = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    (count, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding
                ),
                pages,
            )
            function, rest, places = _copy, (ids, ids), outputs
            if kind == "scatter":
                function, rest, places = _scatter, (ids, values), (outputs, None)
            jitted = jax.jit(function, donate_argnums=0, out_shardings=places)
            compiled = jitted.lower(pages, *rest).compile()
            page_bytes = sum(
                leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages)
            )
            audit_donation(
                compiled,
                donated=pages,
                first_argument=0,
                name=f"{kind} of {count} pages",
                max_temporary=4 * count * page_bytes + (64 << 20),
            )
            self._programs[key] = compiled
        return self._programs[key]

    # ---- moving: the engine's thread ----

    def save(self, state: EngineState, transfer: Transfer) -> None:
        """Start to copy pages and state to the host; raises what the device raises."""
        values = []
        for part, (ids, slots) in enumerate(self._parts(transfer)):
            pages = self._pages(state, part)
            for run, place in _runs(ids, slots, self._sizes("gather", part)):
                leaves = jax.tree.leaves(self._program("gather", part, len(run))(pages, run))
                if self.is_remote:
                    for leaf in leaves:
                        leaf.copy_to_host_async()
                values.append((part, place, leaves))
        self._thread.submit(self._land, transfer.serial, values)

    def load(self, state: EngineState, transfer: Transfer) -> EngineState:
        """Copy pages and state from the host. DONATES the engine's, once all bytes have been read."""
        read = [
            (part, run, self._read(part, place))
            for part, (ids, slots) in enumerate(self._parts(transfer))
            for run, place in _runs(ids, slots, self._sizes("scatter", part))
        ]
        for part, run, arrays in read:
            pages = self._pages(state, part)
            values = jax.tree.unflatten(jax.tree.structure(pages), arrays)
            pages, is_read = self._program("scatter", part, len(run))(pages, run, values)
            state = self._replace(state, part, pages)
            staged = self._staged.setdefault((part, len(run)), [])
            staged.append((arrays, is_read))
            del staged[:-_MOST_SPARE]
        return state

    def _parts(self, transfer: Transfer) -> list[Run]:
        """What of each part of the state a transfer moves."""
        groups = list(zip(transfer.pages, transfer.slots, strict=True))
        return groups if len(self._layer_ids) == len(groups) else [*groups, (transfer.rows, transfer.states)]

    def _read(self, part: int, slots: np.ndarray) -> list[Array]:
        """Copy pages out of the host, into memory that nothing reads any more where there is some."""
        staged = self._staged.get((part, len(slots)), [])
        place = next((i for i, (_, is_read) in enumerate(staged) if is_read.is_ready()), None)
        return self.hosts[part].read(slots, None if place is None else staged.pop(place)[0])

    def copy(self, state: EngineState, moves: Moves) -> EngineState:
        """Copy pages on the device. DONATES the state's pages."""
        for group, (sources, targets) in enumerate(zip(moves.sources, moves.targets, strict=True)):
            for source, target in _runs(sources, targets, self._sizes("copy", group)):
                pages = self._pages(state, group)
                program = self._program("copy", group, len(source))
                state = self._replace(state, group, program(pages, source, target))
        return state

    def size(self, transfer: Transfer) -> int:
        """Bytes of the pages and the state that a transfer moves."""
        parts = zip(self.hosts, self._parts(transfer), strict=True)
        return sum(len(ids) * host.page_bytes for host, (ids, _) in parts)

    def _replace(self, state: EngineState, part: int, pages: Pages) -> EngineState:
        name = "kv" if part < self._num_groups else "recurrent"
        layers = list(getattr(state, name))
        for i, layer in zip(self._layer_ids[part], pages, strict=True):
            layers[i] = layer
        return state.replace(**{name: tuple(layers)})  # pyright: ignore[reportAttributeAccessIssue]

    # ---- landing: the mover's thread ----

    def _land(self, serial: int, values: list[tuple[int, np.ndarray, list[jax.Array]]]) -> None:
        is_there, num_bytes, seconds = False, 0, 0.0
        try:
            for part, slots, leaves in values:
                jax.block_until_ready(leaves)
                began = time.perf_counter()
                self.hosts[part].write(slots, [np.asarray(leaf) for leaf in leaves])
                seconds += time.perf_counter() - began
                num_bytes += sum(leaf.nbytes for leaf in leaves)
            is_there = True
        except Exception as error:  # noqa: BLE001  whatever it is, the sequence computes again
            _log.error("pages could not be saved: %s", error, exc_info=error)
        self._on_saved(serial, is_there, num_bytes, seconds)

    def close(self) -> None:
        """Wait for what is landing and end the thread; no program is begun any more."""
        self._is_closed = True
        self._thread.shutdown()


def _runs(first: np.ndarray, second: np.ndarray, sizes: Sequence[int]) -> Iterator[Run]:
    """Cut two arrays of ids into pieces of these sizes, the largest first; 1 is the last of them."""
    start = 0
    for size in sizes:
        while len(first) - start >= size:
            yield first[start : start + size].copy(), second[start : start + size].copy()
            start += size
