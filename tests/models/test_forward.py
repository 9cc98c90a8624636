"""What forward promises beside its numbers: no copies, gradients, layer outputs, embeddings put in."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xjax.kernels.pages import page_dtype
from xjax.models import gemma3, llama
from xjax.models.decoder import Config
from xjax.models.layers import LayerParts
from xjax.models.rope import Rope
from xjax.state.batch import BatchShape, Packed, packed_length, unpack
from xjax.state.kv import abstract_state, allocate, state_bytes

pytestmark = pytest.mark.device

LLAMA = Config(
    num_layers=2, embed_dim=24, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=40, vocab_size=31,
    max_context=64, norm_eps=1e-5, tied=True, rope=Rope(8), parts=LayerParts(qkv_bias=True),
)  # fmt: skip
GEMMA = Config(
    num_layers=2, embed_dim=24, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=40, vocab_size=31,
    max_context=64, norm_eps=1e-5, tied=True, rope=Rope(8, 1e6), local_rope=Rope(8), windows=(6, None),
    query_scale=0.3, embed_scale=24**0.5,
)  # fmt: skip
FAMILIES = [(llama.FAMILY, LLAMA), (gemma3.FAMILY, GEMMA)]
NUM_PAGES = 51


def shape_of(config, **changes):
    groups = 1 if config is LLAMA else 2
    sizes = {
        "num_rows": 3,
        "num_decode": 2,
        "num_prefill": 8,
        "tile": 8,
        "num_groups": groups,
        "max_pages": 8,
    }
    return BatchShape(**(sizes | changes), num_sampled=3, trash_row=3)


def state_of(family, config, dtype="float32"):
    spec = family.cache_spec(config)
    pages = (NUM_PAGES,) * (1 if config is LLAMA else 2)
    return abstract_state(spec, num_pages=pages, page_size=4, num_rows=3, dtype=jnp.dtype(dtype))


def a_batch(config, **changes):
    packed = Packed(shape_of(config, **changes))
    packed.table[:] = 1 + np.arange(24).reshape(3, 8)
    packed.token_id[:] = np.arange(10) + 3
    packed.position[:] = [0, 0, *range(6), -1, -1]
    packed.row_of[:] = [0, 1, *[2] * 8]
    packed.write[:] = [4, 36, *(68 + np.arange(6)), 0, 0]
    return packed


@pytest.mark.parametrize(("family", "config"), FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_page_is_copied(family, config, dtype):
    def step(params, state, packed):
        batch, sampled = unpack(packed, shape_of(config))
        hidden, state = family.forward(params, config, state, batch)
        return state, family.logits(params, config, hidden[sampled.token])

    kind = page_dtype(jnp.dtype(dtype), "cpu")
    state = state_of(family, config, kind)
    packed = jax.ShapeDtypeStruct((packed_length(shape_of(config)),), jnp.int32)
    params = family.abstract(config, jnp.dtype(dtype))
    compiled = jax.jit(step, donate_argnums=1).lower(params, state, packed).compile()
    page = state.kv[0].k
    assert compiled.memory_analysis().alias_size_in_bytes == state_bytes(state)
    # Whatever has as many elements as the pages must be the pages themselves, of the one dtype.
    sizes = rf"\[(?:{','.join(map(str, page.shape))}|{NUM_PAGES * 2},4,8)\]"
    found = set(re.findall(rf"= (\w+){sizes}\S* ([\w-]+)\(", compiled.as_text()))
    name = {"float32": "f32", "float16": "f16", "uint16": "u16"}[kind.name]
    allowed = {"parameter", "bitcast", "get-tuple-element", "scatter", "fusion"}
    assert {kind for kind, _ in found} == {name}
    assert {operation for _, operation in found} <= allowed
    assert (name, "scatter") in found


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_gradient_is_the_slope(family, config):
    params = family.init(jax.random.key(1), config, jnp.dtype("float32"))
    state, packed = allocate(state_of(family, config)), a_batch(config)
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((10, 31), np.float32))

    rng = np.random.default_rng(2)
    way = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params)

    def loss(params, size):
        batch, _ = unpack(jnp.asarray(packed.vector), shape_of(config))
        params = jax.tree.map(lambda x, d: x + size * d, params, way)
        hidden, _ = family.forward(params, config, state, batch)
        return jnp.sum((weight * family.logits(params, config, hidden))[:8])

    gradient = jax.jit(jax.grad(loss))(params, 0.0)
    for name in ("qkv", "norm"):
        assert np.abs(getattr(gradient.layers[0].attention, name)).max() > 1e-3
    at = jax.jit(loss)
    slope = (float(at(params, 1e-3)) - float(at(params, -1e-3))) / 2e-3
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(way), strict=True)
    assert sum(float(np.vdot(g, d)) for g, d in pairs) == pytest.approx(slope, rel=2e-2)


@functools.partial(jax.jit, static_argnames=("family", "config", "shape", "trace"))
def run(params, state, packed, embeds, *, family, config, shape, trace=False):
    batch, _ = unpack(packed, shape, embeds=embeds)
    return family.forward(params, config, state, batch, trace=trace)


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_trace_and_embeds(family, config):
    params = family.init(jax.random.key(1), config, jnp.dtype("float32"))
    state, packed = allocate(state_of(family, config)), a_batch(config)
    hidden, _, outputs = run(
        params, state, packed.vector, None, family=family, config=config, shape=packed.shape, trace=True
    )
    assert len(outputs) == config.num_layers
    last = np.asarray(outputs[-1])
    normed = last / np.sqrt((last**2).mean(-1, keepdims=True) + config.norm_eps)
    np.testing.assert_allclose(hidden, normed * np.asarray(params.norm), atol=1e-5)

    scale = 1.0 if family is llama.FAMILY else config.embed_scale
    put = a_batch(config, num_embeds=3)
    put.token_id[:] = packed.token_id
    put.token_id[3:5] = 0
    put.embed_index[:2] = [3, 4]  # the third stays padding and is dropped
    embeds = np.full((3, 24), np.nan, np.float32)
    embeds[:2] = np.asarray(params.embed)[packed.token_id[3:5]] * np.float32(scale)
    again, _ = run(
        params, state, put.vector, jnp.asarray(embeds), family=family, config=config, shape=put.shape
    )
    np.testing.assert_allclose(again, hidden, atol=1e-6)


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_wanted_tokens_alone_give_the_same(family, config):
    params = family.init(jax.random.key(1), config, jnp.dtype("float32"))
    batch, _ = unpack(jnp.asarray(a_batch(config).vector), shape_of(config))
    wanted = jnp.array([1, 4, 7, 4], jnp.int32)
    whole, after = family.forward(params, config, allocate(state_of(family, config)), batch)
    some, after_some = family.forward(
        params, config, allocate(state_of(family, config)), batch, wanted=wanted
    )
    assert float(jnp.abs(whole[wanted]).max()) > 0.1
    np.testing.assert_allclose(some, whole[wanted], atol=2e-6)
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(after_some), strict=True):
        np.testing.assert_array_equal(one, other)  # every token is written, wanted or not
