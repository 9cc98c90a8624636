"""A row's first tokens and its mass: against numpy, of odd rows too; the same bits in any batch."""

import functools
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.sampling.reference import order_of
from xjax.kernels.candidates import pick

pytestmark = pytest.mark.device

HAS_NUMBA = importlib.util.find_spec("numba") is not None
BACKENDS = ["xla", *(["numba"] if HAS_NUMBA else [])]
ROOT = Path(__file__).resolve().parent.parent.parent
needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")


@functools.partial(jax.jit, static_argnames=("num", "backend"))
def picked(logits, temperature, num, backend):
    return pick(logits, temperature, num, backend=backend)


def run(logits, temperature, num=128, backend="numba"):
    temperature = np.broadcast_to(np.float32(temperature), len(logits))
    num = min(num, logits.shape[1])
    found = picked(jnp.asarray(logits), jnp.asarray(temperature), num, backend)
    return tuple(np.asarray(part) for part in found)


def check(logits, temperature, num=128, backend="numba"):
    """Values, ids and mass of each row against a full sort and sums in float64."""
    values, ids, logsumexp = run(logits, temperature, num, backend)
    large = np.finfo(np.float32).max
    for j, row in enumerate(np.where(np.isnan(logits), np.float32(np.inf), logits)):
        order = order_of(row)[: values.shape[1]]
        warmth = np.float64(np.broadcast_to(np.float32(temperature), len(logits))[j])
        if not warmth > 0:
            assert ids[j, 0] == order[0] and values[j, 0] == row[order[0]]
            assert not ids[j, 1:].any() and (values[j, 1:] == -np.inf).all() and logsumexp[j] == 0
            continue
        assert np.array_equal(ids[j], order)
        assert np.array_equal(values[j], row[order])
        wide = np.minimum(row, large).astype(np.float64)
        with np.errstate(divide="ignore", over="ignore"):
            expected = np.log(np.exp((wide - np.clip(row.max(), -large, large)) / warmth).sum())
        if np.isfinite(expected):
            assert abs(logsumexp[j] - expected) < 2e-6 * max(1.0, abs(expected))
        else:
            assert logsumexp[j] == expected


def drawn(rows, size, *, step=0.0, seed=0):
    logits = np.random.default_rng(seed).normal(scale=3, size=(rows, size)).astype(np.float32)
    return np.round(logits / step).astype(np.float32) * np.float32(step) + 0.0 if step else logits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 5, 63, 129, 1001, 32768, 32769, 70001])
@pytest.mark.parametrize("step", [0.0, 1.0])
def test_first_tokens_and_mass(size, step, backend):
    check(drawn(4, size, step=step), [0.0, 0.7, 1e-6, 30.0], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num", [1, 7, 16, 200])
def test_any_number_of_tokens(num, backend):
    check(drawn(2, 40001, seed=num), 0.9, num, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [300, 40003])
def test_rows_that_are_not_finite(size, backend):
    logits = drawn(10, size)
    minus_nan = np.array([0xFFC00000], np.uint32).view(np.float32)[0]
    logits[0, size - 7] = np.nan
    logits[1, 3], logits[1, size - 1] = minus_nan, np.inf
    logits[2, 5:200] = np.inf
    logits[3] = -np.inf
    logits[4] = -np.inf
    logits[4, size - 1] = -2.0
    logits[5] = np.nan
    logits[6] = np.inf
    logits[7, : size - 3] = -np.inf
    logits[8] = np.where(np.arange(size) % 2, 3e38, -3e38)
    logits[9] = 1.5
    for temperature in (0.0, 0.8, 1e-30):
        check(logits, temperature, backend=backend)


@needs_numba
@pytest.mark.parametrize("direction", [1, -1])
def test_rows_in_order(direction):
    """Rising rows put every token above the threshold, again and again."""
    row = np.arange(70001, dtype=np.float32)[::direction] / 1000
    check(np.ascontiguousarray(np.stack([row, row])), [0.5, 0.0])


@needs_numba
def test_signs_of_zero():
    row = np.float32([-1.0, -0.0, 0.0, -0.0, 0.0])
    values, ids, _ = run(np.stack([row, row]), [0.0, 1.0])
    assert ids[0, 0] == 1  # equal, so the lower id
    assert ids[1].tolist() == [2, 4, 1, 3, 0] and np.signbit(values[1]).tolist() == [False] * 2 + [True] * 3


@needs_numba
def test_both_backends_agree():
    logits = drawn(3, 50021, step=0.25)
    ours, theirs = run(logits, [0.6, 0.0, 1.3]), run(logits, [0.6, 0.0, 1.3], backend="xla")
    assert np.array_equal(ours[0], theirs[0]) and np.array_equal(ours[1], theirs[1])
    assert np.allclose(ours[2], theirs[2], rtol=1e-6, atol=1e-6)


@needs_numba
def test_a_row_has_the_same_bits_in_any_batch():
    logits, temperature = drawn(9, 70003), np.float32([0.3, 0.0, 0.8, 1.2, 0.0, 2.0, 0.7, 0.7, 1e-3])
    whole = run(logits, temperature)
    order = np.random.default_rng(3).permutation(9)
    shuffled = run(logits[order], temperature[order])
    for j in range(9):
        alone = run(logits[j : j + 1], temperature[j : j + 1])
        place = int(np.flatnonzero(order == j)[0])
        for part, single, moved in zip(whole, alone, shuffled, strict=True):
            assert part[j].tobytes() == single[0].tobytes() == moved[place].tobytes()


@needs_numba
def test_two_executions_at_once():
    cases = [(drawn(5, 40007, seed=seed), np.float32(0.5 + seed)) for seed in range(2)]
    expected, wrong = [run(*case) for case in cases], []

    def repeat(i):
        for _ in range(40):
            found = run(*cases[i])
            if any(a.tobytes() != b.tobytes() for a, b in zip(found, expected[i], strict=True)):
                wrong.append(i)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


_IN_A_PROCESS = """
import hashlib
from tests.kernels.test_candidates import drawn, run
found = run(drawn(3, 70003), [0.8, 0.0, 0.4])
print(hashlib.sha256(b"".join(part.tobytes() for part in found)).hexdigest())
"""


@needs_numba
def test_the_number_of_threads_leaves_no_trace():
    """One thread and four, as XLA takes them from the environment of a process."""
    digests = set()
    for num_threads in (1, 4):
        environment = os.environ | {"PJRT_NPROC": str(num_threads), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", _IN_A_PROCESS], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1
