"""The table of compiled steps: which shapes are ready, how they become so, and their cache on disk.

Tracing and lowering go one at a time, compiling in threads. A shape comes from the disk when the
very same program was saved by the very same build on the same kind of processor. A step whose own
shape is not ready runs on the next larger ready one.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable

from xjax.engine.audit import audit_donation
from xjax.engine.step import StepSpec, step
from xjax.errors import EngineError, LoadError, XjaxError
from xjax.state.batch import BatchShape, packed_length

_STACK_BYTES = 64 << 20  # the compiler recurses deeply over unrolled layers
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
    if plan.num_prefill:
        if larger.tile < plan.tile or larger.num_prefill // larger.tile < plan.num_prefill // plan.tile:
            return False
        if larger.num_sampled - larger.num_rows < plan.num_sampled - plan.num_rows:
            return False
    return larger.num_rows >= plan.num_rows


def cost(shape: BatchShape) -> tuple[int, int, int]:
    """Order of preference among shapes that fit, cheapest first."""
    return (shape.num_tokens, shape.num_sampled, int(shape.full))


class ProgramCache:
    """Saved executables in one folder, only for the user; a bad or foreign file is a miss."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: str, in_tree: Any, out_tree: Any) -> Callable[..., Any] | None:
        """The program saved under `key`, or None."""
        path = self.folder / key
        try:
            if path.stat().st_uid != os.getuid():
                return None
            data = path.read_bytes()
        except OSError:
            return None
        digest, payload = data[:32], data[32:]
        if hashlib.sha256(payload).digest() != digest:
            path.unlink(missing_ok=True)
            return None
        try:
            return serialize_executable.deserialize_and_load(payload, in_tree, out_tree)
        except (ValueError, RuntimeError, TypeError, jax.errors.JaxRuntimeError):
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
                file.write(hashlib.sha256(payload).digest())
                file.write(payload)
            temporary.replace(self.folder / key)
        except OSError:
            temporary.unlink(missing_ok=True)


def source_digest() -> str:
    """SHA-256 over the sources that a compiled step is made from."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in ("engine/step.py", "kernels", "models", "sampling", "state"):
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


class ProgramTable:
    """Compiled steps by shape, for one model and one state."""

    def __init__(
        self,
        spec: StepSpec,
        params: Any,
        state: Any,
        *,
        cache: ProgramCache | None = None,
        progress: Progress | None = None,
        max_temporary: int = 2 << 30,
        on_compile: Callable[[Program], None] | None = None,
    ) -> None:
        self._spec = spec
        self._params, self._state = (jax.tree.map(_abstract, tree) for tree in (params, state))
        self._cache = cache
        self._progress = progress
        self._max_temporary = max_temporary
        self._on_compile = on_compile
        self._lowering = threading.Lock()
        self._guard = threading.Lock()
        self._futures: dict[BatchShape, Future[Program]] = {}
        threading.stack_size(_STACK_BYTES)
        self._pool = ThreadPoolExecutor(max_workers=max(os.cpu_count() or 1, 1), thread_name_prefix="xjax-compile")
        threading.stack_size(0)
        leaves = jax.tree.leaves((self._params, self._state))
        described = "".join(f"{leaf.dtype}{leaf.shape}{leaf.sharding}" for leaf in leaves)
        tree = jax.tree.structure((self._params, self._state))
        build = (source_digest(), jax.__version__, jaxlib.__version__, _machine(), spec.identity)
        self._fixed = "|".join((*build, described, str(tree)))

    @property
    def ready(self) -> list[BatchShape]:
        """Shapes that can run now."""
        with self._guard:
            done = [(shape, future) for shape, future in self._futures.items() if future.done()]
        return [shape for shape, future in done if future.exception() is None]

    def prepare(self, shapes: Sequence[BatchShape]) -> None:
        """Start to make shapes ready, in this order; returns at once."""
        for shape in shapes:
            with self._guard:
                if shape not in self._futures:
                    # Threads get their stack size when they start, which is at submit.
                    threading.stack_size(_STACK_BYTES)
                    self._futures[shape] = self._pool.submit(self._make, shape)
                    threading.stack_size(0)

    def wait(self, shapes: Sequence[BatchShape]) -> None:
        """Make shapes ready and wait for them. Raises LoadError when one cannot be."""
        self.prepare(shapes)
        for done, shape in enumerate(shapes):
            self._futures[shape].result()
            if self._progress is not None:
                self._progress("compile", done + 1, len(shapes))

    def get(self, shape: BatchShape) -> Program:
        """The program of a shape or of the next larger ready one; waits only when there is none."""
        with self._guard:
            future = self._futures.get(shape)
        if future is None or not future.done():
            larger = sorted((other for other in self.ready if fits(shape, other)), key=cost)
            if larger:
                return self._futures[larger[0]].result()
        self.prepare([shape])
        return self._futures[shape].result()

    def close(self) -> None:
        """Stop making shapes ready."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _arguments(self, shape: BatchShape) -> tuple[Any, ...]:
        packed = jax.ShapeDtypeStruct((packed_length(shape),), np.int32)
        arguments: tuple[Any, ...] = (self._params, self._state, packed)
        if shape.full:
            words = -(-self._spec.config.vocab_size // 32)
            arguments += (jax.ShapeDtypeStruct((shape.num_sampled, words), np.int32),)
        return arguments

    def _make(self, shape: BatchShape) -> Program:
        began = time.perf_counter()
        arguments = self._arguments(shape)
        key = hashlib.sha256(f"{self._fixed}|{shape}".encode()).hexdigest()
        if self._cache is not None:
            in_tree = jax.tree.structure((arguments, {}))
            out_tree = jax.tree.structure((self._state, 0))
            call = self._cache.load(key, in_tree, out_tree)
            if call is not None:
                return self._done(Program(shape, call, time.perf_counter() - began, True))
        compiled = self._compile(shape, arguments)
        if self._cache is not None:
            self._cache.save(key, compiled)
        return self._done(Program(shape, compiled, time.perf_counter() - began, False))

    def _done(self, program: Program) -> Program:
        if self._on_compile is not None:
            self._on_compile(program)
        return program

    def _compile(self, shape: BatchShape, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        function = partial(step, spec=self._spec, shape=shape)
        jitted = jax.jit(function, donate_argnums=1, keep_unused=True)
        try:
            with self._lowering:
                lowered = jitted.trace(*arguments).lower()
            compiled = lowered.compile()
        except XjaxError:
            raise
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            raise EngineError(f"step {shape.name} could not be compiled: {str(error).splitlines()[0]}") from error
        audit_donation(
            compiled,
            donated=self._state,
            first_argument=len(jax.tree.leaves(self._params)),
            name=shape.name,
            max_temporary=self._max_temporary,
        )
        return compiled


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "dtype"):
        raise LoadError(f"a parameter leaf is {type(leaf).__name__}, not an array")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
