"""Mixture of experts: every backend gives what each expert on its own gives, whoever uses it."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xjax.kernels.moe import moe

pytestmark = pytest.mark.device

BACKENDS = ["xla", "accelerator"] + (["numba"] if importlib.util.find_spec("numba") else [])


def draw(num_tokens, num_experts, each, embed, ffn, *, seed=0, dtype=jnp.float32):
    """x, expert_id, weight, gate_up, down; a token's experts differ."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(num_experts)[:each] for _ in range(num_tokens)]).astype(np.int32)
    weight = rng.uniform(0.1, 1, (num_tokens, each)).astype(np.float32)
    x, gate_up, down = (
        jnp.asarray(rng.standard_normal(shape) * scale, dtype)
        for shape, scale in (
            ((num_tokens, embed), 1), ((num_experts, 2 * ffn, embed), embed**-0.5),
            ((num_experts, embed, ffn), ffn**-0.5),
        )
    )  # fmt: skip
    return x, ids, weight, gate_up, down


def reference(x, ids, weight, gate_up, down, activation="silu"):
    """Every expert for every token in float64, and then the chosen ones."""
    x, gate_up, down = (np.asarray(value).astype(np.float64) for value in (x, gate_up, down))
    inner = np.einsum("ne,xfe->nxf", x, gate_up)
    gates, rest = np.split(inner, 2, axis=-1)
    if activation == "silu":
        gates = gates / (1 + np.exp(-gates))
    else:
        gates = gates / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gates + 0.044715 * gates**3)))
    dense = np.einsum("nxf,xef->nxe", gates * rest, down)
    shares = np.zeros(dense.shape[:2])
    for token, (experts, weights) in enumerate(zip(np.asarray(ids), np.asarray(weight), strict=True)):
        for expert, value in zip(experts, weights, strict=True):
            if 0 <= expert < gate_up.shape[0]:
                shares[token, expert] += value
    return np.einsum("nx,nxe->ne", shares, dense)


@functools.cache
def compiled(backend, activation="silu"):
    return jax.jit(functools.partial(moe, activation=activation, backend=backend))


def run(arrays, backend, activation="silu"):
    return np.asarray(compiled(backend, activation)(*arrays).astype(jnp.float32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("tokens", "experts", "each", "embed", "ffn"),
    [
        (1, 8, 2, 64, 32),
        (5, 4, 4, 48, 40),  # every expert for all
        (3, 1, 1, 16, 16),
        (40, 7, 3, 33, 17),  # parts of a vector left, outputs that are no four
        (2, 128, 8, 32, 5),
        (100, 3, 1, 3, 1),  # not a vector whole; more tokens of an expert than a tile
    ],
)
def test_equals_every_expert_on_its_own(backend, tokens, experts, each, embed, ffn):
    arrays = draw(tokens, experts, each, embed, ffn)
    np.testing.assert_allclose(run(arrays, backend), reference(*arrays), rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_activation(backend):
    arrays = draw(9, 4, 2, 24, 16)
    found = run(arrays, backend, "gelu_tanh")
    np.testing.assert_allclose(found, reference(*arrays, "gelu_tanh"), rtol=0, atol=2e-5)
    assert np.abs(found - reference(*arrays)).max() > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("expert", [0, 2, 5])
def test_all_tokens_to_one_expert(backend, expert):
    """What the others hold, nobody sees; but XLA's grouped product on a CPU multiplies it by zero."""
    x, ids, weight, gate_up, down = draw(70, 6, 1, 40, 24)
    ids = np.full_like(ids, expert)
    others = jnp.arange(6)[:, None, None] != expert
    poison = 1e6 if backend == "accelerator" else jnp.nan
    poisoned = (jnp.where(others, poison, gate_up), jnp.where(others, poison, down))
    found = run((x, ids, weight, *poisoned), backend)
    np.testing.assert_allclose(found, reference(x, ids, weight, gate_up, down), rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("none", [6, -1, 2**31 - 1])
def test_tokens_of_no_expert_are_zeros(backend, none):
    """Whole tokens, as padding is, and one of a token's experts; what padding holds does not matter."""
    x, ids, weight, gate_up, down = draw(12, 6, 2, 40, 24)
    ids[4:9], ids[1, 0] = none, none
    x = x.at[5].set(jnp.nan)
    found = run((x, ids, weight, gate_up, down), backend)
    assert not found[4:9].any()
    wanted = reference(x.at[5].set(0), ids, weight, gate_up, down)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
    assert not run((x, np.full_like(ids, none), weight, gate_up, down), backend).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_expert_twice(backend):
    x, ids, weight, gate_up, down = draw(4, 3, 2, 16, 8)
    ids[:, 1] = ids[:, 0]
    arrays = (x, ids, weight, gate_up, down)
    np.testing.assert_allclose(run(arrays, backend), reference(*arrays), rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_does_not_depend_on_the_others(backend):
    """Alone and among others, in any order: but for rounding; to the bit with numba."""
    x, ids, weight, gate_up, down = draw(90, 5, 2, 52, 36)
    together = run((x, ids, weight, gate_up, down), backend)
    order = np.random.default_rng(1).permutation(90)
    shuffled = run((x[order], ids[order], weight[order], gate_up, down), backend)
    alone = np.concatenate(
        [
            run((x[i : i + 1], ids[i : i + 1], weight[i : i + 1], gate_up, down), backend)
            for i in range(0, 90, 9)
        ]
    )
    tolerance = 0 if backend == "numba" else 2e-6
    np.testing.assert_allclose(shuffled, together[order], rtol=0, atol=tolerance)
    np.testing.assert_allclose(alone, together[::9], rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16(backend):
    arrays = draw(20, 5, 2, 64, 48, dtype=jnp.bfloat16)
    assert compiled(backend)(*arrays).dtype == jnp.bfloat16
    wanted = reference(*arrays)
    error = np.abs(run(arrays, backend) - wanted).max()
    assert error < 0.03 * np.abs(wanted).max()


@pytest.mark.parametrize("backend", ["xla", "accelerator"])
def test_gradient(backend):
    """Equal to that of every expert computed for every token and weighted."""
    x, ids, weight, gate_up, down = draw(9, 4, 2, 12, 6)
    ids[3] = 4  # padding
    given = (x, jnp.asarray(weight), gate_up, down)

    def plain(x, weight, gate_up, down):
        inner = jnp.einsum("ne,xfe->nxf", x, gate_up)
        dense = jnp.einsum("nxf,xef->nxe", jax.nn.silu(inner[..., :6]) * inner[..., 6:], down)
        shares = jnp.einsum("nk,nkx->nx", weight, jax.nn.one_hot(ids, 4))
        return jnp.sum(jnp.sin(jnp.einsum("nx,nxe->ne", shares, dense)))

    def ours(x, weight, gate_up, down):
        return jnp.sum(jnp.sin(moe(x, ids, weight, gate_up, down, activation="silu", backend=backend)))

    wanted = jax.grad(plain, argnums=(0, 1, 2, 3))(*given)
    for found, value in zip(jax.grad(ours, argnums=(0, 1, 2, 3))(*given), wanted, strict=True):
        np.testing.assert_allclose(found, value, rtol=0, atol=2e-5)
        assert np.abs(value).max() > 1e-2


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lowers_for_accelerators(platform, dtype):
    shapes = ((33, 64), (33, 4), (33, 4), (16, 96, 64), (16, 64, 48))
    kinds = (dtype, jnp.int32, jnp.float32, dtype, dtype)
    arrays = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
    function = jax.jit(functools.partial(moe, activation="silu", backend="accelerator"))
    text = jax.export.export(function, platforms=[platform])(*arrays).mlir_module()
    assert "sort" in text and ("ragged_dot" in text or "dot_general" in text)


def test_xla_copies_the_weights_of_one_expert_at_a_time():
    """Not of all: neither to multiply them nor to make them wider."""
    for dtype in (jnp.float32, jnp.bfloat16):
        arrays = draw(3, 32, 2, 64, 128, dtype=dtype)
        memory = compiled("xla").lower(*arrays).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 4 * arrays[3].size // 4
