"""Weights as codes: rounding, products, and that models cannot tell."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xjax.state.quantized import matmul, quantize, to_float

pytestmark = pytest.mark.device

KINDS = [("int8", True), ("int8", False), ("int8_32", True), ("int8_32", False)]


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((24, 96), np.float32) * rng.uniform(0.1, 10, (24, 1)).astype(np.float32)
    w[3] = 0
    w[4, :32] = 7.5
    return w


@pytest.mark.parametrize(("kind", "symmetric"), KINDS)
def test_rounding_error_is_half_a_step(weights, kind, symmetric):
    array = quantize(jnp.asarray(weights), kind, symmetric=symmetric)
    found = np.asarray(to_float(array, jnp.dtype("float32")))
    group = weights.shape[1] // array.scales.shape[1]
    assert group == (96 if kind == "int8" else 32)
    step = np.repeat(np.asarray(array.scales), group, 1)
    assert (np.abs(found - weights) <= 0.501 * step + 1e-6).all()
    assert not found[3].any()


@pytest.mark.parametrize(("kind", "symmetric"), KINDS)
def test_product(weights, kind, symmetric):
    x = np.random.default_rng(1).standard_normal((5, 96), np.float32)
    array = quantize(jnp.asarray(weights), kind, symmetric=symmetric)
    exact = x.astype(np.float64) @ np.asarray(to_float(array, jnp.dtype("float32")), np.float64).T
    np.testing.assert_allclose(jax.jit(matmul)(jnp.asarray(x), array), exact, atol=2e-4)
    plain = matmul(jnp.asarray(x), jnp.asarray(weights))
    assert np.abs(plain - exact).max() < 0.02 * np.abs(exact).max()


def test_smaller_groups_are_closer(weights):
    errors = [
        float(jnp.abs(to_float(quantize(jnp.asarray(weights), kind), jnp.dtype("float32")) - weights).mean())
        for kind in ("int8", "int8_32")
    ]
    assert errors[1] < errors[0]


def test_it_is_a_pytree_with_static_kind(weights):
    array = quantize(jnp.asarray(weights), "int8_32", symmetric=False)
    leaves, tree = jax.tree.flatten(array)
    assert len(leaves) == 3
    again = jax.tree.unflatten(tree, leaves)
    assert (again.kind, again.shape) == ("int8_32", (24, 96))
