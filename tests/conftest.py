"""What every test runs under: strict JAX, virtual CPU devices, real models where they can be had.

JAX is configured through its environment variables, before anything imports it, so that tests
of the host tower never load it and programs that a test starts run under the same rules.
"""

import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from xjax.config import cache_home

ROOT = Path(__file__).resolve().parent.parent
NUM_DEVICES = 4
FETCH_SECONDS = 240

# A shell starts background jobs with interrupts ignored, and programs inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

assert "jax" not in sys.modules, "conftest.py must run before jax is imported"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}"
    os.environ["XLA_FLAGS"] = flags.strip()
# Compiled programs are kept between runs; traces are not, so tests that count those still do.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "compiled"))
os.environ.setdefault("NUMBA_CACHE_DIR", str(ROOT / ".cache" / "numba"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let an interpreter without pytest-timeout run the tests that need no more than the sources."""
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds of a test, which nobody watches here")


# A process may have 65,530 mappings on Linux, and each compiled program takes some; past that the compiler
# ends the process. Below a third of them there is room for the largest module.
MOST_MAPPINGS = 20_000


def _num_mappings() -> int:
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


@pytest.fixture(scope="module", autouse=True)
def programs_let_go() -> Iterator[None]:
    """Drop JAX's compiled programs behind a module when there are many; they are in the cache on disk."""
    yield
    if "jax" in sys.modules and _num_mappings() > MOST_MAPPINGS:
        sys.modules["jax"].clear_caches()
        gc.collect()


def _model(name: str) -> Path:
    """Path of a model of scripts/fetch_models, fetched once; skips the test when that fails."""
    folder = Path(os.environ.get("XJAX_TEST_MODELS") or cache_home() / "test-models")
    command = [sys.executable, str(ROOT / "scripts" / "fetch_models"), str(folder), name]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the {name} model could not be fetched in {FETCH_SECONDS} s")
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no reason given"]
        pytest.skip(f"the {name} model cannot be had: {lines[-1]}")
    return Path(result.stdout.strip())


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1, the default model, as a GGUF file."""
    return _model("smollm2")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma-3-270M Q4_K_M (base model, no chat template) as a GGUF file."""
    return _model("gemma")
