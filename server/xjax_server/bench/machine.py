"""The machine: what it is, how fast it reads memory and multiplies, and the least time a step can take.

The rates are measured with numpy on as many threads as the engines get, again and again during a
run, so that they suffer from the same neighbours as the engines. They are measured in a child
process, whose numpy is told early enough to leave threads to us. Knows no engine.
"""

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from xjax.errors import EngineError

PACKAGES = (
    "xjax", "jax", "jaxlib", "numpy", "starlette", "uvicorn", "aiohttp", "torch", "transformers", "vllm",
)  # fmt: skip
_READ_FLOATS = 1 << 24  # of each thread: 64 MB, which no cache holds
_GEMM = (512, 2048, 2048)


def describe() -> dict[str, Any]:
    """Name processor, memory, load and versions, as they go into a saved result."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": _memory_gb(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {key.strip(): value.strip() for key, value in found.items()}
    flags = set(names.get("flags", "").split())
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in flags), "")
    return f"{names.get('model name', platform.processor())} {widest}".strip()


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (ValueError, OSError):
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Work:
    """What a step must do whoever does it: bytes to read, floating-point operations."""

    read_bytes: float
    operations: float


class Rates:
    """Measures, in this process, how fast the machine reads and multiplies just now."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="xjax-probe")
        self._parts = [np.ones(_READ_FLOATS, np.float32) for _ in range(threads)]
        rows, inner, columns = _GEMM
        self._left = np.full((rows // threads, inner), 0.5, np.float32)
        self._right = np.full((inner, columns), 0.5, np.float32)
        self._threads = threads

    def measure(self) -> tuple[float, float]:
        """Bytes and operations a second: the best of three, since only the machine's own speed counts."""
        seconds = min(self._timed(lambda i: float(self._parts[i] @ self._parts[i])) for _ in range(3))
        reads = self._threads * _READ_FLOATS * 4 / seconds
        seconds = min(self._timed(lambda _: self._left @ self._right) for _ in range(3))
        return reads, 2 * self._threads * self._left.size * _GEMM[2] / seconds

    def _timed(self, task: Callable[[int], Any]) -> float:
        """Seconds from the first thread's begin to the last one's end."""
        gate = threading.Barrier(self._threads)

        def run(i: int) -> tuple[float, float]:
            gate.wait()
            began = time.perf_counter()
            task(i)
            return began, time.perf_counter()

        spans = [future.result() for future in [self._pool.submit(run, i) for i in range(self._threads)]]
        return max(end for _, end in spans) - min(began for began, _ in spans)


# numpy's library reads the number of its threads when it is loaded, and only that child must be told.
_CHILD = """
import os, sys
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
from xjax_server.bench.machine import answer
answer(int(sys.argv[1]))
"""


def answer(threads: int) -> None:
    """Take a sample for each line of standard input and write it to standard output."""
    rates = Rates(threads)
    for _ in sys.stdin:
        sys.stdout.write(json.dumps(rates.measure()) + "\n")
        sys.stdout.flush()


class Probe:
    """Samples of the machine's rates, taken by a child process that waits between them."""

    def __init__(self, threads: int) -> None:
        self._command = [sys.executable, "-c", _CHILD, str(threads)]
        self._child: subprocess.Popen[str] | None = None
        self.reads: list[float] = []
        self.gemms: list[float] = []

    def measure(self) -> None:
        """Take one sample of each rate."""
        if self._child is None:
            self._child = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
            )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise EngineError("the process that measures the machine's rates has ended")
        reads, gemms = json.loads(line)
        self.reads.append(reads)
        self.gemms.append(gemms)

    def floor(self, work: Work) -> float | None:
        """Least seconds for some work: the larger of reading and multiplying, at the best rates seen."""
        if not self.reads or not self.gemms:
            return None
        return max(work.read_bytes / max(self.reads), work.operations / max(self.gemms))

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.communicate()
            self._child = None
