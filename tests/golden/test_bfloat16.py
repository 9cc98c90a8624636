"""In bfloat16 every family stays as near to float32 as the reference does, norms and angles in float32."""

import functools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden.checkpoints import write_folder
from tests.golden.families import FAMILY_CASES
from tests.golden.recipe import CASES, ROUNDED
from tests.paged import PagedRows, run_alone
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.kernels import norm
from xjax.models.registry import load_config, supported
from xjax.weights.load import load_params

pytestmark = pytest.mark.device

EVERY = {**FAMILY_CASES, **CASES}
# One of each architecture, and those in which most can be rounded.
NAMES = (
    "llama_mha_biases", "mistral_window", "ministral_mixed", "qwen2_tied", "qwen3_tied", "gemma2_caps",
    "gemma_soft_cap", "phi3_mini4", "glm4_biases", "granite_biases", "olmo2_gqa", "olmo3_windows",
    "starcoder2_biases", "mixtral_top2", "qwen2moe_shared", "qwen3moe_tied",
)  # fmt: skip


@functools.cache
def model(name):
    """Family, config and parameters in bfloat16; norms are float32 in it."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(write_folder(EVERY[name], Path(folder)))
        family, config = load_config("hf", checkpoint.architecture, checkpoint.config, checkpoint.tensors)
        params = load_params(checkpoint, family, config, dtype=jnp.dtype("bfloat16"))
        return family, config, jax.tree.map(jnp.copy, params)


def moved(name):
    """How far the middle position's logits are from those of the same weights in float32.

    In units of how far the reference's are.
    """
    family, config, params = model(name)
    size = {"num_rows": 1, "num_tiles": 6, "can_decode": False, "is_quick": True}
    wide, found = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), []
    for tree, dtype in ((params, "bfloat16"), (wide, "float32")):
        rows = PagedRows(family, config, tree, **size, dtype=dtype)
        found.append(run_alone(rows, EVERY[name].ids, [EVERY[name].length]))
    away = np.sqrt(np.mean((found[0] - found[1]) ** 2, axis=-1))
    return float(np.median(away)) / json.loads(ROUNDED.read_text())[name]


def test_every_architecture_has_a_case():
    listed = {name for entry in supported() for name in entry.hf} - {"Gemma3ForConditionalGeneration"}
    assert {EVERY[name].config["architectures"][0] for name in NAMES} == listed


@pytest.mark.parametrize("name", NAMES)
def test_as_near_as_the_reference(name):
    assert 0.2 < moved(name) < 1.0


def narrow_rms(x, weight, eps):
    scaled = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.asarray(eps, x.dtype))
    return scaled * weight.reshape((1,) * (x.ndim - 1) + weight.shape).astype(x.dtype)


def narrow_layer_norm(x, weight, bias, eps):
    last = (1,) * (x.ndim - 1) + weight.shape
    return narrow_rms(x - jnp.mean(x, axis=-1, keepdims=True), weight, eps) + bias.reshape(last).astype(
        x.dtype
    )


@pytest.mark.parametrize("name", ["qwen3_tied", "gemma_soft_cap", "starcoder2_biases"])
def test_norms_in_bfloat16_show(name, monkeypatch):
    monkeypatch.setattr(norm, "rms_norm", narrow_rms)
    monkeypatch.setattr(norm, "layer_norm", narrow_layer_norm)
    jax.clear_caches()  # what was traced with the others
    try:
        assert moved(name) > 1.0
    finally:
        jax.clear_caches()
