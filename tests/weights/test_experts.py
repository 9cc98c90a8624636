"""Weights of experts out of every form of file, and what is wrong with them by name."""

import json
import re

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy

from tests.golden.checkpoints import write_folder
from tests.golden.families import FAMILY_CASES, FamilyCase
from tests.golden.gguf_families import write_family
from tests.golden.recipe import weights
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.errors import LoadError
from xjax.models.registry import load_config
from xjax.state.quantized import QuantizedArray
from xjax.weights.load import load_params

pytestmark = pytest.mark.device

FIRST = "model.layers.0.mlp.experts."


def load(path):
    checkpoint = open_checkpoint(path)
    family, config = load_config(
        checkpoint.kind, checkpoint.architecture, checkpoint.config, checkpoint.tensors
    )
    return load_params(checkpoint, family, config, dtype=jnp.dtype("float32"))


def assert_same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def folder(tmp_path):
    return write_folder(FAMILY_CASES["qwen2moe_shared"], tmp_path)


def change(folder, edit, **config):
    """Rewrite a folder's tensors and config."""
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    edit(tensors)
    safetensors.numpy.save_file(tensors, path)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))


@pytest.mark.parametrize("form", ["hf", "gguf", "old gguf"])
def test_a_single_expert(form, tmp_path):
    """Its matrix is no stack of one, nor a row of one."""
    case = FAMILY_CASES["mixtral_top2"]
    single = SingleExpert(case.name, {"num_local_experts": 1, "num_experts_per_tok": 1})
    if form == "hf":
        path = write_folder(single, tmp_path)
    else:
        path = write_family(single, tmp_path / "m.gguf", is_old=form == "old gguf")
    stack, named = load(path).layers[0].feed_forward.experts, weights(single)
    prefix = "model.layers.0.block_sparse_moe.experts.0."
    np.testing.assert_array_equal(stack.down, named[prefix + "w2.weight"][None])
    gate_up = np.concatenate([named[f"{prefix}w{i}.weight"] for i in (1, 3)])
    np.testing.assert_array_equal(stack.gate_up, gate_up[None])


class SingleExpert(FamilyCase):
    """A case with the first expert alone."""

    @property
    def shapes(self):
        """Shape of every tensor, by its Hugging Face name."""
        found = {
            name: shape
            for name, shape in super().shapes.items()
            if re.search(r"\.experts\.[1-9]", name) is None
        }
        return {
            name: (1, *shape[1:]) if name.endswith("moe.gate.weight") else shape
            for name, shape in found.items()
        }


def test_layout(folder):
    """Of each expert the gate over the rest."""
    params, named = load(folder), weights(FAMILY_CASES["qwen2moe_shared"])
    half = params.layers[1].feed_forward
    prefix = "model.layers.1.mlp."
    for expert in range(6):
        gate, up, down = (
            named[f"{prefix}experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        np.testing.assert_array_equal(half.experts.gate_up[expert], np.concatenate([gate, up]))
        np.testing.assert_array_equal(half.experts.down[expert], down)
    np.testing.assert_array_equal(half.router, named[prefix + "gate.weight"])
    np.testing.assert_array_equal(half.shared.gate, named[prefix + "shared_expert_gate.weight"])
    assert half.router.dtype == jnp.float32


def test_stacked_in_a_folder(folder):
    """As a model has them in memory since version 5 of transformers."""
    wanted = load(folder)

    def stack(tensors):
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts."
            parts = {
                part: np.stack([tensors.pop(f"{prefix}{i}.{part}_proj.weight") for i in range(6)])
                for part in ("gate", "up", "down")
            }
            tensors[prefix + "gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
            tensors[prefix + "down_proj"] = parts["down"]

    change(folder, stack)
    assert_same(load(folder), wanted)


def test_gate_of_the_shared_expert_as_a_vector(tmp_path, monkeypatch):
    """Converters wrote it so for a time."""
    case = FAMILY_CASES["qwen2moe_shared"]
    wanted = load(write_folder(case, tmp_path / "folder"))
    add, found = gguf.GGUFWriter.add_tensor, []

    def squeezed(writer, name, values, **options):
        if name.endswith("ffn_gate_inp_shexp.weight"):
            found.append(name)
            values = values.reshape(-1)
        add(writer, name, values, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", squeezed)
    params = load(write_family(case, tmp_path / "model.gguf"))
    assert len(found) == 2
    assert_same(params, wanted)


@pytest.mark.parametrize(
    ("edit", "config", "words"),
    [
        (lambda t: t.pop(FIRST + "3.up_proj.weight"), {}, r"tensor .*experts\.3\.up_proj\.weight is missing"),
        (lambda t: t.pop("model.layers.0.mlp.gate.weight"), {}, r"tensor .*mlp\.gate\.weight is missing"),
        (lambda t: t.update({FIRST + "2.down_proj.weight": np.zeros((48, 25), np.float32)}), {},
         r"experts\.2\.down_proj\.weight must have shape \(48, 24\), found \(48, 25\)"),
        (lambda t: t.update({"model.layers.0.mlp.gate.weight": np.zeros((5, 48), np.float32)}), {},
         r"mlp\.gate\.weight must have shape \(6, 48\), found \(5, 48\)"),
        (lambda t: None, {"num_experts": 7}, r"gate\.weight must have shape \(7, 48\), found \(6, 48\)"),
        (lambda t: t.update({FIRST + "6.down_proj.weight": np.zeros((48, 24), np.float32)}), {},
         r"experts\.6\.down_proj\.weight has no place"),
        (lambda t: None, {"mlp_only_layers": [0]}, "is missing"),
    ],
)  # fmt: skip
def test_faults_are_named(folder, edit, config, words):
    change(folder, edit, **config)
    with pytest.raises(LoadError, match=words) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_float8_experts_are_read_as_numbers(tmp_path):
    """Of a form that Qwen3-MoE is published in; the other matrices stay codes."""
    case = FAMILY_CASES["qwen3moe_tied"]
    folder = write_folder(case, tmp_path)
    named = {name: jnp.asarray(value) for name, value in weights(case).items()}
    stored, wanted = {}, {}
    for name, value in named.items():
        if not name.endswith("proj.weight"):
            stored[name] = value
            continue
        scale = jnp.abs(value).max() / 448
        stored[name] = (value / scale).astype(jnp.float8_e4m3fn)
        stored[name.replace("weight", "weight_scale_inv")] = scale.reshape(1, 1)
        wanted[name] = stored[name].astype(jnp.float32) * scale
    safetensors.flax.save_file(stored, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(settings))
    params = load(folder)
    for layer in range(2):
        half, prefix = params.layers[layer].feed_forward, f"model.layers.{layer}.mlp.experts."
        for expert in range(6):
            parts = [wanted[f"{prefix}{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")]
            np.testing.assert_allclose(half.experts.gate_up[expert], np.concatenate(parts[:2]), rtol=1e-6)
            np.testing.assert_allclose(half.experts.down[expert], parts[2], rtol=1e-6)
        assert isinstance(params.layers[layer].attention.o, QuantizedArray)
