"""A Numba function as an XLA FFI call on CPU: reading the frame, errors, and XLA's own threads.

    handler(frame) -> 0 or an FFI error         `register` makes it a target by name
    run(frame, job)                           shares the items of a job among threads

Addresses are int64 everywhere, and every field of the C structures that are read here is a slot of
eight bytes (xla/ffi/api/c_api.h, version 0.3). No address of a function is known when code is
compiled, so what Numba keeps on disk is good for any process. Importing this imports Numba.

    job, on the heap   0 references  1 next item  2 items done  3 items  4 next worker  5 workers
                         6 - 13 for calls of XLA  14 ... what the item function reads

The caller of `run` works too and could do all alone: it waits only for items that a helper has
begun, and who has begun one waits for nothing. A helper that starts late finds no item left and only
lets go of the job, which whoever comes last frees; so two executions cannot wait for each other,
however few threads there are.
"""

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, config
from numba.core.errors import NumbaError
from numba.extending import intrinsic as _untyped_intrinsic

from xjax.config import cache_home
from xjax.errors import LoadError

INVALID_ARGUMENT, RESOURCE_EXHAUSTED = 3, 8  # codes of FFI errors
FLOAT32, BFLOAT16, INT32, UINT16 = 11, 16, 4, 7  # element types of FFI buffers
DATA = 14 * 8  # offset of an item function's own slots in a job

_VERSION = 3 << 32  # 0.3: major in the low half, minor in the high one
_ITEM = "_item"
_MOST_WORKERS = 64
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_guard = threading.Lock()
intrinsic: Any = _untyped_intrinsic  # what it makes is called without its first parameter
_settings: Any = config
_registered: dict[str, Any] = {}


# ---- memory -----------------------------------------------------------------------------


def _loader(kind: ir.Type, numba_type: types.Type) -> Any:
    def load(typing_context, address):
        def generate(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], ir.PointerType())
            value = builder.load(pointer, typ=kind, align=8 if kind == _I64 else 4)
            return builder.sext(value, _I64) if kind == _I32 else value

        return numba_type(types.int64), generate

    return intrinsic(load)


def _storer(kind: ir.Type, numba_type: types.Type) -> Any:
    def store(typing_context, address, value):
        def generate(context, builder, signature, arguments):
            builder.store(arguments[1], builder.inttoptr(arguments[0], ir.PointerType()))
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), generate

    return intrinsic(store)


load_i64, store_i64 = _loader(_I64, types.int64), _storer(_I64, types.int64)
load_i32 = _loader(_I32, types.int64)  # widened
load_f32, store_f32 = _loader(_F32, types.float32), _storer(_F32, types.float32)


@intrinsic
def fetch_add(typing_context, address, value):
    """Add to an int64 in memory, in one piece as all threads see it; returns what was there."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.PointerType())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def load_shared(typing_context, address):
    """Read an int64 that other threads write."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.PointerType())
        return builder.load_atomic(pointer, "seq_cst", 8, typ=_I64)

    return types.int64(types.int64), generate


@intrinsic
def swap(typing_context, address, old, new):
    """Replace an int64 in memory if it is what is thought, in one piece; whether it was."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.PointerType())
        found = builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def _pause(typing_context):
    """Leave what a core has to its other thread for a moment."""

    def generate(context, builder, signature, arguments):
        if llvm.get_process_triple().startswith("x86_64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


def _binary(emit: Callable[[Any, ir.Value, ir.Value], ir.Value]) -> Any:
    def generate(context, builder, signature, arguments):
        return emit(builder, *arguments)

    return intrinsic(lambda typing_context, a, b: (types.int64(types.int64, types.int64), generate))


# Of int64, and for non-negative ones only where they divide: what Numba makes of Python's own
# operators is right for every sign and type, and takes seconds to compile.
smaller = _binary(lambda builder, a, b: builder.select(builder.icmp_signed("<", a, b), a, b))
larger = _binary(lambda builder, a, b: builder.select(builder.icmp_signed(">", a, b), a, b))
quotient = _binary(lambda builder, a, b: builder.udiv(a, b))
remainder = _binary(lambda builder, a, b: builder.urem(a, b))


def external(name: str, num_arguments: int, *, has_result: bool = False) -> Any:
    """A function of int64s, found by its name when code is loaded: the C library's or a registered one."""
    kind = ir.FunctionType(_I64 if has_result else ir.VoidType(), [_I64] * num_arguments)
    signature = (types.int64 if has_result else types.void)(*[types.int64] * num_arguments)

    def generate(context, builder, signature, arguments):
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        result = builder.call(function, arguments)
        return result if has_result else context.get_dummy_value()

    return procedure(signature, generate)


def procedure(signature: Any, generate: Callable[..., Any]) -> Any:
    """An intrinsic of one signature; Numba counts its parameters, so they are spelled out."""
    names = "".join(f", a{i}" for i in range(len(signature.args)))
    return intrinsic(eval(f"lambda typing_context{names}: made", {"made": (signature, generate)}))


_malloc, _free = external("malloc", 1, has_result=True), external("free", 1)
_yield = external("sched_yield", 0)


# ---- calls by address -------------------------------------------------------------------


@intrinsic
def _call(typing_context, function, argument):
    """Call int64 f(int64) at an address."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(_I64, [_I64])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _task_address(typing_context, function):
    """Address of void task(int64) around a compiled function of one int64.

    The task is made in the caller's own module, so its address is settled when that is loaded.
    """
    inner = typing_context.resolve_function_type(function, (types.int64,), {})

    def generate(context, builder, signature, arguments):
        compiled = function.dispatcher.overloads[inner.args]
        kind = ir.FunctionType(ir.VoidType(), [_I64])
        task = ir.Function(builder.module, kind, builder.module.get_unique_name("task"))
        task.linkage = "internal"
        body = ir.IRBuilder(task.append_basic_block("entry"))
        context.add_linking_libs([compiled.library])
        context.call_internal_no_propagate(body, compiled.fndesc, inner, (task.args[0],))
        body.ret_void()
        return builder.ptrtoint(task, _I64)

    return types.int64(function), generate


# ---- the frame --------------------------------------------------------------------------


def _reader(*slots: int, has_index: bool, base: int = 0) -> Any:
    """An intrinsic that follows pointers: each slot of what the one before points at, then an index."""

    def generate(context, builder, signature, arguments):
        address = builder.add(arguments[0], _I64(base))
        for slot in (*map(_I64, slots), *arguments[1:]):
            place = builder.add(address, builder.mul(slot, _I64(8)))
            address = builder.load(builder.inttoptr(place, ir.PointerType()), typ=_I64)
        return address

    if has_index:
        return intrinsic(
            lambda typing_context, address, index: (types.int64(types.int64, types.int64), generate)
        )
    return intrinsic(lambda typing_context, address: (types.int64(types.int64), generate))


slot = _reader(has_index=True)  # slot(address, index): an int64 of a structure
own = _reader(has_index=True, base=DATA)  # own(job, index): one of the item function's own
num_arguments = _reader(7, has_index=False)  # num_arguments(frame)
argument = _reader(9, has_index=True)  # argument(frame, i): address of an operand's buffer
result = _reader(14, has_index=True)  # result(frame, i): address of a result's buffer
data = _reader(3, has_index=False)  # data(buffer): address of the first element
rank = _reader(4, has_index=False)  # rank(buffer): number of dimensions
dim = _reader(5, has_index=True)  # dim(buffer, i): one dimension
num_attributes = _reader(17, has_index=False)  # num_attributes(frame)
_attributes = _reader(20, has_index=True)


@njit
def dtype(buffer):
    """Element type of a buffer: FLOAT32 and so on."""
    return load_i32(buffer + 16)


@njit
def attribute(frame, index):
    """Address of the numbers of an array attribute; XLA sorts attributes by their names."""
    return slot(_attributes(frame, index), 2)


@njit
def attribute_size(frame, index):
    """Numbers of an array attribute."""
    return slot(_attributes(frame, index), 1)


@njit
def is_question(frame):
    """Whether XLA asks for the handler's version, which is answered here, instead of calling it."""
    extension = slot(frame, 1)
    if extension == 0 or load_i32(extension + 8) != 1:
        return False
    store_i64(slot(extension, 3) + 24, _VERSION)
    store_i64(slot(extension, 3) + 32, 0)  # no traits
    return True


@intrinsic(prefer_literal=True)
def error(typing_context, frame, code, message):
    """An FFI error for a handler to return; the message is a constant."""
    text = message.literal_value

    def generate(context, builder, signature, arguments):
        slots = cgutils.alloca_once(builder, _I64, size=5)
        where = context.insert_const_string(builder.module, text)
        values = [_I64(36), _I64(0), builder.ptrtoint(where, _I64), arguments[1]]
        for i, value in enumerate(values):
            builder.store(value, builder.gep(slots, [_I32(i)], source_etype=_I64))

        def read(address, index):
            place = builder.inttoptr(builder.add(address, _I64(8 * index)), ir.PointerType())
            return builder.load(place, typ=_I64)

        create = read(read(arguments[0], 2), 6)
        kind = ir.FunctionType(_I64, [_I64])
        return builder.call(builder.inttoptr(create, kind.as_pointer()), [builder.ptrtoint(slots, _I64)])

    return types.int64(types.int64, types.int64, message), generate


# ---- threads ----------------------------------------------------------------------------


@njit
def make_job(num_items, num_workers, num_slots):
    """Memory of a `run`, a job, with `num_slots` slots for the item function; 0 when memory is out."""
    job = _malloc(DATA + 8 * num_slots)
    if job != 0:
        store_i64(job, 1)
        store_i64(job + 8, 0)
        store_i64(job + 16, 0)
        store_i64(job + 24, num_items)
        store_i64(job + 32, 0)
        store_i64(job + 40, num_workers)
    return job


@njit
def release(job):
    """Let go of a job; the last to do so frees it."""
    if fetch_add(job, -1) == 1:
        _free(job)


@njit
def _num_threads(frame, job):
    """Threads of XLA's pool; 1 where there is none."""
    api = slot(frame, 2)
    store_i64(job + 48, 32)
    store_i64(job + 56, 0)
    store_i64(job + 64, slot(frame, 3))
    store_i64(job + 72, job + 80)
    store_i64(job + 80, 1)
    failed = _call(slot(api, 18), job + 48)
    if failed != 0:
        _destroy(api, job, failed)
        return 1
    return slot(job, 10)


@njit
def _destroy(api, job, failed):
    store_i64(job + 48, 24)
    store_i64(job + 56, 0)
    store_i64(job + 64, failed)
    _call(slot(api, 8), job + 48)


@njit
def _schedule(frame, job, task):
    """Hand `task(job)` to XLA's pool; whether that could be done."""
    api = slot(frame, 2)
    store_i64(job + 48, 40)
    store_i64(job + 56, 0)
    store_i64(job + 64, slot(frame, 3))
    store_i64(job + 72, task)
    store_i64(job + 80, job)
    failed = _call(slot(api, 17), job + 48)
    if failed != 0:
        _destroy(api, job, failed)
    return failed == 0


def pool(name: str, *, stages: tuple[int, int] | None = None) -> Callable[[int, int], None]:
    """Make `run(frame, job)` for the item function (job, index, worker) of the target `name`.

    stages   slots of the item function's own, the first and the one after the last, of which each says how
             many items there are up to the end of a stage: those of a stage are begun when all before it are
             done. None: it is all one

    Items are begun in order, each once, by whichever thread is free; `worker` is below the job's
    number of workers, and no two threads have the same. `run` returns when all are done, and the
    caller's reference to the job is gone.
    """
    item = external(name + _ITEM, 3)
    take = _take_next if stages is None else _take_ready(*stages)

    # Symbols are made of a function's name and a count, which starts anew in each process: what two processes
    # kept must not be called alike.
    def named(function: Callable[..., Any]) -> Any:
        function.__qualname__ = f"{function.__qualname__}.{name}"
        return njit(function)

    @named
    def work(job):
        index = take(job)
        if index < 0:
            return
        worker = fetch_add(job + 32, 1)
        while index >= 0:
            item(job, index, worker)
            fetch_add(job + 16, 1)
            index = take(job)

    @named
    def help_with(job):
        work(job)
        release(job)

    @named
    def run(frame, job):
        num_items, task = slot(job, 3), _task_address(help_with)
        num_helpers = smaller(smaller(_num_threads(frame, job), slot(job, 5)), num_items) - 1
        while num_helpers > 0:
            num_helpers -= 1
            fetch_add(job, 1)
            if not _schedule(frame, job, task):
                fetch_add(job, -1)
                num_helpers = 0
        work(job)
        _wait(job, num_items)
        release(job)

    return run


@njit
def _take_next(job):
    """Begin the next item; -1 when there is none left."""
    index = fetch_add(job + 8, 1)
    return index if index < slot(job, 3) else -1


def _take_ready(first: int, last: int) -> Any:
    """Make the same for items in stages.

    A thread that has to wait holds no item: so it is in nobody's way when it loses its processor.
    """

    @njit
    def take(job):
        index = load_shared(job + 8)
        while index < slot(job, 3):
            begin = 0
            for stage in range(first, last):
                if own(job, stage) <= index:
                    begin = own(job, stage)
            _wait(job, begin)
            if swap(job + 8, index, index + 1):
                return index
            index = load_shared(job + 8)
        return -1

    return take


@njit
def _wait(job, count):
    """Wait until so many items of a job are done."""
    spins = 0
    while load_shared(job + 16) < count:
        spins += 1
        _pause()
        if spins > 1000:  # its thread has no processor: let it have this one
            _yield()


def num_workers() -> int:
    """Threads that a call counts on, at most; what a worker has of its own is made for as many."""
    return min(os.cpu_count() or 1, _MOST_WORKERS)


# ---- registration -----------------------------------------------------------------------


def source_digest() -> str:
    """SHA-256 over the sources of all kernels: Numba itself looks at one file only."""
    folder, digest = Path(__file__).resolve().parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def is_writable(folder: Path) -> bool:
    """Whether compiled code can be kept there; elsewhere Numba would keep it by the date of one file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def code_folder() -> Path:
    """Where compiled code of these sources is kept."""
    with _guard:  # Numba's setting is another one while something is registered
        return _folder()


def _folder() -> Path:
    # The variable NUMBA_CACHE_DIR wins over our own folder; sources have one of their own in both.
    return Path(_settings.CACHE_DIR or cache_home() / "numba") / f"xjax-{source_digest()[:16]}"


def register(name: str, handler: Callable[[int], int], item: Callable[[int, int, int], None]) -> None:
    """Compile a handler and its item function, or load them, and make the FFI target `name` on CPU; once.

    handler   plain function of the frame's address, at the top of its module
    item      the same of (job, index, worker), which `pool(name)` calls
    """
    with _guard:
        if name in _registered:
            return
        kept, folder = _settings.CACHE_DIR, _folder()
        keeps = is_writable(folder)
        _settings.CACHE_DIR = str(folder)
        try:
            inner = numba.cfunc(types.void(*[types.int64] * 3), cache=keeps, error_model="numpy")(item)
            # The handler finds it by name: compiled apart, each is optimized once and no address is kept.
            llvm.add_symbol(name + _ITEM, inner.address)
            outer = numba.cfunc(types.int64(types.int64), cache=keeps, error_model="numpy")(handler)
        # What LLVM and the file system raise has no class of Numba's.
        except (NumbaError, RuntimeError, OSError) as error:
            line = (str(error).splitlines() or [""])[0] or type(error).__name__
            raise LoadError(f"kernel {name} cannot be compiled here: {line}; take --kernels xla") from error
        finally:
            _settings.CACHE_DIR = kept
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype = ctypes.py_object
        capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        jax.ffi.register_ffi_target(name, capsule(outer.address, None, None), platform="cpu")
        _registered[name] = (inner, outer)
