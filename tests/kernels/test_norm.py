"""Norms of rows against numpy in float64; the same bits wherever a row is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xjax.kernels.norm import norm

pytestmark = pytest.mark.device
EPS = 1e-5


def reference(x, weight, bias):
    x = np.asarray(x, np.float64)
    if bias is not None:
        x = x - x.mean(-1, keepdims=True)
    scaled = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * np.asarray(weight, np.float64)
    return scaled if bias is None else scaled + np.asarray(bias, np.float64)


def arrays(num_rows, size, *, has_bias, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, size)).astype(np.float32) * 3 + 0.5
    weight, bias = rng.standard_normal((2, size)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(weight), jnp.asarray(bias) if has_bias else None


@pytest.mark.parametrize("backend", ["xla", "numba"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (1, 576), (3, 33), (40, 2048)])
def test_equals_the_definition(num_rows, size, has_bias, backend):
    x, weight, bias = arrays(num_rows, size, has_bias=has_bias)
    out = jax.jit(lambda *given: norm(*given, EPS, backend=backend))(x, weight, bias)
    np.testing.assert_allclose(out, reference(x, weight, bias), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_is_the_same_anywhere(has_bias):
    x, weight, bias = arrays(513, 643, has_bias=has_bias)
    run = jax.jit(lambda *given: norm(*given, EPS, backend="numba"))
    whole = np.asarray(run(x, weight, bias))
    for first, count in ((0, 1), (5, 7), (200, 263), (512, 1)):
        part = np.asarray(run(x[first : first + count], weight, bias))
        assert (part == whole[first : first + count]).all()


def test_rows_that_are_not_numbers_stay_alone():
    x, weight, _ = arrays(4, 64, has_bias=False)
    out = norm(x.at[1, 3].set(jnp.nan), weight, None, EPS, backend="numba")
    assert np.isnan(np.asarray(out)[1]).all() and np.isfinite(np.asarray(out)[[0, 2, 3]]).all()


@pytest.mark.parametrize("backend", ["xla", "numba"])
def test_narrow_rows_and_none(backend):
    x, weight, _ = arrays(3, 64, has_bias=False)
    out = norm(x.astype(jnp.bfloat16), weight, None, EPS, backend=backend)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), reference(x, weight, None), rtol=2e-2, atol=2e-2)
    assert norm(x, None, None, EPS, backend=backend) is x


def test_what_does_not_fit_is_an_error():
    x, weight, _ = arrays(3, 64, has_bias=False)
    with pytest.raises(Exception, match="norm's weights do not fit its rows"):
        jax.block_until_ready(norm(x, weight[:32], None, EPS, backend="numba"))
