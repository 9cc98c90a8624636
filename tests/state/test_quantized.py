"""Weights as codes: rounding, products, and that models cannot tell."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from xjax.kernels.linear import xla as linear
from xjax.state.mesh import make_mesh
from xjax.state.quantized import (
    QuantizedArray,
    is_quantized,
    matmul,
    quantize,
    spread,
    to_float,
    working_bytes,
)

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


def codes_of(kind, *, num_out=16, num_in=96, group=16, has_order=False):
    """Random codes with all that a kind may have."""
    rng = np.random.default_rng(4)
    shape, groups = (num_out, num_in), (num_out, num_in // group)
    codes = {
        "int4": lambda: jnp.asarray(rng.integers(0, 256, (num_out, num_in // 2)), jnp.uint8),
        "int8": lambda: jnp.asarray(rng.integers(-128, 128, shape), jnp.int8),
        "float8_e4m3fn": lambda: jnp.asarray(rng.integers(0, 127, shape), jnp.uint8),
    }[kind]()
    return QuantizedArray(
        codes=codes,
        scales=jnp.asarray(rng.uniform(0.01, 0.1, groups), jnp.float32),
        zeros=jnp.asarray(rng.integers(-8, 8, groups), jnp.int8) if "int" in kind else None,
        order=jnp.asarray(rng.permutation(num_in), jnp.int32) if has_order else None,
        kind=f"{kind}_{group}",
        shape=shape,
    )


@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize("kind", ["int4", "int8", "float8_e4m3fn"])
def test_product_is_that_of_the_numbers(kind, has_order):
    w = codes_of(kind, has_order=has_order)
    numbers = to_float(w, jnp.dtype("float32"))
    if has_order:  # column j of the codes belongs to input order[j]
        plain = to_float(w.replace(order=None), jnp.dtype("float32"))
        np.testing.assert_array_equal(numbers[:, w.order[7]], plain[:, 7])
    x = np.random.default_rng(5).standard_normal((3, 96), np.float32)
    exact = x.astype(np.float64) @ np.asarray(numbers, np.float64).T
    np.testing.assert_allclose(jax.jit(matmul)(jnp.asarray(x), w), exact, atol=1e-4)


def test_bytes():
    w = codes_of("int4", has_order=True)
    assert w.nbytes == 16 * 48 + 16 * 6 * 5 + 96 * 4
    assert is_quantized(w)
    assert not is_quantized(w.codes)
    assert working_bytes([]) == 0
    assert working_bytes([w, w]) == 2 * 2 * 4 * 16 * 96
    large = w.replace(shape=(4096, 4096))
    assert working_bytes([large] * 9) == 2 * 4 * (1 << 20)


SPREADS = {
    # where outputs and inputs are split -> where the parts are
    "outputs": ("int4", False, ("tensor", None), ("tensor", None), ("tensor", None)),
    "inputs": ("int4", False, (None, "tensor"), (None, "tensor"), (None, "tensor")),
    "inputs in an order of their own": ("int4", True, (None, "tensor"), (None, None), (None, None)),
    "inputs, one scale an output": ("float8_e4m3fn", False, (None, "tensor"), (None, "tensor"), (None, None)),
    "nothing": ("int8", True, (), (None, None), (None, None)),
}


@pytest.mark.parametrize("name", SPREADS)
def test_where_parts_lie(name):
    kind, has_order, axes, of_codes, of_scales = SPREADS[name]
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:2])
    w = codes_of(kind, has_order=has_order, group=96 if "one scale" in name else 16)
    found = spread(w, NamedSharding(mesh, PartitionSpec(*axes)))
    assert (found.codes.spec, found.scales.spec) == (PartitionSpec(*of_codes), PartitionSpec(*of_scales))
    placed = jax.device_put(w, found)
    x = jnp.asarray(np.random.default_rng(5).standard_normal((3, 96), np.float32))
    np.testing.assert_allclose(jax.jit(matmul)(x, placed), matmul(x, w), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("split", [0, 1])
def test_each_device_multiplies_the_blocks_that_it_holds(split, monkeypatch):
    """No codes and no numbers of theirs are sent, which the compiler by itself would do for every block."""
    monkeypatch.setattr(linear, "_SMALL_WEIGHTS", 64)
    mesh = make_mesh(jax.devices()[:2])
    w, x = codes_of("int4"), jnp.asarray(np.random.default_rng(5).standard_normal((3, 96), np.float32))
    axes = ("tensor", None) if split == 0 else (None, "tensor")
    placed = jax.device_put(w, spread(w, NamedSharding(mesh, PartitionSpec(*axes))))
    run = jax.jit(partial(matmul, mesh=mesh, split=split)).lower(x, placed).compile()
    sent = re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", run.as_text())
    assert sent == [] if split == 0 else "all-gather" not in sent and "all-reduce" in sent
    np.testing.assert_allclose(run(x, placed), matmul(x, w), atol=1e-5)


def test_groups_that_do_not_divide_are_not_split():
    mesh = jax.make_mesh((4,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:4])
    found = spread(codes_of("int8"), NamedSharding(mesh, PartitionSpec(None, "tensor")))  # 6 groups
    assert found.codes.spec == PartitionSpec(None, None)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert spread(codes_of("int8"), one).zeros == one
