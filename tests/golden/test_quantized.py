"""A quantized folder gives the logits of transformers on its numbers; each of its parts counts."""

import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden.quantized import FORMATS, MODELS, model_case, stored, write_model
from tests.paged import PagedRows, run_alone
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.errors import LoadError
from xjax.models.layout import split_config
from xjax.models.registry import load_config
from xjax.state.mesh import make_mesh
from xjax.state.quantized import QuantizedArray, is_quantized
from xjax.weights.load import load_params

pytestmark = pytest.mark.device

TOLERANCE = 1e-4


def load(name, *, change=None, dtype="float32", sharding=None, mesh=None, **changes):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(write_model(name, Path(folder), change=change, **changes))
        family, config = load_config(
            checkpoint.kind, checkpoint.architecture, checkpoint.config, checkpoint.tensors
        )
        if mesh is not None:
            config = split_config(config, mesh.size)
            sharding = family.shardings(config, mesh)
        params = load_params(checkpoint, family, config, dtype=jnp.dtype(dtype), sharding=sharding)
        return family, config, jax.tree.map(jnp.copy, params)


model = functools.cache(load)


def error(name, family, config, params, chunks=(44,), **options):
    rows = PagedRows(family, config, params, num_rows=3, num_tiles=6, **{"is_quick": True, **options})
    logits = run_alone(rows, model_case().ids, list(chunks))
    return float(np.abs(logits - stored()[0][f"model {name}/logits"]).max())


def codes_of(params):
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    return [leaf for leaf in leaves if isinstance(leaf, QuantizedArray)]


def test_files_hold_every_model():
    keys = {key.partition("/")[0] for key in stored()[0]}
    assert {key.removeprefix("model ") for key in keys if key.startswith("model ")} == set(MODELS)
    assert all(stored()[0][f"model {name}/logits"].std() > 1 for name in MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_any_schedule(name):
    family, config, params = model(name)
    assert len(codes_of(params)) == 4  # every matrix of the layer, fused as numbers are
    for chunks in ([44], [3, 1, 8, 9, 1, 1, 16, 5]):
        assert error(name, family, config, params, chunks, is_quick=False) < TOLERANCE, chunks


def test_embedding_and_head_are_numbers():
    _, _, params = model("awq")
    assert isinstance(params.embed, jax.Array)
    assert isinstance(params.head, jax.Array)


def on_codes(change):
    """Change every quantized matrix of a tree."""
    return lambda params: jax.tree.map(
        lambda leaf: change(leaf) if is_quantized(leaf) else leaf, params, is_leaf=is_quantized
    )


def swapped_nibbles(w):
    return w.replace(codes=(w.codes << jnp.uint8(4)) | (w.codes >> jnp.uint8(4)))


MUTATIONS = {
    "order of inputs": ("gptq4_order", on_codes(lambda w: w.replace(order=None))),
    "zeros": ("gptq4_order", on_codes(lambda w: w.replace(zeros=None))),
    "nibbles": ("awq", on_codes(swapped_nibbles)),
    "zeros of AWQ": ("awq", on_codes(lambda w: w.replace(zeros=-w.zeros))),
    "zeros of packed codes": ("packed4_zeros", on_codes(lambda w: w.replace(zeros=w.zeros + jnp.int8(1)))),
    "scales of channels": ("int8", on_codes(lambda w: w.replace(scales=w.scales[::-1]))),
    "scales of float8": ("float8_channel", on_codes(lambda w: w.replace(scales=w.scales[::-1]))),
    "blocks of inputs": ("fp8_block", on_codes(lambda w: w.replace(scales=w.scales[:, ::-1]))),
}


@pytest.mark.parametrize("feature", MUTATIONS)
def test_what_a_part_does_shows(feature):
    name, change = MUTATIONS[feature]
    family, config, params = model(name)
    assert error(name, family, config, change(params)) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "changes"),
    [("gptq4_order", {"checkpoint_format": "gptq_v2"}), ("gptq8", {"checkpoint_format": "gptq_v2"})],
)
def test_the_convention_of_zeros_shows(name, changes):
    assert error(name, *load(name, **changes)) > 100 * TOLERANCE


def test_without_group_indexes_the_order_is_lost():
    def drop(tensors):
        return {key: value for key, value in tensors.items() if not key.endswith("g_idx")}

    assert error("gptq4_order", *load("gptq4_order", change=drop)) > 100 * TOLERANCE


def test_orders_that_differ_between_fused_matrices():
    """Keys in another order than queries: the three become numbers, with the same logits."""

    def turn(tensors):
        # The same matrix, its groups renumbered: rows of scales and zeros move with the indexes.
        at = "model.layers.0.self_attn.k_proj."
        order = tensors[at + "g_idx"][0]
        changed = {at + "g_idx": (1 - order, "I32")}
        for part in ("scales", "qzeros"):
            value, kind = tensors[at + part]
            changed[at + part] = (value[::-1], kind)
        return tensors | changed

    family, config, params = load("gptq4_order", change=turn)
    assert isinstance(params.layers[0].attention.qkv, jax.Array)
    assert len(codes_of(params)) == 3
    assert error("gptq4_order", family, config, params) < TOLERANCE


def test_a_matrix_that_was_left_alone():
    """Only values are not quantized: the fused matrix is numbers."""

    def widen(tensors):
        module = "model.layers.0.self_attn.v_proj"
        kept = {key: value for key, value in tensors.items() if not key.startswith(module)}
        return kept | {f"{module}.weight": (numbers, "F32")}

    with tempfile.TemporaryDirectory() as folder:
        view = open_checkpoint(write_model("awq", Path(folder))).tensors[
            "model.layers.0.self_attn.v_proj.weight"
        ]
        numbers = view.read()
    family, config, params = load("awq", change=widen)
    assert isinstance(params.layers[0].attention.qkv, jax.Array)
    assert error("awq", family, config, params) < TOLERANCE


@pytest.mark.parametrize("name", ["gptq4_order", "awq", "fp8_block", "int8"])
def test_over_a_mesh(name):
    """Split over devices by kv heads and feed-forward, the parts lie so and are the same."""
    family, config, whole = model(name)
    mesh = make_mesh(jax.devices()[:2])
    _, _, params = load(name, sharding=family.shardings(config, mesh))
    attention = params.layers[0].attention
    assert attention.qkv.codes.sharding.shard_shape(attention.qkv.codes.shape)[0] == 64
    assert attention.qkv.scales.sharding.shard_shape(attention.qkv.scales.shape)[0] == 64
    has_order = FORMATS[name].has_order
    halves = 1 if has_order else 2
    codes, scales = attention.o.codes, attention.o.scales
    assert codes.sharding.shard_shape(codes.shape) == (64, codes.shape[1] // halves)
    assert scales.sharding.shard_shape(scales.shape)[1] == max(1, scales.shape[1] // halves)
    for found, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("name", "num_devices"), [("gptq4_order", 2), ("fp8_block", 2), ("int8", 4)])
def test_logits_of_several_devices(name, num_devices):
    """Laid out for them, with copies of kv heads; also where inputs or groups cannot be divided."""
    mesh = make_mesh(jax.devices()[:num_devices])
    family, config, params = load(name, mesh=mesh)
    assert len(codes_of(params)) == 4
    assert error(name, family, config, params, [3, 1, 8, 9, 1, 1, 16, 5], mesh=mesh) < TOLERANCE


def test_bfloat16():
    """Codes are as exact in a narrow model dtype; the rest is rounding."""
    family, config, params = load("awq", dtype="bfloat16")
    assert codes_of(params)[0].scales.dtype == jnp.float32
    assert params.embed.dtype == jnp.bfloat16
    assert error("awq", family, config, params) < 0.3


def with_biases(value):
    """What AutoGPTQ writes beside each of its modules, needed or not."""

    def change(tensors):
        modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
        biases = {
            f"{module}.bias": (np.full(tensors[f"{module}.qweight"][0].shape[1], value, np.float16), "F16")
            for module in modules
        }
        return tensors | biases

    return change


def test_biases_of_zeros_are_let_be():
    assert error("gptq4_order", *load("gptq4_order", change=with_biases(0.0))) < TOLERANCE
    with pytest.raises(LoadError, match=r"q_proj\.bias.*has no place|_proj\.bias and 6 more has no place"):
        load("gptq4_order", change=with_biases(0.5))


def test_a_quantized_embedding_becomes_numbers():
    """Rows of codes cannot be looked up: the table is read as the numbers that it stands for."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (47, 64)).astype(np.int8)
    scales = rng.uniform(0.001, 0.01, (47, 1)).astype(np.float32)
    parts = {"weight": (codes, "I8"), "weight_scale": (scales, "F32")}
    groups = dict(FORMATS["int8"].config["config_groups"])
    groups["group_1"] = groups["group_0"] | {"targets": ["Embedding"]}

    def change(tensors):
        return tensors | {f"model.embed_tokens.{part}": value for part, value in parts.items()}

    _, _, params = load("int8", change=change, config_groups=groups)
    np.testing.assert_array_equal(params.embed, codes.astype(np.float32) * scales)
