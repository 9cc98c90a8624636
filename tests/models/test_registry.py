"""From architecture strings to families, and configs that are wrong."""

import pytest

from tests.golden.recipe import CASES
from xjax.errors import LoadError
from xjax.models import gemma3, llama
from xjax.models.registry import family_for, load_config, supported

LLAMA, GEMMA = CASES["llama_tied"].config, CASES["gemma_tied"].config


def test_every_name_finds_its_family():
    for entry in supported():
        for name in (*entry.hf, *entry.gguf):
            assert family_for(name) is entry.family


def test_an_unknown_name_is_said_with_the_known_ones():
    with pytest.raises(LoadError, match="'MambaForCausalLM'.*LlamaForCausalLM.*gemma3"):
        family_for("MambaForCausalLM")


def test_gemma_windows():
    assert gemma3.config_from_hf(GEMMA).windows == (9,) * 5 + (None, 9)
    spec = gemma3.cache_spec(gemma3.config_from_hf(GEMMA))
    assert [layer.window for layer in spec] == [9] * 5 + [None, 9]


def test_text_part_of_a_larger_model():
    family, config = load_config("hf", "Gemma3ForConditionalGeneration", {"text_config": GEMMA}, {})
    assert family is gemma3
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
]


@pytest.mark.parametrize(("family", "config", "changes", "words"), BROKEN)
def test_a_wrong_config_is_one_clear_line(family, config, changes, words):
    with pytest.raises(LoadError, match=words) as caught:
        family.config_from_hf(config | changes)
    assert "\n" not in str(caught.value)
