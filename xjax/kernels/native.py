"""LLVM IR compiled apart from Numba, kept on disk and called by address.

    functions(name, build, processor)   names -> addresses of the functions that `build` adds to a module
    table(name, size)                   int64s in memory that compiled code finds by name

Numba keeps one object a Python function; the innermost loops of matrices are many functions of one
generator, of which a model needs a few. What is kept has no address in it, and is named by everything
that made it: sources, LLVM, processor. Importing this imports Numba. Knows no kernel.
"""

import ctypes
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from xjax.errors import LoadError
from xjax.kernels import ffi

_log = logging.getLogger(__name__)
_guard = threading.Lock()
_linker: Any = None
_loaded: dict[tuple[str, str], dict[str, int]] = {}
_libraries: list[Any] = []  # code lives as long as these
_tables: dict[str, Any] = {}


def processor(*, is_plain: bool = False) -> tuple[str, str]:
    """Name and features that code is made for: this processor's, or those that every x86-64 has."""
    if is_plain and llvm.get_process_triple().startswith("x86_64"):
        return "x86-64", ""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _machine(target: tuple[str, str]) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    made = llvm.Target.from_triple(llvm.get_process_triple())
    return made.create_target_machine(
        cpu=target[0], features=target[1], opt=3, reloc="pic", codemodel="small"
    )


def _compile(build: Callable[[ir.Module], None], target: tuple[str, str]) -> bytes:
    machine, module = _machine(target), ir.Module()
    module.triple = llvm.get_process_triple()
    build(module)
    parsed = llvm.parse_assembly(str(module))
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = options.slp_vectorization = options.loop_vectorization = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_object(parsed)


def _read(file: Path) -> bytes | None:
    """What was kept, or None where nothing whole is."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(file: Path, code: bytes) -> None:
    if not ffi.is_writable(file.parent):
        return
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as target:
            target.write(hashlib.sha256(code).digest() + code)
        os.replace(target.name, file)
    except OSError as error:
        _log.info("compiled code is not kept: %s", error)


def _link(name: str, code: bytes, names: list[str]) -> dict[str, int]:
    global _linker
    if _linker is None:
        _linker = llvm.create_lljit_compiler(_machine(processor()))
    library = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    for function in names:
        library = library.export_symbol(function)
    linked = library.link(_linker, name)
    _libraries.append(linked)
    return {function: linked[function] for function in names}


def functions(
    name: str, names: list[str], build: Callable[[ir.Module], None], target: tuple[str, str]
) -> dict[str, int]:
    """Compile functions or load them from the disk; once a process.

    name      of all of them together, a file name
    names     of the functions that `build` adds to a module
    target    what they are compiled for, from `processor`

    Raises LoadError where LLVM cannot make them.
    """
    made_for = hashlib.sha256(repr((target, llvm.llvm_version_info)).encode()).hexdigest()[:16]
    with _guard:
        if (name, made_for) not in _loaded:
            file = ffi.code_folder() / f"{name}-{made_for}.o"
            try:
                code = _read(file)
                if code is None:
                    code = _compile(build, target)
                    _keep(file, code)
                _loaded[name, made_for] = _link(f"{name}-{made_for}", code, names)
            except RuntimeError as error:  # of LLVM; it has no class of its own
                line = (str(error).splitlines() or [""])[0]
                raise LoadError(
                    f"kernel {name} cannot be compiled here: {line}; take --kernels xla"
                ) from error
        return _loaded[name, made_for]


def table(name: str, size: int) -> Any:
    """`size` int64s, zeros at first, whose address compiled code gets from the function `name`()."""
    with _guard:
        if name not in _tables:
            values = (ctypes.c_int64 * size)()
            module = ir.Module()
            kind = ir.FunctionType(ir.IntType(64), [])
            builder = ir.IRBuilder(ir.Function(module, kind, name).append_basic_block("entry"))
            builder.ret(ir.IntType(64)(ctypes.addressof(values)))
            code = _machine(processor()).emit_object(llvm.parse_assembly(str(module)))
            llvm.add_symbol(name, _link(name, code, [name])[name])
            _tables[name] = values
        return _tables[name]
