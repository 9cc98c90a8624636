"""Logits against numpy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from xjax.kernels.head import logits

pytestmark = pytest.mark.device


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_logits(soft_cap):
    rng = np.random.default_rng(0)
    h, w = rng.standard_normal((3, 48), np.float32), rng.standard_normal((101, 48), np.float32)
    wanted = h.astype(np.float64) @ w.astype(np.float64).T
    wanted = wanted if soft_cap is None else soft_cap * np.tanh(wanted / soft_cap)
    np.testing.assert_allclose(logits(jnp.asarray(h), jnp.asarray(w), soft_cap=soft_cap), wanted, atol=1e-4)


def test_logits_are_float32_whatever_the_model():
    h, w = jnp.ones((1, 300), jnp.bfloat16), jnp.ones((2, 300), jnp.bfloat16)
    found = logits(h, w)
    assert found.dtype == jnp.float32
    assert float(found[0, 0]) == 300.0  # 300 is no bfloat16
