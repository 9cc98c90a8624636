"""Products with weights, as numbers and as codes, against numpy in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xjax.kernels.linear import linear, linear_quantized
from xjax.kernels.linear.xla import dequantize, rows_at_a_time

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


def _numbers(kind, rng, num_out, num_in):
    """Codes of a kind, and what they stand for."""
    if kind == "int4":
        codes = rng.integers(0, 256, (num_out, num_in // 2)).astype(np.uint8)
        return codes, np.stack([codes & 15, codes >> 4], -1).reshape(num_out, num_in).astype(np.float64) - 8
    if kind == "int8":
        codes = rng.integers(-128, 128, (num_out, num_in)).astype(np.int8)
        return codes, codes.astype(np.float64)
    codes = rng.integers(0, 120, (num_out, num_in)).astype(np.uint8)
    return codes, codes.view(jnp.dtype(kind)).astype(np.float64)


@pytest.mark.parametrize("kind", ["int4", "int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_kinds_of_codes(kind, rows):
    """In blocks of outputs whose number divides evenly and whose does not."""
    rng = np.random.default_rng(2)
    for num_out, num_in, group in ((11, 96, 32), (700, 96, 3), (512, 160, 32)):
        x = rng.standard_normal((rows, num_in)).astype(np.float32)
        codes, values = _numbers(kind, rng, num_out, num_in)
        scales = (rng.uniform(0.5, 1, (num_out, num_in // group)) / np.abs(values).max()).astype(np.float32)
        zeros = rng.integers(-8, 8, scales.shape).astype(np.int8)
        w = (values - np.repeat(zeros, group, 1)) * np.repeat(scales.astype(np.float64), group, 1)
        parts = [jnp.asarray(part) for part in (x, codes, scales)]
        found = linear_quantized(*parts, None, jnp.asarray(zeros), code_type=kind)
        np.testing.assert_allclose(found, x @ w.T, rtol=1e-4, atol=1e-4)
    assert rows_at_a_time(11, 96) == 11
    assert rows_at_a_time(700, 96) < 700


def test_dequantized_bits():
    """A difference of whole numbers times a scale, rounded once."""
    rng = np.random.default_rng(3)
    codes = rng.integers(-128, 128, (64, 96)).astype(np.int8)
    zeros = rng.integers(-128, 128, (64, 3)).astype(np.int8)
    scales = rng.uniform(1e-4, 1, (64, 3)).astype(np.float32)
    wanted = (codes.astype(np.int32) - np.repeat(zeros, 32, 1)).astype(np.float32) * np.repeat(scales, 32, 1)
    numbers = jax.jit(partial(dequantize, code_type="int8", dtype=jnp.dtype("float32")))
    found = numbers(codes, scales, None, zeros)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("rows", [1, 8, 160])
def test_a_block_of_numbers_at_a_time(rows):
    """A step over many matrices never holds the numbers of all: the compiler would begin with them."""
    size, layers = 1024, 8

    def run(x, parts):
        for codes, scales in parts:
            x = x + linear_quantized(x, codes, scales, code_type="int4")
        return x

    codes = jax.ShapeDtypeStruct((size, size // 2), jnp.uint8)
    scales = jax.ShapeDtypeStruct((size, size // 32), jnp.float32)
    x = jax.ShapeDtypeStruct((rows, size), jnp.float32)
    compiled = jax.jit(run).lower(x, [(codes, scales)] * layers).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    block = 4 * size * rows_at_a_time(size, size)
    assert block <= 2 * size * size
    assert analysis.temp_size_in_bytes < 2 * block + 4 * layers * 4 * rows * size
