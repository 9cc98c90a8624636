"""Three views of one tree of specs; what is split and what is replicated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from xjax.models import llama
from xjax.models.decoder import Config
from xjax.models.layers import LayerParts
from xjax.models.rope import Rope
from xjax.state.mesh import ParamSpec, make_mesh, page_sharding, partition

pytestmark = pytest.mark.device

CONFIG = Config(
    num_layers=2, embed_dim=16, num_heads=8, num_kv_heads=4, head_dim=4, ffn_dim=24, vocab_size=32,
    max_context=64, norm_eps=1e-5, tied=True, rope=Rope(4), parts=LayerParts(qkv_bias=True),
)  # fmt: skip


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(jax.devices()[:4])


def test_units_decide_what_is_split(mesh):
    assert partition(ParamSpec((32, 16), ("kv_heads", "embed"), units=4), mesh) == PartitionSpec(
        "tensor", None
    )
    assert partition(ParamSpec((16, 32), ("embed", "kv_heads"), units=8), mesh) == PartitionSpec(
        None, "tensor"
    )
    assert partition(ParamSpec((32, 16), ("kv_heads", "embed"), units=2), mesh) == PartitionSpec()
    assert partition(ParamSpec((16,), (None,)), mesh) == PartitionSpec()
    assert page_sharding(mesh, 4).spec == PartitionSpec(None, "tensor")
    assert page_sharding(mesh, 3).spec == PartitionSpec(None, None)


def test_the_views_agree(mesh):
    abstract = llama.FAMILY.abstract(CONFIG, jnp.dtype("bfloat16"))
    params = llama.FAMILY.init(jax.random.key(0), CONFIG, jnp.dtype("bfloat16"))
    shardings = llama.FAMILY.shardings(CONFIG, mesh)
    assert jax.tree.structure(abstract) == jax.tree.structure(params) == jax.tree.structure(shardings)
    for spec, value in zip(jax.tree.leaves(abstract), jax.tree.leaves(params), strict=True):
        assert (spec.shape, spec.dtype) == (value.shape, value.dtype)
    placed = jax.device_put(params, shardings)
    attention = placed.layers[0].attention
    assert attention.qkv.sharding.shard_shape(attention.qkv.shape) == (16, 16)
    assert attention.norm.dtype == jnp.float32
    assert not np.asarray(attention.qkv_bias, np.float32).any()


def test_each_array_has_its_own_numbers():
    params = llama.FAMILY.init(jax.random.key(0), CONFIG, jnp.dtype("float32"))
    first, second = (layer.attention.qkv for layer in params.layers)
    assert not np.array_equal(first, second)
    assert 0.8 < float(jnp.std(first)) * 4 < 1.2
