"""A quantized mixture of experts: these become numbers, all else keeps its codes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden.checkpoints import write_folder
from tests.golden.families import FAMILY_CASES
from tests.golden.quantized import write_safetensors
from tests.paged import PagedRows, run_alone
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.models.registry import load_config
from xjax.state.quantized import QuantizedArray, is_quantized, to_float
from xjax.weights.load import load_params

pytestmark = pytest.mark.device

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
SETTINGS = {
    "quant_method": "compressed-tensors", "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}  # fmt: skip


def load(folder):
    checkpoint = open_checkpoint(folder)
    family, config = load_config(
        checkpoint.kind, checkpoint.architecture, checkpoint.config, checkpoint.tensors
    )
    return family, config, load_params(checkpoint, family, config, dtype=jnp.dtype("float32"))


def write_both(case, folder):
    """The case with its matrices as codes, and as the numbers that these stand for."""
    write_folder(case, folder / "codes")
    write_folder(case, folder / "numbers")
    views = open_checkpoint(folder / "codes").tensors
    codes, numbers = {}, {}
    for name, view in views.items():
        w = np.array(view.read())
        is_matrix = (
            w.ndim == 2 and "embed" not in name and "head" not in name and not name.endswith("gate.weight")
        )
        if not is_matrix:
            codes[name] = numbers[name] = (w, "F32")
            continue
        scales = (np.abs(w).max(1, keepdims=True) / 127).astype(np.float32)
        rounded = np.round(w / scales).astype(np.int8)
        codes |= {name: (rounded, "I8"), f"{name}_scale": (scales, "F32")}
        numbers[name] = (rounded * scales, "F32")
    write_safetensors(folder / "codes" / "model.safetensors", codes)
    write_safetensors(folder / "numbers" / "model.safetensors", numbers)
    config = json.loads((folder / "codes" / "config.json").read_text())
    (folder / "codes" / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    return folder / "codes", folder / "numbers"


@pytest.mark.parametrize("name", ["mixtral_top2", "qwen2moe_shared"])
def test_experts(name, tmp_path):
    case = FAMILY_CASES[name]
    coded, plain = (load(folder) for folder in write_both(case, tmp_path))
    params = coded[2]
    layer = params.layers[0]
    assert isinstance(layer.attention.qkv, QuantizedArray)
    assert isinstance(layer.feed_forward.experts.gate_up, jax.Array)
    if layer.feed_forward.shared is not None:
        assert isinstance(layer.feed_forward.shared.gate_up, QuantizedArray)
        assert isinstance(layer.feed_forward.shared.down, QuantizedArray)
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    for found, wanted in zip(leaves, jax.tree.leaves(plain[2]), strict=True):
        np.testing.assert_array_equal(to_float(found, jnp.dtype("float32")), wanted)
    coded_logits, plain_logits = (
        run_alone(PagedRows(*model, num_rows=3, num_tiles=6, is_quick=True), case.ids, [44])
        for model in (coded, plain)
    )
    assert np.abs(coded_logits - plain_logits).max() < 1e-4
