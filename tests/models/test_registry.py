"""From architecture strings to families, and configs that are wrong."""

import numpy as np
import pytest

from tests.golden.families import FAMILY_CASES
from tests.golden.recipe import CASES
from xjax.cache.identity import canonical
from xjax.errors import LoadError
from xjax.models import (
    gemma2,
    gemma3,
    glm4,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    starcoder2,
)  # fmt: skip
from xjax.models.registry import family_for, load_config, supported
from xjax.models.rope import Rope

LLAMA, GEMMA = CASES["llama_tied"].config, CASES["gemma_tied"].config


def plain(name):
    return FAMILY_CASES[name].config


def test_every_name_finds_its_family():
    for entry in supported():
        for name in (*entry.hf, *entry.gguf):
            assert family_for(name) is entry.family


def test_an_unknown_name_is_said_with_the_known_ones():
    with pytest.raises(LoadError, match="'MambaForCausalLM'.*LlamaForCausalLM.*gemma3"):
        family_for("MambaForCausalLM")


def test_gemma_windows():
    assert gemma3.config_from_hf(GEMMA).windows == (9,) * 5 + (None, 9)
    spec = gemma3.FAMILY.cache_spec(gemma3.config_from_hf(GEMMA))
    assert [layer.window for layer in spec] == [9] * 5 + [None, 9]


def test_text_part_of_a_larger_model():
    family, config = load_config("hf", "Gemma3ForConditionalGeneration", {"text_config": GEMMA}, {})
    assert family is gemma3.FAMILY
    assert config == gemma3.config_from_hf(GEMMA)


def test_nested_rope_parameters():
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    flat = GEMMA | {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 5e5, "rope_local_base_freq": 2e4
    }  # fmt: skip
    nested = {key: value for key, value in GEMMA.items() if not key.startswith("rope")} | {
        "rope_parameters": rope
    }
    assert gemma3.config_from_hf(nested) == gemma3.config_from_hf(flat)


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("mistral_window", {}, (9, 9)),
        ("mistral_window", {"sliding_window": None}, (None, None)),
        ("mistral_window", {"sliding_window": 4096}, (None, None)),  # as wide as the context
        ("ministral_mixed", {}, (9, None)),
        ("qwen2_window", {}, (None, 9)),
        ("qwen2_window", {"max_window_layers": 0}, (9, 9)),
        ("qwen2_window", {"use_sliding_window": False}, (None, None)),
        ("qwen3_tied", {}, (None, None)),
        ("gemma2_caps", {}, (9, None)),
        ("phi3_short", {}, (9, 9)),
        ("phi3_plain", {}, (None, None)),
        ("olmo3_windows", {}, (9, 9, 9, None)),
        ("olmo3_windows", {"num_hidden_layers": 5}, (9, 9, 9, None, 9)),
        ("olmo3_biases", {}, (None, 9)),
        ("olmo2_gqa", {"sliding_window": 9}, (None, None)),  # the reference has no windows there
        ("starcoder2_window", {}, (9, 9)),
    ],
)
def test_windows(name, changes, windows):
    config = plain(name) | changes
    family, read = load_config("hf", config["architectures"][0], config, {})
    assert read.layer_windows == windows
    assert tuple(layer.window for layer in family.cache_spec(read)) == windows


def test_a_window_as_wide_as_the_context_keeps_the_local_base():
    config = gemma3.config_from_hf(GEMMA | {"sliding_window": 4096})
    assert config.layer_windows == (None,) * 7
    assert config.local_layers == (True,) * 5 + (False, True)


def test_flat_rope_settings_of_olmo3():
    """The base is one of both kinds of layers, the scaling that of full ones alone."""
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    flat = plain("olmo3_windows") | {"rope_theta": 2e4, "rope_scaling": rope}
    nested = flat | {"rope_theta": None, "rope_scaling": None, "rope_parameters": {
        "full_attention": rope | {"rope_theta": 2e4}, "sliding_attention": {"rope_theta": 2e4},
    }}  # fmt: skip
    config = olmo3.config_from_hf(flat)
    assert config == olmo3.config_from_hf(nested)
    assert (config.rope.kind, config.local_rope) == ("yarn", Rope(8, 2e4))


BROKEN = [
    (llama, LLAMA, {"hidden_size": None}, "hidden_size is missing"),
    (llama, LLAMA, {"num_hidden_layers": "2"}, "num_hidden_layers"),
    (llama, LLAMA, {"num_attention_heads": 0}, "num_attention_heads"),
    (llama, LLAMA, {"num_key_value_heads": 4}, "6 heads cannot share 4"),
    (llama, LLAMA, {"head_dim": 7}, "even"),
    (llama, LLAMA, {"rms_norm_eps": -1}, "rms_norm_eps"),
    (llama, LLAMA, {"hidden_act": "relu"}, "relu"),
    (llama, LLAMA, {"attention_bias": 1}, "attention_bias"),
    (llama, LLAMA, {"rope_scaling": "linear"}, "rope_scaling"),
    (gemma3, GEMMA, {"layer_types": ["full_attention"]}, "layer_types"),
    (gemma3, GEMMA, {"layer_types": ["chunked_attention"] * 7}, "layer_types"),
    (gemma3, GEMMA, {"layer_types": 7}, "layer_types"),
    (gemma3, GEMMA, {"layer_types": [["full_attention"]] * 7}, "layer_types"),
    (llama, LLAMA, {"hidden_act": ["silu"]}, "activation"),
    (llama, LLAMA, {"rms_norm_eps": 10**400}, "rms_norm_eps"),
    (llama, LLAMA, {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    (llama, LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 4096"),
    (llama, LLAMA, {"max_position_embeddings": 10**30}, "max_position_embeddings"),
    (gemma3, GEMMA, {"use_bidirectional_attention": True}, "bidirectional"),
    (gemma3, GEMMA, {"attn_logit_softcapping": 50.0}, "soft cap"),
    (llama, LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    (glm4, plain("glm4_biases"), {"partial_rotary_factor": 1.5}, "above 0 and at most 1"),
    (glm4, plain("glm4_biases"), {"partial_rotary_factor": "half"}, "above 0 and at most 1"),
    (mistral, plain("mistral_window"), {"sliding_window": 0}, "sliding_window"),
    (mistral, plain("mistral_window"), {"layer_types": ["full_attention"]}, "layer_types"),
    (qwen2, plain("qwen2_window"), {"max_window_layers": -1}, "max_window_layers"),
    (gemma2, plain("gemma2_caps"), {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
    (gemma2, plain("gemma2_caps"), {"use_bidirectional_attention": True}, "bidirectional"),
    (granite, plain("granite_biases"), {"logits_scaling": 0}, "logits_scaling"),
    (olmo3, plain("olmo3_windows"), {"sliding_window": 0}, "sliding_window"),
    (olmo3, plain("olmo3_windows"), {"layer_types": ["full_attention"]}, "layer_types"),
    (olmo3, plain("olmo3_windows"), {"rope_parameters": {"full_attention": 1}}, "full_attention must be an"),
    (starcoder2, plain("starcoder2_biases"), {"norm_epsilon": 0}, "norm_epsilon"),
    (phi3, plain("phi3_long"), {"rope_scaling": {"type": "longrope"}}, "long_factor must be a list of 8"),
    (phi3, plain("phi3_long"), {"partial_rotary_factor": 0.5}, "long_factor must be a list of 4"),
    (mixtral, plain("mixtral_top2"), {"num_experts_per_tok": 6}, "is 6, but there are 5 experts"),
    (mixtral, plain("mixtral_top2"), {"num_experts_per_tok": 0}, "num_experts_per_tok must be an integer"),
    (mixtral, plain("mixtral_top2"), {"num_local_experts": 0}, "num_local_experts must be an integer"),
    (mixtral, plain("mixtral_top2"), {"num_local_experts": None}, "num_local_experts is missing"),
    (qwen2_moe, plain("qwen2moe_mixed"), {"num_experts": 10**9}, "num_experts must be an integer"),
    (qwen2_moe, plain("qwen2moe_mixed"), {"moe_intermediate_size": 0}, "moe_intermediate_size"),
    (qwen2_moe, plain("qwen2moe_mixed"), {"shared_expert_intermediate_size": None}, "shared_expert_inter"),
    (qwen2_moe, plain("qwen2moe_mixed"), {"mlp_only_layers": [4]}, "must list layers from 0 to 3"),
    (qwen2_moe, plain("qwen2moe_mixed"), {"mlp_only_layers": "0"}, "must list layers from 0 to 3"),
    (qwen2_moe, plain("qwen2moe_mixed"), {"mlp_only_layers": [[0]]}, "must list layers from 0 to 3"),
    (qwen2_moe, plain("qwen2moe_mixed"), {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    (qwen2_moe, plain("qwen2moe_mixed"), {"decoder_sparse_step": 9}, "leave no layer to the experts"),
    (qwen3_moe, plain("qwen3moe_tied"), {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
]


def test_newer_files_call_the_number_of_experts_otherwise():
    config = plain("qwen3moe_tied")
    newer = {**config, "num_local_experts": config["num_experts"], "num_experts": None}
    assert qwen3_moe.config_from_hf(newer) == qwen3_moe.config_from_hf(config)


@pytest.mark.parametrize(("family", "config", "changes", "words"), BROKEN)
def test_a_wrong_config_is_one_clear_line(family, config, changes, words):
    with pytest.raises(LoadError, match=words) as caught:
        family.config_from_hf(config | changes)
    assert "\n" not in str(caught.value)


EXPERTS = {"expert_count": 8, "expert_used_count": 2}
ROUTER = ("blk.0.ffn_gate_inp.weight",)
GGUF = {
    "block_count": 2, "embedding_length": 48, "attention.head_count": 3, "feed_forward_length": 80,
    "context_length": 256, "vocab_size": 47,
}  # fmt: skip

PATTERN_KEY = "attention.sliding_window_pattern"
PATTERN = {"attention.sliding_window": 9}


def test_windows_of_an_olmo2_gguf():
    """With a window it is an OLMo 3, whose window layers rotate without the others' scaling."""

    def read(**changes):
        return olmo2.config_from_gguf({f"olmo2.{key}": value for key, value in (GGUF | changes).items()}, {})

    assert read().windows == read(**{"attention.sliding_window": 0}).windows == ()
    five = PATTERN | {"block_count": 5}
    assert read(**five).windows == (9, 9, 9, None, 9)
    assert read(**five, **{PATTERN_KEY: 2}).windows == (9, None, 9, None, 9)
    flags = np.asarray([False, True, True, False, True])
    assert read(**five, **{PATTERN_KEY: flags}).windows == (None, 9, 9, None, 9)
    yarn = PATTERN | {
        "rope.freq_base": 2e4, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0,
        "rope.scaling.attn_factor": 1.25,
    }  # fmt: skip
    config = read(**yarn)
    assert (config.rope.kind, config.rope.scale, config.local_rope) == ("yarn", 1.25, Rope(16, 2e4))
    assert read(**yarn, **{"rope.scaling.yarn_attn_factor": 1.5}).rope.scale == 1.5
    assert read(**yarn, **{"rope.freq_base_swa": 1e4}).local_rope == Rope(16, 1e4)


@pytest.mark.parametrize(
    ("family", "changes", "tensors", "words"),
    [
        (olmo2, {"attention.sliding_window": 1.5}, (), "sliding_window must be an integer"),
        (olmo2, PATTERN | {PATTERN_KEY: np.ones(3, bool)}, (), "pattern must be 2 flags"),
        (olmo2, PATTERN | {PATTERN_KEY: np.ones(2, np.int32)}, (), "pattern must be 2 flags"),
        (olmo2, PATTERN | {PATTERN_KEY: "4"}, (), "pattern must be an integer"),
        (llama, {}, ("rope_factors_long.weight",), "long rotary factors"),
        (llama, {"rope.dimension_count": 8}, (), "rope.dimension_count must be the head size, 16"),
        (qwen3, {"expert_count": 8}, (), "this architecture has no experts"),
        (llama, {"expert_count": 8}, (), "expert_count is 8, but no layer has a router"),
        (llama, {"expert_count": 8}, ROUTER, "llama.expert_used_count is missing"),
        (llama, {"expert_count": 8, "expert_used_count": 9}, ROUTER, "is 9, but there are 8 experts"),
        (llama, {"expert_count": 8, "expert_used_count": 0}, ROUTER, "expert_used_count must be an integer"),
        (llama, EXPERTS | {"expert_gating_func": 2}, ROUTER, "expert_gating_func 2 is not supported"),
        (llama, EXPERTS | {"expert_weights_scale": 2.5}, ROUTER, "expert_weights_scale 2.5 is not supported"),
        (llama, EXPERTS | {"expert_weights_scale": np.ones(2)}, ROUTER, "expert_weights_scale array"),
        (phi3, {"rope.scaling.original_context_length": 64}, (), "rope_factors_long.weight is missing"),
        (qwen3, {"block_count": None}, (), "qwen3.block_count is missing"),
        (granite, {"logit_scale": 0.0}, (), "granite.logit_scale must be a number above 0"),
        (glm4, {"rope.scaling.type": "longrope"}, (), "type 'longrope' is not supported"),
    ],
)
def test_wrong_metadata_is_one_clear_line(family, changes, tensors, words):
    prefix = family.__name__.rpartition(".")[2]
    values = {f"{prefix}.{key}": value for key, value in (GGUF | changes).items()}
    found = {name: np.zeros(8, np.float32) for name in tensors}
    with pytest.raises(LoadError, match=words) as caught:
        family.config_from_gguf(values, found)
    assert "\n" not in str(caught.value)


def test_every_config_can_be_told_from_every_other():
    """Settings are part of what names pages, in words that are the same in any process."""
    configs = {
        load_config("hf", case.config["architectures"][0], case.config, {})[1]
        for case in FAMILY_CASES.values()
    }
    texts = {repr(canonical(config)) for config in configs}
    assert len(texts) == len(configs) > 10 and not any(" at 0x" in text for text in texts)
