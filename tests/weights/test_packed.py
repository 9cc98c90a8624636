"""Matrices that stay codes: the numbers they stand for are those that the file is loaded as otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine import test_quantized_folder
from tests.engine.tiny_folder import write_folder
from tests.weights.blocks import WIDE, fill, write_wide
from xjax.checkpoints.blocks import SPLITTERS
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.checkpoints.tensor import MappedFile
from xjax.kernels.linear.forms import unpack
from xjax.state.packed import JoinedArray, PackedArray
from xjax.state.quantized import QuantizedArray, is_quantized, to_float
from xjax.weights.convert import convert
from xjax.weights.load import load_params, read_config
from xjax.weights.packed import FORM_BY_TYPE, pack_codes

pytestmark = pytest.mark.device


def load(path, **options):
    checkpoint = open_checkpoint(path)
    family, config = read_config(checkpoint)
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


def codes_of(kind, num_out, num_in, groups, seed=0, **changes):
    """Random codes of a quantized folder, scales of 16 bits."""
    rng = np.random.default_rng(seed)
    width = num_in // 2 if kind == "int4" else num_in
    codes = rng.integers(0, 256, (num_out, width), np.uint8)
    scales = rng.uniform(0.5, 1.5, (num_out, groups)).astype(np.float16).astype(np.float32)
    values = {
        "codes": codes if kind == "int4" else codes.view(np.int8), "scales": scales,
        "shape": (num_out, num_in), "kind": kind if groups == 1 else f"{kind}_{num_in // groups}",
    }  # fmt: skip
    return QuantizedArray(**(values | changes))


def zeros_of(num_out, groups):
    return np.random.default_rng(1).integers(-8, 8, (num_out, groups)).astype(np.int8)


@pytest.mark.parametrize(
    ("kind", "groups", "has_zeros"),
    [
        ("int4", 8, False),
        ("int4", 2, False),
        ("int4", 8, True),
        ("int4", 2, True),
        ("int8", 8, False),
        ("int8", 1, False),
    ],
)
def test_codes_of_folders(kind, groups, has_zeros):
    array = codes_of(kind, 37, 256, groups, zeros=zeros_of(37, groups) if has_zeros else None)
    packed = pack_codes(array, jnp.dtype("float32"), np.empty)
    assert isinstance(packed, PackedArray) and packed.form.has_minimum == has_zeros
    assert packed.form.run == 256 // groups // 32
    wanted = to_float(jax.tree.map(jnp.asarray, array), jnp.dtype("float32"))
    np.testing.assert_array_equal(_numbers(packed), np.asarray(wanted))


def test_codes_that_have_no_form_stay():
    order = np.random.default_rng(0).permutation(256).astype(np.int32)
    odd = np.full((37, 8), 0.1, np.float32)  # 24 bits: its products are rounded
    for array in (
        codes_of("int4", 37, 256, 16),
        codes_of("int4", 37, 256, 8, order=order),
        codes_of("int8", 37, 256, 8, zeros=zeros_of(37, 8)),
        codes_of("int4", 37, 256, 8, zeros=zeros_of(37, 8), scales=odd),
        codes_of("float8_e4m3fn", 37, 256, 8),
    ):
        assert pack_codes(array, jnp.dtype("float32"), np.empty) is array


@pytest.mark.parametrize("group", [16, 32])
def test_a_quantized_folder(group, tmp_path, monkeypatch):
    monkeypatch.setattr(test_quantized_folder, "GROUP", group)
    path = test_quantized_folder.quantize_folder(write_folder(tmp_path), 4)
    wanted = jax.tree.leaves(load(path), is_leaf=is_quantized)
    found = jax.tree.leaves(load(path, packs=True), is_leaf=is_quantized)
    coded = [(one, other) for one, other in zip(found, wanted, strict=True) if is_quantized(other)]
    assert len(coded) == 8
    for one, other in coded:
        assert isinstance(one, PackedArray) == (group == 32)
        np.testing.assert_array_equal(_numbers(one), _numbers(other))


def test_a_converted_model(tmp_path, monkeypatch):
    monkeypatch.setattr(test_quantized_folder, "GROUP", 32)
    source = test_quantized_folder.quantize_folder(write_folder(tmp_path / "source"), 4)
    saved = convert(source, tmp_path / "saved")
    wanted, found = load(source, packs=True), load(saved, packs=True)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_what_was_read_of_the_file_is_given_back(tmp_path, monkeypatch):
    """In large pieces, and after the last of each was read."""
    fill(monkeypatch, ["q4_k"])
    path = write_wide("llama_tied", tmp_path / "model.gguf")
    released, release = [], MappedFile.release

    def record(self, start, count):
        released.append((start, count))
        release(self, start, count)

    monkeypatch.setattr(MappedFile, "release", record)
    load(path, packs=True)
    for view in open_checkpoint(path).tensors.values():
        if view.dtype == "q4_k":
            assert (view.start, view.num_bytes) in released  # less than a part
