"""Codes put together stand for the numbers put together; what cannot share an array becomes numbers."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xjax.checkpoints.quantized.codes import Codes, QuantizedView
from xjax.state.mesh import ParamSpec
from xjax.state.quantized import QuantizedArray, to_float
from xjax.weights.codes import alike, read_codes
from xjax.weights.fuse import fuse_qkv, stack, stack_experts
from xjax.weights.plan import LeafPlan
from xjax.weights.read import parts_of

pytestmark = pytest.mark.device

NUM_IN = 32
QKV = partial(fuse_qkv, num_kv_heads=2, head_dim=8)
ORDER = np.random.default_rng(5).permutation(NUM_IN).astype(np.int32)


def draw(rows, *, kind="int4", group=16, zeros=True, order=None, seed=0):
    rng = np.random.default_rng([seed, rows])
    groups = NUM_IN // group
    codes = {
        "int4": rng.integers(0, 256, (rows, NUM_IN // 2)).astype(np.uint8),
        "int8": rng.integers(-128, 128, (rows, NUM_IN)).astype(np.int8),
        "float8_e4m3fn": rng.integers(0, 127, (rows, NUM_IN)).astype(np.uint8),
        "float8_e5m2": rng.integers(0, 124, (rows, NUM_IN)).astype(np.uint8),
    }[kind]
    scales = rng.uniform(0.01, 0.1, (rows, groups)).astype(np.float32)
    shift = rng.integers(-8, 8, (rows, groups)).astype(np.int8) if zeros else None
    return Codes(codes, scales, shift, order, kind)


def plan_of(parts, fuse):
    rows = [len(part.scales) for part in parts]
    views = [
        QuantizedView(f"t{i}", (count, NUM_IN), "test", (), partial(lambda part: part, part))
        for i, (count, part) in enumerate(zip(rows, parts, strict=True))
    ]
    spec = ParamSpec((sum(rows), NUM_IN), ("kv_heads", "embed"))
    return LeafPlan(spec, tuple(views), fuse, is_codes=True)


def wanted(parts, fuse):
    out = np.empty((sum(len(part.scales) for part in parts), NUM_IN), np.float32)
    fuse(out, [part.numbers() for part in parts])
    return out


def made(parts, fuse):
    return read_codes(plan_of(parts, fuse), jnp.dtype("float32"), np.empty)


@pytest.mark.parametrize("order", [None, ORDER])
@pytest.mark.parametrize("kind", ["int4", "int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("pairs", [0, 4, 8])
def test_q_k_v(kind, order, pairs):
    parts = [draw(rows, kind=kind, order=order, zeros="float" not in kind) for rows in (32, 16, 16)]
    fuse = partial(QKV, pairs=pairs)
    found = made(parts, fuse)
    assert isinstance(found, QuantizedArray)
    assert (found.kind, found.shape) == (f"{kind}_16", (64, NUM_IN))
    values = to_float(jax.device_put(found), jnp.dtype("float32"))
    np.testing.assert_array_equal(values, wanted(parts, fuse))


def test_zeros_of_some():
    parts = [draw(8), draw(8, zeros=False, seed=1)]
    found = made(parts, stack)
    assert found.zeros[8:].any() == False  # noqa: E712
    np.testing.assert_array_equal(to_float(jax.device_put(found), jnp.dtype("float32")), wanted(parts, stack))


def test_one_scale_an_output():
    found = made([draw(8, group=NUM_IN)], stack)
    assert (found.kind, found.scales.shape) == ("int4", (8, 1))


UNLIKE = {
    "orders": [draw(8, order=ORDER), draw(8, order=ORDER[::-1].copy())],
    "one order": [draw(8, order=ORDER), draw(8)],
    "kinds": [draw(8), draw(8, kind="int8")],
    "groups": [draw(8), draw(8, group=8)],
    "types of float": [draw(8, kind="float8_e4m3fn"), draw(8, kind="float8_e5m2")],
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_cannot_share_becomes_numbers(name):
    parts = UNLIKE[name]
    assert not alike(parts)
    found = made(parts, stack)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, wanted(parts, stack))
    rounded = read_codes(plan_of(parts, stack), jnp.dtype("bfloat16"), np.empty)
    np.testing.assert_array_equal(rounded, wanted(parts, stack).astype(jnp.bfloat16))


@pytest.mark.parametrize("shape", [(3, 16, NUM_IN), (48, NUM_IN)])
def test_where_codes_may_not_stay(shape):
    """Stacked experts, say: every matrix becomes numbers right where it belongs."""
    parts = [draw(16, order=ORDER, seed=seed) for seed in range(3)]
    plan = plan_of(parts, stack_experts if len(shape) == 3 else stack)
    plan = dataclasses.replace(plan, spec=ParamSpec(shape, (None,) * len(shape)), is_codes=False)
    out = np.empty(shape, np.float32)
    pieces = list(parts_of(plan, out))
    assert len(pieces) == 3
    for piece in reversed(pieces):
        piece()
    np.testing.assert_array_equal(out.reshape(48, NUM_IN), wanted(parts, stack))
