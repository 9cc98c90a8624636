"""Llama and Gemma 3 give the logits of transformers, in any schedule, and every feature counts."""

import dataclasses
import functools
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden.checkpoints import write_folder
from tests.golden.recipe import CASES, GOLDEN
from tests.paged import PagedRows, run_alone
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.models.registry import load_config
from xjax.models.rope import Rope
from xjax.weights.load import load_params

pytestmark = pytest.mark.device

TOLERANCE = 1e-4
SHORT = [name for name, case in CASES.items() if case.length < 100]
BACKENDS = ["xla", "numba"] if importlib.util.find_spec("numba") else ["xla"]
LONG = [name for name, case in CASES.items() if case.length >= 100]


@functools.cache
def expected() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return dict(file)


@functools.cache
def model(name: str) -> tuple[Any, Any, Any]:
    """Family, config and parameters of a case, loaded from a folder on disk."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(write_folder(CASES[name], Path(folder)))
        family, config = load_config("hf", checkpoint.architecture, checkpoint.config, checkpoint.tensors)
        params = load_params(checkpoint, family, config, dtype=jnp.dtype("float32"))
        if CASES[name].context is not None:
            config = family.for_length(config, CASES[name].context)
        return family, config, jax.tree.map(jnp.copy, params)


def rows_of(name: str, **changes: Any) -> PagedRows:
    family, config, params = model(name)
    return PagedRows(family, config, params, num_rows=3, num_tiles=6, **changes)


def error(name: str, logits: np.ndarray) -> float:
    wanted = expected()[name]
    return float(np.abs(logits[-len(wanted) :] - wanted).max())


def test_golden_file_holds_every_case():
    assert expected().keys() == CASES.keys()
    assert GOLDEN.stat().st_size < 500_000
    assert all(logits.std() >= 1 for logits in expected().values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHORT)
def test_any_chunking(name, backend):
    ids = CASES[name].ids
    for chunks in ([44], [1] * 44, [3, 1, 8, 9, 1, 1, 16, 5], [7, 30, 7], [40, 1, 1, 1, 1]):
        logits = run_alone(rows_of(name, backend=backend), ids, chunks)
        assert error(name, logits) < TOLERANCE, chunks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHORT)
def test_ragged_mix(name, backend):
    """Three rows: the golden prompt twice, once behind, and another prompt between them."""
    ids = [int(token) for token in CASES[name].ids]
    rows, other = rows_of(name, seed=1, backend=backend), [5] * 44
    rows.step({}, [(0, ids[:13]), (1, other[:20]), (2, ids[:3])])
    rows.step({0: ids[13]}, [(2, ids[3:30])])
    rows.step({0: ids[14], 1: other[20], 2: ids[30]}, [])
    rows.step({2: ids[31]}, [(0, ids[15:40])])
    rows.step({1: other[21]}, [(2, ids[32:44]), (0, ids[40:44])])
    assert error(name, np.stack(rows.logits[0])) < TOLERANCE
    assert error(name, np.stack(rows.logits[2])) < TOLERANCE


# Kernels see no rope: one model with windows and one without are enough for them.
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, kind) for kind in BACKENDS for name in (LONG if kind == "xla" else ["llama_long", "gemma_long"])],
)
def test_long_positions(name, backend):
    assert error(name, _run_long(name, model(name)[1], backend)) < TOLERANCE


@pytest.mark.parametrize("context", [None, 2000])
def test_dynamic_within_the_trained_context(context):
    """What is run within the trained context is run as it was trained, "dynamic" or not."""
    family, config, params = model("llama_dynamic")
    config = config if context is None else family.for_length(config, context)
    rows = PagedRows(family, config, params, num_rows=3, num_tiles=6)
    assert error("llama_dynamic", run_alone(rows, CASES["llama_dynamic"].ids, [40, 1, 3])) < TOLERANCE


def _run_long(name: str, config: Any, backend: str = "xla", *, is_quick: bool = False) -> np.ndarray:
    family, _, params = model(name)
    size = {"num_rows": 1, "num_tiles": 17, "tile": 128, "page_size": 16, "max_pages": 132}
    rows = PagedRows(family, config, params, **size, backend=backend, is_quick=is_quick)
    return run_alone(rows, CASES[name].ids, [1100, 988, 1, 11])


def _rope(**fields: Any) -> Any:
    return lambda rope: dataclasses.replace(rope, **fields)


# What to switch off at far positions: a function of the rotary settings that returns them changed.
FAR_MUTATIONS = {
    "linear": ("llama_long_linear", _rope(kind="default")),
    "llama3": ("llama_long_llama3", _rope(kind="default")),
    "dynamic": ("llama_long_dynamic", _rope(kind="default")),
    "dynamic by the length that is run": ("llama_long_dynamic", lambda rope: rope.for_length(2400)),
    "yarn": ("llama_long_untruncated", _rope(kind="default")),
    "yarn without whole pairs": ("llama_long_untruncated", _rope(truncate=True)),
    "long": ("llama_long_longrope", lambda rope: rope.for_length(1999)),
    "long scale": ("llama_long_longrope", _rope(scale=1.0)),
    "short": ("llama_long_shortrope", lambda rope: rope.for_length(2201)),
    "short list": ("llama_long_shortrope", _rope(kind="default")),
    "short scale": ("llama_long_shortrope", _rope(scale=1.0)),
}


@pytest.mark.parametrize("feature", FAR_MUTATIONS)
def test_switching_a_rope_kind_off_shows(feature):
    name, change = FAR_MUTATIONS[feature]
    config = model(name)[1]
    changed = dataclasses.replace(config, rope=change(config.rope))
    assert error(name, _run_long(name, changed, is_quick=True)) > 100 * TOLERANCE


def _without_biases(params: Any, *fields: str) -> Any:
    def clear(half: Any) -> Any:
        return half.replace(**{f: jnp.zeros_like(getattr(half, f)) for f in fields if hasattr(half, f)})

    layers = tuple(layer.replace(attention=clear(layer.attention), feed_forward=clear(layer.feed_forward))
                   for layer in params.layers)  # fmt: skip
    return params.replace(layers=layers)


def _map_attention(params: Any, **fields: Any) -> Any:
    layers = tuple(layer.replace(attention=layer.attention.replace(**fields)) for layer in params.layers)
    return params.replace(layers=layers)


def _without_post_norms(params: Any) -> Any:
    layers = tuple(
        layer.replace(
            attention=layer.attention.replace(post_norm=None),
            feed_forward=layer.feed_forward.replace(post_norm=None),
        )
        for layer in params.layers
    )
    return params.replace(layers=layers)


def _without_norm_offset(params: Any) -> Any:
    return jax.tree.map(lambda x: x - 1 if x.ndim == 1 else x, params)


# What to switch off, in which case: a function of config and parameters that returns both changed.
MUTATIONS = {
    "linear scaling": ("llama_linear", lambda c, p: (dataclasses.replace(c, rope=Rope(8)), p)),
    "llama3 scaling": ("llama_llama3", lambda c, p: (dataclasses.replace(c, rope=Rope(16)), p)),
    "llama3 blend": (
        "llama_llama3",
        lambda c, p: (dataclasses.replace(c, rope=dataclasses.replace(c.rope, high=1.0001)), p),
    ),
    "rope base": ("llama_parameters", lambda c, p: (dataclasses.replace(c, rope=Rope(8)), p)),
    "q, k, v biases": ("llama_mha_biases", lambda c, p: (c, _without_biases(p, "qkv_bias"))),
    "o bias": ("llama_mha_biases", lambda c, p: (c, _without_biases(p, "o_bias"))),
    "gate and up biases": ("llama_mha_biases", lambda c, p: (c, _without_biases(p, "gate_up_bias"))),
    "down bias": ("llama_mha_biases", lambda c, p: (c, _without_biases(p, "down_bias"))),
    "untied head": ("llama_mha_biases", lambda c, p: (c, p.replace(head=None))),
    "epsilon": ("llama_tied", lambda c, p: (dataclasses.replace(c, norm_eps=0.01), p)),
    "window": ("gemma_soft_cap", lambda c, p: (dataclasses.replace(c, windows=(44, None)), p)),
    "window width": ("gemma_soft_cap", lambda c, p: (dataclasses.replace(c, windows=(8, None)), p)),
    "window pattern": (
        "gemma_tied",
        lambda c, p: (dataclasses.replace(c, windows=(9,) * 4 + (None, 9, 9)), p),
    ),
    "local base": ("gemma_soft_cap", lambda c, p: (dataclasses.replace(c, local_rope=c.rope), p)),
    "global scaling": ("gemma_layer_types", lambda c, p: (dataclasses.replace(c, rope=Rope(16, 1e6)), p)),
    "local unscaled": (
        "gemma_layer_types",
        lambda c, p: (dataclasses.replace(c, local_rope=Rope(16, 1e4, "linear", 8.0)), p),
    ),
    "q and k norm": ("gemma_soft_cap", lambda c, p: (c, _map_attention(p, q_norm=None, k_norm=None))),
    "post norms": ("gemma_soft_cap", lambda c, p: (c, _without_post_norms(p))),
    "norm offset": ("gemma_soft_cap", lambda c, p: (c, _without_norm_offset(p))),
    "query scale": ("gemma_soft_cap", lambda c, p: (dataclasses.replace(c, query_scale=16**-0.5), p)),
    "embedding scale": ("gemma_soft_cap", lambda c, p: (dataclasses.replace(c, embed_scale=1.0), p)),
    "activation": ("gemma_soft_cap", lambda c, p: (dataclasses.replace(c, activation="silu"), p)),
    "final soft cap": ("gemma_soft_cap", lambda c, p: (dataclasses.replace(c, final_soft_cap=None), p)),
    "Gemma's untied head": ("gemma_layer_types", lambda c, p: (c, p.replace(head=None))),
    "Gemma's biases": ("gemma_layer_types", lambda c, p: (c, _without_biases(p, "qkv_bias", "o_bias"))),
}


@pytest.mark.parametrize("feature", MUTATIONS)
def test_switching_a_feature_off_shows(feature):
    name, change = MUTATIONS[feature]
    family, config, params = model(name)
    config, params = change(config, params)
    rows = PagedRows(family, config, params, num_rows=1, num_tiles=6, can_decode=False, is_quick=True)
    assert error(name, run_alone(rows, CASES[name].ids, [44])) > 100 * TOLERANCE
