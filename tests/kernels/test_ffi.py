"""Numba functions as FFI calls: frames, errors, threads that come late, other processes."""

import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba")

from tests.kernels import doubling
from xjax.errors import LoadError
from xjax.kernels import ffi

pytestmark = pytest.mark.device

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module", autouse=True)
def _registered():
    doubling.register()


def double(x, *, pause=0):
    """2 * x through the call of tests/kernels/doubling.py, each item spinning `pause` times."""
    return call(doubling.NAME, x, pause=pause)


def call(name, x, *, pause=0):
    """The call of a name, which takes what that of doubling.py takes."""
    made = jax.ffi.ffi_call(
        name, (jax.ShapeDtypeStruct(x.shape, jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32))
    )
    return made(x, pause=np.array([pause], np.int64))


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_every_item_is_done_once(size):
    x = jnp.arange(size, dtype=jnp.float32)
    run = jax.jit(double)
    for _ in range(200):
        out, begun = run(x)
        np.testing.assert_array_equal(out, 2 * np.arange(size))
        assert np.asarray(begun).sum() == size


def test_threads_of_the_pool_help():
    """Beside the caller someone else did items, in at least one of some runs."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one processor: the pool has one thread")
    run, x = jax.jit(functools.partial(double, pause=5000)), jnp.ones(64)
    assert any(np.count_nonzero(run(x)[1]) > 1 for _ in range(50))


def test_an_error_is_raised_with_its_text_and_the_next_call_works():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*doubling takes float32"):
        jax.block_until_ready(jax.jit(double)(jnp.arange(5)))
    np.testing.assert_array_equal(jax.jit(double)(jnp.ones(3))[0], [2, 2, 2])


def test_executions_at_once_do_not_wait_for_each_other():
    """Many more callers than threads, all inside the call at once, most of the time."""
    x = jnp.arange(256, dtype=jnp.float32)
    run = jax.jit(functools.partial(double, pause=300)).lower(x).compile()
    wrong, started = [], threading.Barrier(8)

    def work():
        started.wait()
        for _ in range(60):
            out, begun = run(x)
            if not np.array_equal(out, 2 * np.arange(256)) or np.asarray(begun).sum() != 256:
                wrong.append(out)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 120
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0))
    assert not any(thread.is_alive() for thread in threads), "calls wait for each other"
    assert not wrong


IN_ONE_THREAD = """
import numpy as np, jax, jax.numpy as jnp
from tests.kernels.test_ffi import doubling, double
doubling.register()
out, begun = jax.jit(double)(jnp.ones(64))
assert (np.asarray(out) == 2).all() and np.asarray(begun).sum() == 64
print("ok")
"""


@pytest.mark.parametrize("threads", ["1", "2", "5"])
def test_any_number_of_threads(threads):
    environment = os.environ | {"PJRT_NPROC": threads, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", IN_ONE_THREAD], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert result.stdout.strip() == "ok", result.stderr


COUNT_COMPILES = """
import sys
from numba.core import event
counted = event.RecordingListener()
with event.install_listener("numba:compile", counted):
    from tests.kernels import doubling
    doubling.register()
import jax, jax.numpy as jnp
from tests.kernels.test_ffi import double
assert (jax.jit(double)(jnp.ones(64))[0] == 2).all()
print(len(counted.buffer))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    """What is kept on disk has no address of the first process in it."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    counts = []
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, "-c", COUNT_COMPILES], capture_output=True, text=True, env=environment, cwd=ROOT
        )
        assert result.returncode == 0, result.stderr
        counts.append(int(result.stdout))
    assert counts[0] > 2
    assert counts[1] == 0
    assert list(tmp_path.rglob("*.nbc"))


USE = """
import sys, importlib
import jax, jax.numpy as jnp, numpy as np
from tests.kernels.test_ffi import call
for name, factor in zip(sys.argv[1::2], map(int, sys.argv[2::2])):
    made = importlib.import_module(name)
    made.register()
    assert (np.asarray(jax.jit(lambda x: call(made.NAME, x))(jnp.ones(64))[0]) == factor).all(), name
"""


def test_what_other_processes_kept_goes_together(tmp_path):
    """Two calls, each compiled in a process of its own, loaded by one that needs both."""
    source = Path(doubling.__file__).read_text(encoding="utf-8")
    other = source.replace("xjax_test_doubling", "xjax_test_tripling").replace(
        "value + value", "value + value + value"
    )
    (tmp_path / "tripling.py").write_text(other, encoding="utf-8")
    path = f"{ROOT}{os.pathsep}{ROOT / 'server'}{os.pathsep}{tmp_path}"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": path}
    one, two = ["tests.kernels.doubling", "2"], ["tripling", "3"]
    for uses in (one, two, one + two, two + one):
        result = subprocess.run(
            [sys.executable, "-c", USE, *uses], capture_output=True, text=True, env=environment, cwd=ROOT
        )
        assert result.returncode == 0, (uses, result.stderr)


def test_jobs_are_freed_by_whoever_comes_last():
    """A helper that starts late lets go of a job whose caller is gone: memory does not grow."""
    run, x = jax.jit(double), jnp.ones(64)
    before = _resident()
    for _ in range(20000):
        run(x)
    jax.block_until_ready(run(x))
    assert _resident() - before < 8 << 20


def _resident() -> int:
    pages = Path("/proc/self/statm")
    if not pages.exists():
        pytest.skip("no /proc here")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_cannot_be_compiled_is_a_line(monkeypatch):
    def compile_nothing(*args, **kwargs):
        raise ffi.NumbaError("no such type\nwith many lines")

    monkeypatch.setattr(ffi.numba, "cfunc", compile_nothing)
    with pytest.raises(LoadError, match="^kernel broken cannot be compiled here: no such type; take"):
        ffi.register("broken", lambda frame: 0, lambda job, index, worker: None)


def test_nothing_is_kept_where_nothing_can_be_written(monkeypatch, tmp_path):
    """Numba would then keep it beside the source, by the date of that one file."""
    (tmp_path / "file").write_text("")
    kept = []
    monkeypatch.setattr(ffi._settings, "CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(ffi.numba, "cfunc", lambda kind, *, cache, error_model: kept.append(cache) or _stop)
    with pytest.raises(LoadError):
        ffi.register("unwritable", lambda frame: 0, lambda job, index, worker: None)
    assert kept == [False]


def _stop(function):
    raise RuntimeError("far enough")


def test_the_digest_is_of_all_kernels(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    (folder / "attention").mkdir(parents=True)
    (folder / "ffi.py").write_text("a")
    (folder / "attention" / "numba.py").write_text("b")
    monkeypatch.setattr(ffi, "__file__", str(folder / "ffi.py"))
    first = ffi.source_digest()
    assert ffi.source_digest() == first
    (folder / "attention" / "numba.py").write_text("c")
    assert ffi.source_digest() != first
