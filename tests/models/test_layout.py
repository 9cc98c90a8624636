"""A model that several devices share gives the logits of one device, from weights that are split evenly.

Reference logits are transformers' where they are kept, else those of one device.
"""

import dataclasses
import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.golden.checkpoints import write_folder
from tests.golden.families import FAMILY_CASES, LOGITS, FamilyCase
from tests.golden.recipe import CASES, GOLDEN
from tests.paged import PagedRows, run_alone
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.engine.build import Model, load_model
from xjax.errors import LoadError
from xjax.models.layout import Layout, split_config, whole_config
from xjax.state.mesh import make_mesh
from xjax.weights import fuse, plan

pytestmark = pytest.mark.device

TOLERANCE = 1e-4  # of transformers' logits; one device's are nearer than
NEAR = 1e-5
CHUNKS = [13, 1, 9, 1, 16, 1, 1, 1, 1]


@dataclasses.dataclass(frozen=True)
class EightHeads(FamilyCase):
    """A family's model with eight query heads on its two kv heads, so that four devices can share it."""

    @property
    def config(self):
        """The config.json of the case."""
        head_dim = super().shapes["model.layers.0.self_attn.k_proj.weight"][0] // 2
        return {**super().config, "num_attention_heads": 8, "head_dim": head_dim}

    @property
    def shapes(self):
        """Shapes of the stored case, wider by the heads."""

        def widen(name, shape):
            if "q_proj" in name or (self.family == "olmo2" and "q_norm" in name):
                return (shape[0] // 6 * 8, *shape[1:])
            return (shape[0], shape[1] // 6 * 8) if "o_proj.weight" in name else shape

        return {name: widen(name, shape) for name, shape in super().shapes.items()}


WIDE = {
    name + "_wide": EightHeads(name, FAMILY_CASES[name].changes)
    for name in ("qwen3_tied", "starcoder2_biases", "olmo2_gqa")
}
ALL = {**CASES, **FAMILY_CASES, **WIDE}
SHARED = [
    ("llama_tied", 2), ("llama_mqa8_wide", 4), ("llama_mha_biases", 3), ("gemma_tied", 2), ("gemma_tied", 4),
    ("qwen3_tied", 2), ("qwen3_tied_wide", 4), ("starcoder2_biases", 2), ("starcoder2_biases_wide", 4),
    ("olmo2_gqa_wide", 4), ("phi3_plain", 3), ("mixtral_top2", 2),
    ("qwen2moe_mixed", 2), ("qwen3moe_tied", 2),
]  # fmt: skip


def load(name: str, num_devices: int) -> Model:
    mesh = None if num_devices == 1 else make_mesh(jax.devices()[:num_devices])
    with tempfile.TemporaryDirectory() as folder:
        found = load_model(open_checkpoint(write_folder(ALL[name], Path(folder))), mesh=mesh)
        jax.block_until_ready(found.params)
        return found


def logits_of(model: Model, name: str) -> np.ndarray:
    rows = PagedRows(model.family, model.config, model.params, num_rows=1, num_tiles=2, mesh=model.mesh)
    return run_alone(rows, ALL[name].ids, CHUNKS)


@functools.cache
def reference(name: str) -> tuple[np.ndarray, float]:
    """Logits and how near others must come."""
    for path in (GOLDEN, LOGITS):
        with np.load(path) as file:
            if name in file:
                return file[name], TOLERANCE
    return logits_of(load(name, 1), name), NEAR


@pytest.mark.parametrize(("name", "num_devices"), SHARED)
def test_logits_equal_those_of_one_device(name, num_devices):
    """In prompts cut to chunks and in decodes, over paged state; weights and pages are really split."""
    model = load(name, num_devices)
    wanted, tolerance = reference(name)
    assert np.abs(logits_of(model, name) - wanted).max() < tolerance
    attention, feed_forward = model.params.layers[0].attention, model.params.layers[0].feed_forward
    split = [attention.qkv, attention.o]
    own = feed_forward.experts if hasattr(feed_forward, "experts") else feed_forward
    if own.down.shape[-1] % num_devices == 0:
        split += [own.gate_up, own.down]
    for leaf in split:
        assert [shard.data.size for shard in leaf.addressable_shards] == [
            leaf.size // num_devices
        ] * num_devices


def break_gate_and_other_half_as_on_one_device(patch):
    patch.setattr(plan, "interleave", lambda out, parts, blocks: fuse.stack(out, parts))


def break_copies_of_kv_heads_in_turn(patch):
    def repeat(part, copies, axis):
        return np.concatenate([part] * copies)

    patch.setattr(fuse, "np", SimpleNamespace(repeat=repeat, split=np.split))


def break_queries_of_the_neighbour(patch):
    good = plan.fuse_qkv

    def shifted(out, parts, **settings):
        good(out, parts, **settings)
        out[...] = np.roll(out, out.shape[0] // settings["num_kv_heads"], axis=0)

    patch.setattr(plan, "fuse_qkv", shifted)


@pytest.mark.parametrize(
    "spoil",
    [
        break_gate_and_other_half_as_on_one_device,
        break_copies_of_kv_heads_in_turn,
        break_queries_of_the_neighbour,
    ],
)
def test_a_wrong_layout_shows(spoil, monkeypatch):
    name = "qwen3_tied_wide"
    spoil(monkeypatch)
    assert np.abs(logits_of(load(name, 4), name) - reference(name)[0]).max() > 100 * TOLERANCE


def config_with(heads, kv_heads):
    config = load("llama_tied", 1).config
    return dataclasses.replace(config, num_heads=heads, num_kv_heads=kv_heads)


def test_heads_that_cannot_be_shared_evenly():
    with pytest.raises(
        LoadError,
        match=r"--tensor-parallel 4: 14 query heads and 2 kv heads .* this model goes on 1, 2, 14 devices$",
    ):
        split_config(config_with(14, 2), 4)
    with pytest.raises(LoadError, match="this model goes on 1, 3, 9 devices"):
        split_config(config_with(9, 3), 2)


def test_what_follows_for_a_config():
    config = config_with(8, 2)
    assert split_config(config, 1) is config
    assert split_config(config, 2).layout == Layout(2, 1)
    wide = split_config(config, 8)
    assert whole_config(wide) == config and whole_config(config) is config
    assert (wide.num_kv_heads, wide.layout) == (8, Layout(8, 4))
    assert [wide.layout.blocks(size) for size in (64, 80, 60)] == [8, 8, 1]
