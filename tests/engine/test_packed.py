"""GGUF files whose matrices stay codes, through whole steps: near the numbers' logits, alike in any batch."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.paged import PagedRows, run_alone, run_step
from tests.weights.blocks import fill, write_wide
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.config import EngineOptions
from xjax.engine.build import load_model, plan_engine, widened_bytes, with_defaults
from xjax.kernels.linear import PACKED_BACKENDS
from xjax.state.batch import Packed
from xjax.state.packed import JoinedArray, PackedArray
from xjax.state.quantized import is_quantized

pytestmark = pytest.mark.device

MIXTURES = {
    "llama_tied": ["q4_k", "q4_k", "q6_k"],
    "gemma_tied": ["q5_0", "q8_0", "q4_1", "q6_k"],
    "granite_biases": ["q5_1", "q4_0", "q5_k"],
    "olmo2_gqa": ["q8_0", "q4_k", "q5_0"],
    "starcoder2_biases": ["q4_1", "q6_k"],
}


def coded(model):
    leaves = jax.tree.leaves(model.params, is_leaf=is_quantized)
    return [leaf for leaf in leaves if is_quantized(leaf)]


def rows_of(model, backend, **sizes):
    sizes = {"num_rows": 1, "num_tiles": 2, "tile": 8, "max_pages": 12, "is_quick": True} | sizes
    return PagedRows(model.family, model.config, model.params, backend=backend, **sizes)


@pytest.fixture(scope="module", params=MIXTURES)
def models(request, tmp_path_factory):
    """The same file as codes and as numbers."""
    with pytest.MonkeyPatch.context() as patch:
        fill(patch, MIXTURES[request.param])
        path = tmp_path_factory.mktemp("packed") / "model.gguf"
        write_wide(request.param, path, num_hidden_layers=2)
    return tuple(load_model(open_checkpoint(path), kernels=kernels) for kernels in ("numba", "xla"))


IDS = np.random.default_rng(3).integers(0, 47, 24)


def test_logits_are_near_those_of_the_numbers(models):
    """As near as rounding activations to 8 bits lets them be; kernels differ by the last bits alone."""
    packed, plain = models
    assert len(coded(packed)) > 8 and not coded(plain)
    exact = run_alone(rows_of(plain, "xla"), IDS, [16, *[1] * 8])
    found = run_alone(rows_of(packed, "numba"), IDS, [16, *[1] * 8])
    twin = run_alone(rows_of(packed, "xla"), IDS, [16, *[1] * 8])
    error, size = np.abs(found - exact), exact.std()
    assert size > 0.5
    assert 0 < error.mean() < 0.02 * size and error.max() < 0.2 * size
    assert np.abs(twin - found).mean() < 0.2 * error.mean()


def test_bits_do_not_depend_on_the_batch(models):
    packed, _ = models
    alone = run_alone(rows_of(packed, "numba"), IDS, [7, 9, *[1] * 8])
    rows = rows_of(packed, "numba", num_rows=3, num_tiles=6, seed=1)
    others = np.random.default_rng(4).integers(0, 47, (2, 40))
    rows.step({}, [(1, others[0][:16]), (0, IDS[:16])])
    rows.step({1: int(others[0][16])}, [(2, others[1][:16])])
    for i in range(16, 24):
        rows.step({0: int(IDS[i]), 1: int(others[0][i + 1]), 2: int(others[1][i])}, [])
    np.testing.assert_array_equal(np.stack(rows.logits[0]), alone)


def test_bits_do_not_depend_on_the_shape_of_the_step(models):
    """Programs as an engine has them: what the compiler adds up itself goes by how many rows there are."""
    packed, alone = models[0], None
    for num_rows, num_tiles, chunks in ((1, 3, [24]), (1, 0, [1] * 24), (4, 0, [1] * 24), (16, 0, [1] * 24)):
        rows = PagedRows(
            packed.family,
            packed.config,
            packed.params,
            num_rows=num_rows,
            num_tiles=num_tiles,
            backend="numba",
        )
        found = run_alone(rows, IDS, chunks)
        alone = found if alone is None else alone
        np.testing.assert_array_equal(found, alone)


def test_a_layer_is_five_calls(models):
    """And but for them only what a step does once: embedding, last norm and head have calls of their own."""
    rows, texts = rows_of(models[0], "numba"), []
    vector = Packed(rows.shape).vector
    for num_layers in (1, 2):
        config = replace(rows.config, num_layers=num_layers, windows=rows.config.windows[:num_layers])
        params = replace(rows.params, layers=rows.params.layers[:num_layers])
        state = replace(rows.state, kv=rows.state.kv[:num_layers])
        lowered = run_step.lower(
            params, vector, state, family=rows.family, config=config, shape=rows.shape, backend="numba"
        )
        texts.append(lowered.compile().as_text())
    calls, fusions = ([text.count(f" {kind}(") for text in texts] for kind in ("custom-call", "fusion"))
    assert calls[1] - calls[0] == 5 and calls[0] == 8
    assert fusions[1] - fusions[0] == 0


def test_memory_plan_counts_codes(models):
    packed, plain = models
    device = jax.devices()[0]
    options = with_defaults(EngineOptions(max_num_seqs=2, num_pages=40), device)
    sizes = [plan_engine(model, options, device=device).memory.weights for model in models]
    leaves = coded(packed)
    saved = sum(4 * leaf.shape[0] * leaf.shape[1] - leaf.nbytes for leaf in leaves)
    assert sizes[1] - sizes[0] == saved > 0.75 * sizes[1]
    assert widened_bytes(packed, "cpu") == 0


def test_kinds_of_pieces(models):
    kinds = {type(leaf) for leaf in coded(models[0])}
    assert PackedArray in kinds and kinds <= {PackedArray, JoinedArray}


def test_several_devices_hold_numbers(tmp_path, monkeypatch):
    from_mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    fill(monkeypatch, ["q8_0"])
    checkpoint = open_checkpoint(write_wide("llama_tied", tmp_path / "model.gguf"))
    assert not coded(load_model(checkpoint, kernels="numba", mesh=from_mesh))
    assert "numba" in PACKED_BACKENDS and "xla" not in PACKED_BACKENDS
