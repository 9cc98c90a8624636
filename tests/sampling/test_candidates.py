"""Candidates are the first tokens of the order, with the mass of all."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.sampling.reference import order_of
from xjax.kernels.candidates.rows import first_best, top
from xjax.sampling.candidates import from_logits

pytestmark = pytest.mark.device


@pytest.mark.parametrize("size", [5, 128, 1000, 64 * 128 + 1, 20011])
@pytest.mark.parametrize("step", [0.0, 1.0])
def test_top_and_best_keep_the_order(size, step):
    row = np.random.default_rng(size).normal(scale=2, size=size).astype(np.float32)
    if step:
        row = np.round(row / step).astype(np.float32) * step + 0.0  # ties; no negative zero
    num = min(128, size)
    values, ids = top(jnp.asarray(row), num)
    assert np.array_equal(ids, order_of(row)[:num])
    assert np.array_equal(values, row[order_of(row)[:num]])
    best, best_id = first_best(jnp.asarray(row[None]))
    assert best[0] == row.max() and best_id[0] == np.argmax(row)


def test_mass_is_that_of_the_temperature():
    logits = np.random.default_rng(1).normal(scale=3, size=(3, 5000)).astype(np.float32)
    temperature = np.float32([0.0, 0.7, 1e-6])
    candidates = from_logits(jnp.asarray(logits), jnp.asarray(temperature), num=16)
    assert candidates.values.shape == candidates.ids.shape == (3, 16)
    assert candidates.ids[0, 0] == np.argmax(logits[0])
    for j in (1, 2):
        row = logits[j].astype(np.float64)
        expected = np.log(np.exp((row - row.max()) / np.float64(temperature[j])).sum())
        assert abs(candidates.logsumexp[j] - expected) < 2e-6
