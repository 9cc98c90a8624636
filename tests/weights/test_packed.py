"""Matrices that stay codes: the numbers they stand for are those that the file is loaded as otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.weights.blocks import WIDE, fill, write_wide
from xjax.checkpoints.blocks import SPLITTERS
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.kernels.linear.forms import unpack
from xjax.models.registry import load_config
from xjax.state.packed import JoinedArray, PackedArray
from xjax.state.quantized import is_quantized, to_float
from xjax.weights.load import load_params
from xjax.weights.packed import FORM_BY_TYPE

pytestmark = pytest.mark.device


def load(path, **options):
    checkpoint = open_checkpoint(path)
    family, config = load_config(
        checkpoint.kind, checkpoint.architecture, checkpoint.config, checkpoint.tensors
    )
    return load_params(checkpoint, family, config, dtype=jnp.dtype("float32"), **options)


def _numbers(leaf):
    if isinstance(
        leaf, PackedArray
    ):  # XLA's own way is tested with the array type, and takes long to compile
        return unpack(leaf.form, np.asarray(leaf.data), leaf.shape)
    return np.asarray(to_float(leaf, jnp.dtype("float32")) if is_quantized(leaf) else leaf)


def assert_stands_for(packed, wanted):
    """Bit for bit; returns the leaves that are codes."""
    found = jax.tree.leaves(packed, is_leaf=is_quantized)
    leaves = jax.tree.leaves(wanted)
    assert len(found) == len(leaves)
    for one, other in zip(found, leaves, strict=True):
        np.testing.assert_array_equal(_numbers(one), np.asarray(other))
        assert one.shape == other.shape
    return [leaf for leaf in found if is_quantized(leaf)]


def test_every_type_that_is_taken_apart_has_a_form():
    assert FORM_BY_TYPE.keys() == SPLITTERS.keys()


@pytest.mark.parametrize("dtype", SPLITTERS)
def test_one_type_in_all_matrices(dtype, tmp_path, monkeypatch):
    fill(monkeypatch, [dtype])
    path = write_wide("llama_tied", tmp_path / "model.gguf")
    codes = assert_stands_for(load(path, packs=True), load(path))
    assert len(codes) == 1 + 2 * 4
    assert all(isinstance(leaf, PackedArray) and leaf.form.name == FORM_BY_TYPE[dtype] for leaf in codes)


MIXTURES = [["q4_k", "q4_k", "q6_k"], ["q5_0", "q8_0", "iq4_xs", "q4_1", "q6_k"], ["iq4_xs", "q5_k"]]


@pytest.mark.parametrize("types", MIXTURES, ids="-".join)
@pytest.mark.parametrize("name", WIDE)
def test_families_with_mixed_types(name, types, tmp_path, monkeypatch):
    used = fill(monkeypatch, types)
    path = write_wide(name, tmp_path / "model.gguf")
    codes = assert_stands_for(load(path, packs=True), load(path))
    assert set(used) == set(types)
    assert len(codes) > 4
    if name == "llama_tied":
        assert any(isinstance(leaf, JoinedArray) for leaf in codes)


def test_only_products_and_the_embedding_stay_codes(tmp_path, monkeypatch):
    fill(monkeypatch, ["q8_0"])
    params = load(write_wide("qwen2moe_shared", tmp_path / "model.gguf"), packs=True)
    found = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)[0]
    names = {
        ".".join(step.name for step in path if hasattr(step, "name"))
        for path, leaf in found
        if is_quantized(leaf)
    }
    assert names == {
        "embed", "head", "layers.attention.qkv", "layers.attention.o", "layers.feed_forward.shared.gate_up",
        "layers.feed_forward.shared.down",
    }  # fmt: skip


def test_codes_are_placed_as_they_were_read(tmp_path, monkeypatch):
    """Aligned, so that the device takes memory over, and no wider than the file but for steps."""
    fill(monkeypatch, ["q4_k"])
    path = write_wide("llama_tied", tmp_path / "model.gguf")
    params = load(path, packs=True, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    sizes = sum(leaf.nbytes for leaf in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(leaf))
    tensors = open_checkpoint(path).tensors.values()
    in_file = sum(view.num_bytes for view in tensors if view.dtype == "q4_k")
    assert in_file < sizes < 1.1 * in_file  # the vocabulary of 61 is filled up to 64
    for leaf in jax.tree.leaves(params):
        if leaf.dtype == jnp.uint8:
            assert leaf.unsafe_buffer_pointer() % 64 == 0


def test_an_odd_number_of_outputs_is_filled_up_with_zeros(tmp_path, monkeypatch):
    fill(monkeypatch, ["q5_1"])
    embed = load(write_wide("llama_tied", tmp_path / "model.gguf"), packs=True).embed
    assert embed.shape == (61, 256)
    whole = _numbers(embed.replace(shape=(64, 256)))
    assert whole[:61].any() and not whole[61:].any()


def test_progress_counts_bytes_of_the_file(tmp_path, monkeypatch):
    fill(monkeypatch, ["q4_0"])
    path, seen = write_wide("llama_tied", tmp_path / "model.gguf"), []
    load(path, packs=True, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0
