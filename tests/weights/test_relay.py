"""A converted model goes on several devices as the files that it was made from do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden import quantized
from tests.golden.checkpoints import write_folder
from tests.golden.families import FAMILY_CASES
from tests.golden.recipe import CASES
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.engine.build import load_model
from xjax.models.layout import Layout
from xjax.state.mesh import make_mesh
from xjax.weights.convert import convert

pytestmark = pytest.mark.device


@pytest.mark.parametrize(
    ("name", "num_devices", "layout"),
    [
        ("llama_mha_biases", 2, Layout(2, 1)), ("llama_mqa8_wide", 4, Layout(4, 4)),
        ("gemma_tied", 2, Layout(2, 2)), ("starcoder2_biases", 2, Layout(2, 1)),
        ("mixtral_top2", 2, Layout(2, 1)), ("qwen2moe_mixed", 2, Layout(2, 1)), ("int8", 4, Layout(4, 2)),
        ("gptq4_order", 2, Layout(2, 1)),
    ],
)  # fmt: skip
def test_every_leaf_is_the_same_and_lies_where_it_should(name, num_devices, layout, tmp_path):
    if name in quantized.MODELS:
        source = quantized.write_model(name, tmp_path / "source")
    else:
        source = write_folder((CASES | FAMILY_CASES)[name], tmp_path / "source")
    saved = convert(source, tmp_path / "saved", dtype="float32")
    mesh = make_mesh(jax.devices()[:num_devices])
    wanted, found = (load_model(open_checkpoint(path), mesh=mesh) for path in (source, saved))
    assert found.config.layout == layout
    assert jax.tree.structure(found.params) == jax.tree.structure(wanted.params)
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(wanted.params), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_array_equal(jnp.asarray(a), jnp.asarray(b))
