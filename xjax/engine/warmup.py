"""The table of compiled steps: which shapes are ready, how they become so, and their cache on disk.

Tracing and lowering go one at a time, compiling in threads. A shape comes from the disk when the
very same program was saved by the very same build on the same kind of processor. A step whose own
shape is not ready runs on the next larger ready one.
"""

import hashlib
import os
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from xjax.config import compiler_environment
from xjax.engine.audit import audit_donation
from xjax.engine.step import StepSpec, step
from xjax.errors import EngineError, LoadError
from xjax.kernels import attention, candidates, chain, linear, moe, norm, qkv
from xjax.state.batch import BatchShape, packed_length
from xjax.state.mesh import replicated
from xjax.state.packed import forms_in

_STACK_BYTES = 64 << 20  # the compiler recurses deeply over unrolled layers
_MISSES_TO_COMPILE = 32  # steps on a larger shape after which a shape gets a program of its own
_stack_guard = threading.Lock()
_STALE_SECONDS = 86400  # of what a killed process left behind
_UNUSED_SECONDS = 30 * 86400  # of a program that nobody loads any more: other sources, another jaxlib
_HIT_EVENT = "/jax/compilation_cache/cache_hits"
Progress = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True)
class Program:
    """One ready step: call(params, state, packed[, mask]) -> (state, output). `seconds` to get it ready."""

    shape: BatchShape
    call: Callable[..., tuple[Any, jax.Array]]
    seconds: float
    is_loaded: bool


def fits(plan: BatchShape, larger: BatchShape) -> bool:
    """Whether a step planned for one shape can run on another."""
    if bool(plan.num_prefill) != bool(larger.num_prefill) or (plan.full and not larger.full):
        return False
    if plan.pooled_dim and not larger.pooled_dim:
        return False
    if plan.num_prefill:
        if larger.tile < plan.tile or larger.num_prefill // larger.tile < plan.num_prefill // plan.tile:
            return False
        if larger.num_sampled - larger.num_rows < plan.num_sampled - plan.num_rows:
            return False
    return larger.num_rows >= plan.num_rows


def cost(shape: BatchShape) -> tuple[int, int, int]:
    """Order of preference among shapes that fit, cheapest first."""
    return (shape.num_tokens, shape.num_sampled, int(shape.full) + bool(shape.pooled_dim))


class ProgramCache:
    """Saved executables in one folder, only for the user; a bad or foreign file is a miss."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(
        self, key: str, in_tree: Any, out_tree: Any, devices: Sequence[Any]
    ) -> Callable[..., Any] | None:
        """The program saved under `key`, to run on `devices`, or None."""
        path = self.folder / key
        try:
            if path.stat().st_uid != os.getuid():
                return None
            data = path.read_bytes()
        except OSError:
            return None
        digest, payload = data[:32], data[32:]
        if _digest(key, payload) == digest:
            try:
                program = serialize_executable.deserialize_and_load(
                    payload, in_tree, out_tree, execution_devices=devices
                )
                with suppress(OSError):
                    os.utime(path)  # `_sweep` goes by when a program was last of use
                return program
            except (ValueError, RuntimeError, TypeError, EOFError, pickle.UnpicklingError):
                pass
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return None

    def save(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Keep a program that was really compiled here; a full disk is no error."""
        try:
            payload = serialize_executable.serialize(compiled)[0]
        except (ValueError, NotImplementedError):
            return
        temporary = self.folder / f"{key}.{os.getpid()}.{threading.get_ident()}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(temporary, "wb", opener=partial(os.open, mode=0o600)) as file:
                file.write(_digest(key, payload))
                file.write(payload)
            temporary.replace(self.folder / key)
            self._sweep()
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what a killed process left behind, and programs that have not been of use for long."""
        for path in self.folder.iterdir():
            seconds = _STALE_SECONDS if path.suffix == ".tmp" else _UNUSED_SECONDS
            if path.stat().st_mtime < time.time() - seconds:
                path.unlink(missing_ok=True)


def _digest(key: str, payload: bytes) -> bytes:
    """Over the key too: a program under another's name would run, and be wrong."""
    return hashlib.sha256(key.encode() + b"\0" + payload).digest()


def _is_good(future: Future[Program]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _start_deep(target: Callable[[], None]) -> None:
    """Start a thread with a deep stack; the size is a setting of the whole process while it starts."""
    with _stack_guard:
        before = threading.stack_size(_STACK_BYTES)
        try:
            # Not what the engine's thread would hand down: an interpreter that ends under a daemon
            # thread inside the compiler aborts the process.
            threading.Thread(target=target, name="xjax-compile", daemon=False).start()
        finally:
            threading.stack_size(before)


def source_digest(*more: str) -> str:
    """SHA-256 over the sources that a compiled step is made from, and more folders."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in ("engine/step.py", "engine/warmup.py", "kernels", "models", "sampling", "state", *more):
        path = root / folder
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{flags}|{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"


def _runtime(device: Any) -> str:
    """What a program depends on beside itself, such as the threads that its loops are cut for."""
    config: Any = jax.config
    numerics = (config.jax_enable_x64, config.jax_default_matmul_precision)
    return f"{compiler_environment()}|{numerics}|{device.device_kind}|{device.client.platform_version}"


def arithmetic(device: Any, *more: str) -> tuple[str, ...]:
    """What numbers come from beside a model: sources, `more` folders of them, compiler, processor."""
    return (source_digest(*more), jax.__version__, version("jaxlib"), _machine(), _runtime(device))


class ProgramTable:
    """Compiled steps by shape, for one model and one state.

    `whole` is the sharding of what every device sees all of: a step's packed vector, masks, its output.
    Compile threads live only while there is something to compile, and end after what they are at
    when the table is closed or the process wants to end.
    """

    def __init__(
        self,
        spec: StepSpec,
        params: Any,
        state: Any,
        *,
        cache: ProgramCache | None = None,
        progress: Progress | None = None,
        max_temporary: int = 2 << 30,
    ) -> None:
        self._spec = spec
        self._params, self._state = (jax.tree.map(_abstract, tree) for tree in (params, state))
        self._cache = cache
        self._progress = progress
        self._num_started = self._num_ended = 0
        self._max_temporary = max_temporary
        self._lowering = threading.Lock()
        self._guard = threading.Lock()
        self._futures: dict[BatchShape, Future[Program]] = {}
        self._line: deque[BatchShape] = deque()
        self._num_workers = 0
        self._misses: Counter[BatchShape] = Counter()
        self._is_closed = False
        leaves = jax.tree.leaves((self._params, self._state))
        described = "".join(f"{leaf.dtype}{leaf.shape}{leaf.sharding}" for leaf in leaves)
        tree = jax.tree.structure((self._params, self._state))
        self._devices, self.whole = _place(spec.mesh, self._state)
        build = arithmetic(self._devices[0])
        self._fixed = "|".join((*build, spec.identity, described, str(tree)))

    @property
    def ready(self) -> list[BatchShape]:
        """Shapes that can run now."""
        with self._guard:
            return [shape for shape, future in self._futures.items() if _is_good(future)]

    def prepare(self, shapes: Sequence[BatchShape], *, first: bool = False) -> None:
        """Start to make shapes ready, in this order, `first` before all that wait; returns at once."""
        with self._guard:
            if self._is_closed:
                return
            for shape in reversed(shapes) if first else shapes:
                if shape not in self._futures:
                    self._futures[shape] = Future()
                elif first and shape in self._line:
                    self._line.remove(shape)
                else:
                    continue
                (self._line.appendleft if first else self._line.append)(shape)
            missing = min(len(self._line), (os.cpu_count() or 1) - self._num_workers)
            self._num_workers += max(missing, 0)
        for started in range(missing):
            try:
                _start_deep(self._work)
            except RuntimeError as error:
                with self._guard:
                    self._num_workers -= missing - started
                raise EngineError("no thread can be started to compile a step; raise the limit") from error

    def wait(self, shapes: Sequence[BatchShape]) -> None:
        """Make shapes ready and wait for them. Raises LoadError or EngineError when one cannot be."""
        self.prepare(shapes)
        for shape in shapes:
            self._result(shape)

    def find(self, shape: BatchShape) -> Program | None:
        """The program of a shape or of the next larger ready one; None while there is none.

        A shape that is asked for is compiled: next of all when nothing larger is ready, else when
        it was missed often enough to be worth it. Raises what its compilation raised.
        """
        with self._guard:
            future = self._futures.get(shape)
            if future is not None and _is_good(future):
                return future.result()
            larger = [other for other, its in self._futures.items() if _is_good(its) and fits(shape, other)]
            best = self._futures[min(larger, key=cost)].result() if larger else None
            self._misses[shape] += 1
            is_wanted = best is None or self._misses[shape] == _MISSES_TO_COMPILE
        if best is None and future is not None and future.done():
            if not isinstance(future.exception(), LoadError):
                with self._guard:
                    del self._futures[shape]  # the next request may be luckier
            future.result()
        if is_wanted:
            self.prepare([shape], first=best is None)
        return best

    def get(self, shape: BatchShape) -> Program:
        """As `find`, but waits when there is none."""
        return self.find(shape) or self._result(shape)

    def stats(self) -> Mapping[str, float]:
        """How many programs were compiled and how many came from the disk."""
        with self._guard:
            good = [future.result() for future in self._futures.values() if _is_good(future)]
        num_loaded = sum(program.is_loaded for program in good)
        return {"programs_compiled": len(good) - num_loaded, "programs_loaded": num_loaded}

    def close(self) -> None:
        """Stop making shapes ready; what waits is cancelled."""
        with self._guard:
            self._is_closed = True
            self._cancel_line()

    def _result(self, shape: BatchShape) -> Program:
        future = self._futures.get(shape)
        try:
            if future is not None:
                return future.result()
        except CancelledError:
            pass
        raise EngineError(f"step {shape.name}: the engine was closed before it was compiled")

    def _cancel_line(self) -> None:
        while self._line:
            self._futures[self._line.popleft()].cancel()

    def _work(self) -> None:
        """Make shapes of the line ready until it is empty; a compile thread."""
        while True:
            with self._guard:
                if not threading.main_thread().is_alive():
                    self._cancel_line()
                if not self._line:
                    self._num_workers -= 1
                    return
                shape = self._line.popleft()
                future = self._futures[shape]
            try:
                program = self._make(shape)
            except BaseException as error:  # noqa: BLE001  goes to whoever needs the shape
                future.set_exception(error)
            else:
                future.set_result(program)

    def _arguments(self, shape: BatchShape) -> tuple[Any, ...]:
        packed = jax.ShapeDtypeStruct((packed_length(shape),), np.int32, sharding=self.whole)
        arguments: tuple[Any, ...] = (self._params, self._state, packed)
        if shape.full:
            words = -(-self._spec.config.vocab_size // 32)
            mask = jax.ShapeDtypeStruct((shape.num_sampled, words), np.int32, sharding=self.whole)
            arguments += (mask,)
        return arguments

    def _make(self, shape: BatchShape) -> Program:
        began = time.perf_counter()
        # A saved program names functions that must be there by then.
        prepare_kernels(self._spec.backend, self._spec.config, self._params)
        arguments = self._arguments(shape)
        key = hashlib.sha256(f"{self._fixed}|{shape}".encode()).hexdigest()
        if self._cache is not None:
            in_tree = jax.tree.structure((arguments, {}))
            out_tree = jax.tree.structure((self._state, 0))
            call = self._cache.load(key, in_tree, out_tree, self._devices)
            if call is not None:
                return Program(shape, call, time.perf_counter() - began, True)
        self._report(started=1)
        try:
            compiled, is_whole = self._compile(shape, arguments)
        finally:
            self._report(ended=1)
        if self._cache is not None and is_whole:
            self._cache.save(key, compiled)
        return Program(shape, compiled, time.perf_counter() - began, False)

    def _report(self, *, started: int = 0, ended: int = 0) -> None:
        """Tell of programs that are really compiled; loading a saved one is quick."""
        with self._guard:
            self._num_started += started
            self._num_ended += ended
            done, total = self._num_ended, self._num_started
        if self._progress is not None:
            self._progress("compile", done, total)

    def _compile(self, shape: BatchShape, arguments: tuple[Any, ...]) -> tuple[jax.stages.Compiled, bool]:
        """Trace, lower, compile and audit; the second says whether the result can be saved."""
        function = partial(step, spec=self._spec, shape=shape)
        outputs = (jax.tree.map(lambda leaf: leaf.sharding, self._state), self.whole)
        jitted = jax.jit(function, donate_argnums=1, keep_unused=True, out_shardings=outputs)
        try:
            with self._lowering:
                lowered = jitted.trace(*arguments).lower()
            hits = _hit_watch.count()
            compiled = lowered.compile()
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise EngineError(f"step {shape.name} could not be compiled: {line}") from error
        audit_donation(
            compiled,
            donated=self._state,
            first_argument=len(jax.tree.leaves(self._params)),
            name=shape.name,
            max_temporary=self._max_temporary,
        )
        return compiled, _hit_watch.count() == hits


def prepare_kernels(backend: str, config: Any = None, params: Any = None) -> None:
    """Make known to XLA what programs of a backend call: for all models, or for these weights too."""
    attention.prepare(backend)
    qkv.prepare(backend)
    candidates.prepare(backend)
    norm.prepare(backend)
    forms = forms_in(params)
    linear.prepare(backend, forms)
    if forms:
        chain.prepare(backend)
    if getattr(config, "experts", None) is not None:
        moe.prepare(backend)


class _HitWatch:
    """Tells threads whether JAX's own persistent cache answered a compilation of theirs.

    An executable that came from there serializes without an error, but without its code.
    """

    def __init__(self) -> None:
        self._hits: Counter[int] = Counter()
        self._is_listening = False
        self._guard = threading.Lock()

    def count(self) -> int:
        """Hits of this thread so far."""
        with self._guard:
            if not self._is_listening:
                jax.monitoring.register_event_listener(self._hear)
                self._is_listening = True
        return self._hits[threading.get_ident()]

    def _hear(self, event: str, **_: object) -> None:
        if event == _HIT_EVENT:
            self._hits[threading.get_ident()] += 1


_hit_watch = _HitWatch()  # listeners are global to JAX, so there is one for the process


def _place(mesh: Mesh | None, tree: Any) -> tuple[list[Any], jax.sharding.Sharding]:
    """The devices that a tree lies on, in a mesh's order, and the sharding of what each holds whole."""
    if mesh is not None:
        return list(mesh.devices.flat), replicated(mesh)
    (device,) = set[Any]().union(*(leaf.sharding.device_set for leaf in jax.tree.leaves(tree)))
    return [device], jax.sharding.SingleDeviceSharding(device)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "dtype"):
        raise LoadError(f"a parameter leaf is {type(leaf).__name__}, not an array")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
