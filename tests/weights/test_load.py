"""From files to parameters: every form of the same model gives the same arrays, and faults are named."""

import dataclasses
import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tests.golden.checkpoints import write_folder, write_gguf
from tests.golden.recipe import CASES, Case, weights
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.errors import LoadError
from xjax.models import llama
from xjax.models.registry import load_config
from xjax.models.rope import inverse_frequencies
from xjax.state.mesh import make_mesh
from xjax.weights.load import load_params

pytestmark = pytest.mark.device


def load(path, dtype="float32", **options):
    checkpoint = open_checkpoint(path)
    family, config = load_config(
        checkpoint.kind, checkpoint.architecture, checkpoint.config, checkpoint.tensors
    )
    return config, load_params(checkpoint, family, config, dtype=jnp.dtype(dtype), **options)


def assert_same(found, wanted, tolerance=0.0):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=tolerance)


def test_fused_layout(tmp_path):
    """q, k and v by kv head; gate over up; checked against the named tensors."""
    case = CASES["llama_tied"]
    _, params = load(write_folder(case, tmp_path))
    named, attention = weights(case), params.layers[1].attention
    q, k, v = (named[f"model.layers.1.self_attn.{x}_proj.weight"].reshape(-1, 8, 48) for x in "qkv")
    wanted = np.concatenate([q[:3], k[:1], v[:1], q[3:], k[1:], v[1:]])
    np.testing.assert_array_equal(attention.qkv, wanted.reshape(-1, 48))
    gate, up = (named[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    np.testing.assert_array_equal(params.layers[1].feed_forward.gate_up, np.concatenate([gate, up]))
    assert params.head is None


@pytest.mark.parametrize("name", ["llama_mha_biases", "llama_linear", "gemma_tied"])
def test_gguf_equals_folder(name, tmp_path):
    config, params = load(write_folder(CASES[name], tmp_path / "hf"))
    gguf_config, gguf_params = load(write_gguf(CASES[name], tmp_path / "model.gguf"))
    assert_same(gguf_params, params)
    changes = {"query_scale": config.query_scale} if name == "gemma_tied" else {}
    assert gguf_config.norm_eps == pytest.approx(config.norm_eps)
    assert dataclasses.replace(gguf_config, norm_eps=config.norm_eps, **changes) == config


def test_split_gguf(tmp_path):
    case = CASES["llama_llama3"]
    config, params = load(write_gguf(case, tmp_path / "one.gguf"))
    write_gguf(case, tmp_path / "m.gguf", split=7)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    split_config, split_params = load(parts[1])
    assert split_config == config
    assert_same(split_params, params)


def test_gguf_llama3_factors(tmp_path):
    config, params = load(write_folder(CASES["llama_llama3"], tmp_path / "hf"))
    gguf_config, gguf_params = load(write_gguf(CASES["llama_llama3"], tmp_path / "model.gguf"))
    assert_same(gguf_params, params)
    np.testing.assert_allclose(
        inverse_frequencies(gguf_config.rope), inverse_frequencies(config.rope), rtol=1e-6
    )


def test_quantized_gguf(tmp_path):
    case = Case("llama_tied", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32})
    _, exact = load(write_gguf(case, tmp_path / "exact.gguf"))
    _, params = load(write_gguf(case, tmp_path / "q8.gguf", quantize=gguf.GGMLQuantizationType.Q8_0))
    assert_same(params, exact, tolerance=0.02)
    assert not np.array_equal(params.embed, exact.embed)


def test_shards_and_multi_modal_names(tmp_path):
    case = CASES["gemma_layer_types"]
    config, params = load(write_folder(case, tmp_path / "one"))
    _, sharded = load(write_folder(case, tmp_path / "three", num_shards=3))
    assert_same(sharded, params)
    folder = write_folder(case, tmp_path / "nested", prefix="language_model.", nest=True)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    nested_config, nested = load(folder)
    assert nested_config == config
    assert_same(nested, params)


def test_dtype_and_progress(tmp_path):
    seen = []
    _, params = load(
        write_folder(CASES["gemma_tied"], tmp_path),
        "bfloat16",
        progress=lambda done, total: seen.append((done, total)),
    )
    layer = params.layers[0]
    assert layer.attention.qkv.dtype == jnp.bfloat16
    assert layer.attention.norm.dtype == jnp.float32  # 1 + w would round away
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_sharded_placement(tmp_path):
    case = Case("llama_tied", {"num_attention_heads": 8, "num_key_value_heads": 4})
    folder = write_folder(case, tmp_path)
    config, params = load(folder)
    mesh = make_mesh(jax.devices()[:4])
    _, placed = load(folder, sharding=llama.FAMILY.shardings(config, mesh))
    assert_same(placed, params)
    qkv = placed.layers[0].attention.qkv
    assert qkv.sharding.shard_shape(qkv.shape) == (qkv.shape[0] // 4, 48)


def _rewrite(folder, change):
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


BROKEN = [
    (
        lambda t: t.update({"model.layers.1.mlp.up_proj.weight": np.zeros((81, 48), np.float32)}),
        r"model\.safetensors.*model\.layers\.1\.mlp\.up_proj\.weight.*\(80, 48\).*\(81, 48\)",
    ),
    (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
    (
        lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.zeros((80, 48), np.float32)}),
        r"model\.layers\.2\.mlp\.up_proj\.weight has no place",
    ),
]


@pytest.mark.parametrize(("change", "words"), BROKEN)
def test_faults_are_named(change, words, tmp_path):
    folder = write_folder(CASES["llama_tied"], tmp_path)
    _rewrite(folder, change)
    with pytest.raises(LoadError, match=words) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_redundant_tensors_are_let_be(tmp_path):
    folder = write_folder(CASES["llama_tied"], tmp_path)
    extra = {"lm_head.weight": (61, 48), "model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    _rewrite(folder, lambda t: t.update({name: np.zeros(shape, np.float32) for name, shape in extra.items()}))
    assert load(folder)[1].head is None


def test_untied_without_a_head(tmp_path):
    folder = write_folder(CASES["llama_mha_biases"], tmp_path)
    _rewrite(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(LoadError, match=r"lm_head\.weight is missing"):
        load(folder)


def test_unknown_architecture(tmp_path):
    folder = write_folder(CASES["llama_tied"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NopeForCausalLM"]}))
    with pytest.raises(LoadError, match="NopeForCausalLM"):
        load(folder)
