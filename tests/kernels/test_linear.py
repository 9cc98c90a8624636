"""Products with weights, as numbers and as codes, against numpy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from xjax.kernels.linear import linear, linear_quantized

pytestmark = pytest.mark.device


@pytest.mark.parametrize(
    ("rows", "num_in", "num_out"),
    [(1, 32, 7), (2, 48, 9), (8, 96, 64), (128, 32, 6), (129, 32, 6), (33, 160, 5)],
)
def test_linear(rows, num_in, num_out):
    rng = np.random.default_rng(rows)
    x, w = rng.standard_normal((rows, num_in), np.float32), rng.standard_normal((num_out, num_in), np.float32)
    found = linear(jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_allclose(found, x.astype(np.float64) @ w.astype(np.float64).T, atol=1e-4)


def test_bfloat16_accumulates_in_float32():
    x = jnp.ones((1, 4096), jnp.bfloat16)
    w = jnp.full((1, 4096), 1 / 256, jnp.bfloat16)
    found = linear(x, w)
    assert found.dtype == jnp.bfloat16
    assert float(found[0, 0]) == 16.0  # a bfloat16 sum would stop growing long before


@pytest.mark.parametrize("group", [32, 96])
@pytest.mark.parametrize("has_minimum", [False, True])
def test_codes(group, has_minimum):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, 96), np.float32)
    codes = rng.integers(-128, 128, (11, 96)).astype(np.int8)
    scales = rng.uniform(0.001, 0.1, (11, 96 // group)).astype(np.float32)
    minimum = rng.standard_normal(scales.shape, np.float32) if has_minimum else None
    w = codes.astype(np.float64) * np.repeat(scales, group, 1)
    if minimum is not None:
        w = w + np.repeat(minimum, group, 1)
    found = linear_quantized(
        jnp.asarray(x),
        jnp.asarray(codes),
        jnp.asarray(scales),
        None if minimum is None else jnp.asarray(minimum),
    )
    np.testing.assert_allclose(found, x @ w.T, rtol=1e-4, atol=1e-3)
