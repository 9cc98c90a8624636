"""Every family gives the logits of transformers in any schedule, from folder and GGUF; every part counts."""

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
from tests.golden.families import FAMILY_CASES, LOGITS, SHAPES
from tests.golden.gguf_families import write_family
from tests.paged import PagedRows, run_alone
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.kernels import norm
from xjax.models.experts import ExpertsParams
from xjax.models.registry import load_config, supported
from xjax.models.rope import Rope
from xjax.weights.load import load_params

pytestmark = pytest.mark.device

TOLERANCE = 1e-4
SHORT = [name for name, case in FAMILY_CASES.items() if case.length < 100]
FAR = [name for name, case in FAMILY_CASES.items() if case.length >= 100]
# The kernels of a backend see windows, caps and head counts alone; these cases have all of them.
NUMBA = ["ministral_mixed", "gemma2_caps", "phi3_mini4", "mixtral_top2", "qwen2moe_mixed"]
NUMBA = NUMBA if importlib.util.find_spec("numba") else []
# What a GGUF can hold: a window of every layer, Mistral's or StarCoder2's, is not in the format.
IN_GGUF = [
    "qwen2_tied", "qwen3_tied", "gemma2_caps", "phi3_short", "phi3_long", "phi3_plain", "phi3_mini4",
    "glm4_biases", "granite_biases", "olmo2_gqa", "olmo3_windows", "olmo3_far", "starcoder2_biases",
    "qwen2_yarn", "qwen3_yarn", "phi3_far", "mixtral_top2", "qwen2moe_shared", "qwen3moe_tied",
]  # fmt: skip


@functools.cache
def expected() -> dict[str, np.ndarray]:
    with np.load(LOGITS) as file:
        return dict(file)


def load(name: str, *, kind: str = "hf", **naming: Any) -> tuple[Any, Any, Any]:
    """Family, config and parameters of a case, from a folder or a GGUF; `naming` changes how it is read."""
    case = FAMILY_CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path = write_folder(case, path) if kind == "hf" else write_family(case, path / "model.gguf")
        checkpoint = open_checkpoint(path)
        family, config = load_config(kind, checkpoint.architecture, checkpoint.config, checkpoint.tensors)
        reader: Any = family
        if naming:
            changed = dataclasses.replace(family.naming, **naming)
            reader = dataclasses.replace(family, naming=changed)
        params = load_params(checkpoint, reader, config, dtype=jnp.dtype("float32"))
        return family, config, jax.tree.map(jnp.copy, params)


model = functools.cache(load)


def error(name: str, logits: np.ndarray) -> float:
    wanted = expected()[name]
    return float(np.abs(logits[-len(wanted) :] - wanted).max())


def rows_of(family: Any, config: Any, params: Any, **changes: Any) -> PagedRows:
    return PagedRows(family, config, params, **{"num_rows": 3, "num_tiles": 6, **changes})


def run_whole(name: str, family: Any, config: Any, params: Any, *, is_quick: bool = True) -> np.ndarray:
    """Logits of a case's prompt in few long chunks."""
    size, chunks = {"num_rows": 1, "can_decode": False}, [44]
    if name in FAR:
        size = {"num_rows": 1, "num_tiles": 17, "tile": 128, "page_size": 16, "max_pages": 132}
        chunks = [1100, 988, 1, 11]
    return run_alone(
        rows_of(family, config, params, **size, is_quick=is_quick), FAMILY_CASES[name].ids, chunks
    )


def run_ragged(name: str, rows: PagedRows) -> tuple[np.ndarray, np.ndarray]:
    """Logits of two rows that have the prompt, one behind the other, with another prompt between them."""
    ids, other = [int(token) for token in FAMILY_CASES[name].ids], [5] * 44
    rows.step({}, [(0, ids[:13]), (1, other[:20]), (2, ids[:3])])
    rows.step({0: ids[13]}, [(2, ids[3:30])])
    rows.step({0: ids[14], 1: other[20], 2: ids[30]}, [])
    rows.step({2: ids[31]}, [(0, ids[15:40])])
    rows.step({1: other[21]}, [(2, ids[32:44]), (0, ids[40:44])])
    return np.stack(rows.logits[0]), np.stack(rows.logits[2])


def test_files_hold_every_case():
    assert expected().keys() == FAMILY_CASES.keys()
    assert LOGITS.stat().st_size + SHAPES.stat().st_size < 250_000
    assert all(logits.std() >= 1 for logits in expected().values())


def test_every_architecture_has_a_case():
    ours = {case.config["architectures"][0] for case in FAMILY_CASES.values()}
    elsewhere = {"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"}  # test_golden.py
    assert {name for entry in supported() for name in entry.hf} == ours | elsewhere


@pytest.mark.parametrize(
    ("name", "backend"), [(name, "xla") for name in SHORT] + [(name, "numba") for name in NUMBA]
)
def test_any_schedule(name, backend):
    # Fully compiled for numba alone, and in tests/engine: what XLA optimizes is not ours.
    size = {"backend": backend, "is_quick": backend == "xla"}
    for chunks in ([44], [1] * 44, [3, 1, 8, 9, 1, 1, 16, 5]):
        logits = run_alone(rows_of(*model(name), **size), FAMILY_CASES[name].ids, chunks)
        assert error(name, logits) < TOLERANCE, chunks
    for logits in run_ragged(name, rows_of(*model(name), seed=1, **size)):
        assert error(name, logits) < TOLERANCE, "ragged"


@pytest.mark.parametrize("name", FAR)
def test_far_positions(name):
    assert error(name, run_whole(name, *model(name), is_quick=False)) < TOLERANCE


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf(name):
    family, config, params = load(name, kind="gguf")
    folder_family, folder_config, folder_params = model(name)
    # In a GGUF Mixtral is a Llama with experts, OLMo 3 an OLMo 2 with a window.
    assert family is folder_family or name.startswith(("mixtral", "olmo3"))
    for found, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(folder_params), strict=True):
        np.testing.assert_array_equal(found, wanted)
    if name == "gemma2_caps":  # not in the file; llama.cpp too has it by the number of layers
        assert config.query_scale == 16**-0.5
        config = dataclasses.replace(config, query_scale=folder_config.query_scale)
    assert error(name, run_whole(name, family, config, params)) < TOLERANCE


def _on_attention(change: Any) -> Any:
    return lambda c, p: (
        c,
        p.replace(layers=tuple(layer.replace(attention=change(layer.attention)) for layer in p.layers)),
    )


def _on_feed_forward(change: Any) -> Any:
    return lambda c, p: (
        c,
        p.replace(layers=tuple(layer.replace(feed_forward=change(layer.feed_forward)) for layer in p.layers)),
    )


def _zero(field: str) -> Any:
    return lambda half: half.replace(**{field: jnp.zeros_like(getattr(half, field))})


def _set(**fields: Any) -> Any:
    return lambda c, p: (dataclasses.replace(c, **fields), p)


def _rope(**fields: Any) -> Any:
    return lambda c, p: (dataclasses.replace(c, rope=dataclasses.replace(c.rope, **fields)), p)


def _local_rope(**fields: Any) -> Any:
    return lambda c, p: (dataclasses.replace(c, local_rope=dataclasses.replace(c.local_rope, **fields)), p)


def _on_experts(change: Any) -> Any:
    return _on_feed_forward(lambda half: change(half) if isinstance(half, ExpertsParams) else half)


def _experts(**fields: Any) -> Any:
    return lambda c, p: (dataclasses.replace(c, experts=dataclasses.replace(c.experts, **fields)), p)


def _no_dense(half: Any) -> Any:
    return half if isinstance(half, ExpertsParams) else half.replace(down=jnp.zeros_like(half.down))


def _no_shared_gate(half: Any) -> Any:
    return half.replace(shared=half.shared.replace(gate=jnp.zeros_like(half.shared.gate)))


NO_POST_NORM = lambda half: half.replace(post_norm=None)  # noqa: E731
# Feature -> a case, and what switches it off: a function of config and parameters that changes them.
MUTATIONS: dict[str, tuple[str, Any]] = {
    "Mistral window": ("mistral_window", _set(windows=())),
    "Mistral window width": ("mistral_window", _set(windows=(8, 8))),
    "Ministral layer types": ("ministral_mixed", _set(windows=(None, 9))),
    "Qwen2 biases": ("qwen2_tied", _on_attention(_zero("qkv_bias"))),
    "Qwen2 window": ("qwen2_window", _set(windows=())),
    "Qwen2 first window layer": ("qwen2_window", _set(windows=(9, 9))),
    "Qwen3 q and k norm": ("qwen3_tied", _on_attention(lambda a: a.replace(q_norm=None, k_norm=None))),
    "Qwen3 biases": ("qwen3_yarn", _on_attention(_zero("qkv_bias"))),
    "Qwen3 o bias": ("qwen3_yarn", _on_attention(_zero("o_bias"))),
    "Gemma 2 score cap": ("gemma2_caps", _set(soft_cap=None)),
    "Gemma 2 logit cap": ("gemma2_caps", _set(final_soft_cap=None)),
    "Gemma 2 window": ("gemma2_caps", _set(windows=())),
    "Gemma 2 window layers": ("gemma2_caps", _set(windows=(None, 9))),
    "Gemma 2 query scale": ("gemma2_caps", _set(query_scale=None)),
    "Gemma 2 embedding scale": ("gemma2_caps", _set(embed_scale=None)),
    "Gemma 2 activation": ("gemma2_caps", _set(activation="silu")),
    "Gemma 2 attention post norm": ("gemma2_caps", _on_attention(NO_POST_NORM)),
    "Gemma 2 feed-forward post norm": ("gemma2_caps", _on_feed_forward(NO_POST_NORM)),
    "Gemma 2 norm offset": (
        "gemma2_caps", lambda c, p: (c, jax.tree.map(lambda x: x - 1 if x.ndim == 1 else x, p))),
    "Phi-3 short factors": ("phi3_short", _rope(kind="default")),
    "Phi-3 window": ("phi3_short", _set(windows=())),
    "Phi-3 long factors": ("phi3_long", _rope(factors=tuple(1 + i / 8 for i in range(8)))),
    "Phi-3 long scale": ("phi3_long", _rope(scale=1.0)),
    "Phi-4 partial rotation": ("phi3_mini4", _rope(dim=16, factors=(4.0,) * 8, short_factors=(4.0,) * 8)),
    "GLM-4 partial rotation": ("glm4_biases", _set(rope=Rope(16))),
    "GLM-4 biases": ("glm4_biases", _on_attention(_zero("qkv_bias"))),
    "GLM-4 attention post norm": ("glm4_biases", _on_attention(NO_POST_NORM)),
    "GLM-4 feed-forward post norm": ("glm4_biases", _on_feed_forward(NO_POST_NORM)),
    "Granite embedding multiplier": ("granite_biases", _set(embed_scale=None)),
    "Granite attention multiplier": ("granite_biases", _set(query_scale=None)),
    "Granite residual multiplier": ("granite_biases", _set(residual_scale=1.0)),
    "Granite logit scaling": ("granite_biases", _set(logit_scale=1.0)),
    "Granite o bias": ("granite_biases", _on_attention(_zero("o_bias"))),
    "Granite gate and up biases": ("granite_biases", _on_feed_forward(_zero("gate_up_bias"))),
    "Granite down bias": ("granite_biases", _on_feed_forward(_zero("down_bias"))),
    "OLMo 2 q and k norm": ("olmo2_gqa", _on_attention(lambda a: a.replace(q_norm=None, k_norm=None))),
    "OLMo 2 attention post norm": ("olmo2_gqa", _on_attention(NO_POST_NORM)),
    "OLMo 2 norm behind, not before": (
        "olmo2_gqa", _on_feed_forward(lambda f: f.replace(norm=f.post_norm, post_norm=None))),
    "OLMo 3 q and k norm": ("olmo3_windows", _on_attention(lambda a: a.replace(q_norm=None, k_norm=None))),
    "OLMo 3 attention post norm": ("olmo3_windows", _on_attention(NO_POST_NORM)),
    "OLMo 3 norm behind, not before": (
        "olmo3_windows", _on_feed_forward(lambda f: f.replace(norm=f.post_norm, post_norm=None))),
    "OLMo 3 window": ("olmo3_windows", _set(windows=(None,) * 4)),
    "OLMo 3 window width": ("olmo3_windows", _set(windows=(8, 8, 8, None))),
    "OLMo 3 every fourth layer": ("olmo3_windows", _set(windows=(9, 9, 9, 9))),
    "OLMo 3 layer types": ("olmo3_biases", _set(windows=(9, None))),
    "OLMo 3 biases": ("olmo3_biases", _on_attention(_zero("qkv_bias"))),
    "OLMo 3 o bias": ("olmo3_biases", _on_attention(_zero("o_bias"))),
    "OLMo 3 plain rotation in windows": ("olmo3_biases", _set(local_rope=None)),
    "OLMo 3 YaRN of full layers": ("olmo3_biases", _rope(kind="default")),
    "OLMo 3 attention factor": ("olmo3_biases", _rope(scale=1.0)),
    "OLMo 3 rope base": ("olmo3_biases", _rope(theta=10000.0)),
    "OLMo 3 window rope base": ("olmo3_far", _local_rope(theta=20000.0)),
    "OLMo 3 far YaRN": ("olmo3_far", _rope(kind="default")),
    "StarCoder2 attention norm bias": ("starcoder2_biases", _on_attention(_zero("norm_bias"))),
    "StarCoder2 feed-forward norm bias": ("starcoder2_biases", _on_feed_forward(_zero("norm_bias"))),
    "StarCoder2 last norm bias": (
        "starcoder2_biases", lambda c, p: (c, p.replace(norm_bias=jnp.zeros_like(p.norm_bias)))),
    "StarCoder2 up bias": ("starcoder2_biases", _on_feed_forward(_zero("gate_up_bias"))),
    "StarCoder2 down bias": ("starcoder2_biases", _on_feed_forward(_zero("down_bias"))),
    "StarCoder2 o bias": ("starcoder2_biases", _on_attention(_zero("o_bias"))),
    "StarCoder2 untied head": ("starcoder2_biases", lambda c, p: (c, p.replace(head=None))),
    "StarCoder2 epsilon": ("starcoder2_biases", _set(norm_eps=0.01)),
    "StarCoder2 activation": ("starcoder2_biases", _set(activation="silu")),
    "StarCoder2 window": ("starcoder2_window", _set(windows=())),
    "Mixtral weights sum to one": ("mixtral_top2", _experts(normalizes=False)),
    "Mixtral second expert": ("mixtral_top2", _experts(num_active=1)),
    "Mixtral router": ("mixtral_top2", _on_experts(lambda m: m.replace(router=jnp.roll(m.router, 1, 0)))),
    "Mixtral window": ("mixtral_window", _set(windows=())),
    "Qwen2-MoE weights as they are": ("qwen2moe_shared", _experts(normalizes=True)),
    "Qwen2-MoE weights sum to one": ("qwen2moe_mixed", _experts(normalizes=False)),
    "Qwen2-MoE third expert": ("qwen2moe_shared", _experts(num_active=2)),
    "Qwen2-MoE shared expert": ("qwen2moe_shared", _on_experts(lambda m: m.replace(shared=None))),
    "Qwen2-MoE shared gate": ("qwen2moe_shared", _on_experts(_no_shared_gate)),
    "Qwen2-MoE biases": ("qwen2moe_shared", _on_attention(_zero("qkv_bias"))),
    "Qwen2-MoE dense layers": ("qwen2moe_mixed", _on_feed_forward(_no_dense)),
    "Qwen2-MoE window": ("qwen2moe_mixed", _set(windows=())),
    "Qwen2-MoE window layers": ("qwen2moe_mixed", _set(windows=(9, 9, 9, None))),
    "Qwen3-MoE weights sum to one": ("qwen3moe_tied", _experts(normalizes=False)),
    "Qwen3-MoE weights as they are": ("qwen3moe_mixed", _experts(normalizes=True)),
    "Qwen3-MoE third expert": ("qwen3moe_tied", _experts(num_active=2)),
    "Qwen3-MoE q and k norm": ("qwen3moe_tied", _on_attention(lambda a: a.replace(q_norm=None, k_norm=None))),
    "Qwen3-MoE dense layer": ("qwen3moe_mixed", _on_feed_forward(_no_dense)),
    "Qwen3-MoE window": ("qwen3moe_mixed", _set(windows=())),
    "YaRN": ("qwen2_yarn", _rope(kind="default")),
    "YaRN blend": ("qwen2_yarn", _rope(kind="linear")),
    "YaRN scale": ("qwen2_yarn", _rope(scale=1.0)),
    "YaRN original context": ("qwen2_yarn", _rope(original_context=4096)),
    "YaRN bounds": ("llama_yarn", _rope(low=1.0, high=32.0)),
    "YaRN mscale": ("llama_yarn", _rope(scale=1.1386294361)),
    "YaRN attention factor": ("qwen3_yarn", _rope(scale=1.1386294361)),
    "Phi-4 far long scale": ("phi3_far", _rope(scale=1.0)),
    "GLM-4 rope base": ("glm4_far", _rope(theta=10000.0)),
}  # fmt: skip


@pytest.mark.parametrize("feature", MUTATIONS)
def test_switching_a_feature_off_shows(feature):
    name, change = MUTATIONS[feature]
    family, config, params = model(name)
    assert error(name, run_whole(name, family, *change(config, params))) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["mixtral_top2", "qwen2moe_shared", "qwen3moe_tied"])
def test_every_expert_shows(name):
    family, config, params = model(name)
    experts = params.layers[0].feed_forward.experts
    for field in ("gate_up", "down"):
        for expert in range(config.experts.num_experts):
            weights = getattr(experts, field).at[expert].multiply(0.5)
            change = lambda m, weights=weights: m.replace(experts=m.experts.replace(**{field: weights}))  # noqa: E731, B023
            found = run_whole(name, family, *_on_experts(change)(config, params))
            assert error(name, found) > 100 * TOLERANCE, (field, expert)


def test_gguf_with_a_tensor_for_each_expert(tmp_path):
    path = write_family(FAMILY_CASES["mixtral_top2"], tmp_path / "model.gguf", is_old=True)
    checkpoint = open_checkpoint(path)
    assert "blk.0.ffn_gate.3.weight" in checkpoint.tensors
    family, config = load_config("gguf", checkpoint.architecture, checkpoint.config, checkpoint.tensors)
    params = load_params(checkpoint, family, config, dtype=jnp.dtype("float32"))
    for found, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(model("mixtral_top2")[2]), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("name", "kind", "field"),
    [("glm4_biases", "hf", "hf_pairs"), ("glm4_biases", "gguf", "gguf_pairs"),
     ("granite_biases", "gguf", "gguf_pairs"), ("mixtral_top2", "gguf", "gguf_pairs"),
     ("gemma2_caps", "hf", "hf_norm_offset")],
)  # fmt: skip
def test_how_a_file_is_read_shows(name, kind, field):
    off = {"hf_norm_offset": 0.0}.get(field, False)
    assert error(name, run_whole(name, *load(name, kind=kind, **{field: off}))) > 100 * TOLERANCE


def test_norming_each_head_is_not_norming_all():
    family, config, params = model("olmo2_gqa")
    found = []
    for qk_norm, sizes in (("whole", (48, 16)), ("head", (8, 8))):
        ones = {name: jnp.ones(size) for name, size in zip(("q_norm", "k_norm"), sizes, strict=True)}
        changed = _on_attention(lambda a, ones=ones: a.replace(**ones))(config, params)[1]
        parts = dataclasses.replace(config.parts, qk_norm=qk_norm)
        found.append(run_whole("olmo2_gqa", family, dataclasses.replace(config, parts=parts), changed))
    assert np.abs(found[0] - found[1]).max() > 100 * TOLERANCE


def test_subtracting_the_mean_shows(monkeypatch):
    def without_mean(x, weight, bias, eps):
        return norm.rms_norm(x, weight, eps) + bias[None, :]

    family, config, params = model("starcoder2_biases")
    monkeypatch.setattr(norm, "layer_norm", without_mean)
    # Another config, so that nothing traced before is used again.
    config = dataclasses.replace(config, norm_eps=config.norm_eps * (1 + 1e-12))
    assert error("starcoder2_biases", run_whole("starcoder2_biases", family, config, params)) > 0.01
