"""Programs of peers: run one to its end, and what is known of how it was built. Knows no measurement."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from xjax.errors import EngineError

_CACHE_ENTRIES = (
    "CMAKE_BUILD_TYPE",
    "CMAKE_C_FLAGS",
    "CMAKE_CXX_FLAGS",
    "GGML_NATIVE",
    "GGML_AVX2",
    "GGML_AVX512",
    "GGML_OPENMP",
    "GGML_LLAMAFILE",
    "GGML_CPU_REPACK",
)
# With GGML_NATIVE the compiler finds out itself, and these say nothing.
_WITHOUT_NATIVE = ("GGML_AVX2", "GGML_AVX512")
_KERNELS = "ggml-cpu.c"  # a file of llama.cpp whose compiler flags tell what its kernels may use


def find_program(name: str, path: str) -> str | None:
    """The path of a program, or of one called `name` that the system finds; None where there is none."""
    return shutil.which(path or name)


def output_of(command: Sequence[str], *, with_errors: bool = True) -> str:
    """What a program prints. Raises EngineError with its last line where it fails or cannot be run."""
    errors = subprocess.STDOUT if with_errors else subprocess.PIPE
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, check=False)
    except OSError as error:
        raise EngineError(f"{command[0]} cannot be run: {error.strerror}") from error
    text = done.stdout.decode(errors="replace").strip()
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise EngineError(
            f"{command[0]} ended with code {done.returncode}: {(said.splitlines() or [''])[-1]}"
        )
    return text


def llama_build(path: str) -> dict[str, str]:
    """Version and build flags of one of llama.cpp's programs, the flags where it lies where it was built."""
    version = " ".join(output_of([path, "--version"]).split()).removeprefix("version: ")
    return {"build": version, **_cmake_entries(Path(path))}


def _cmake_entries(program: Path) -> dict[str, str]:
    for folder in program.resolve().parents[:2]:
        try:
            lines = (folder / "CMakeCache.txt").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        entries = {key.partition(":")[0]: value for key, _, value in (line.partition("=") for line in lines)}
        if entries.get("GGML_NATIVE") == "ON":
            entries = {name: value for name, value in entries.items() if name not in _WITHOUT_NATIVE}
        found = {name: entries[name] for name in _CACHE_ENTRIES if entries.get(name)}
        flags = _compiler_flags(folder / "compile_commands.json")
        return found | ({"flags of the kernels": flags} if flags else {})
    return {}


def _compiler_flags(commands: Path) -> str:
    """Flags for optimization and the machine that the kernels were compiled with; empty: not known."""
    try:
        found: Any = json.loads(commands.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    entries = cast("list[Any]", found) if isinstance(found, list) else []
    for entry in entries:
        item = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
        if str(item.get("file", "")).endswith(f"/{_KERNELS}"):
            parts = str(item.get("command", "")).split()
            return " ".join(part for part in parts if part.startswith(("-m", "-O")))
    return ""
