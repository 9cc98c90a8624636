"""The tiny models of every family beside Llama and Gemma 3, whose reference logits are in families.npz.

scripts/golden builds each with transformers and keeps its logits, and in families.json the names and
shapes of its tensors, so that a test draws the same weights without torch. Numbers that a GGUF holds as
float32 are ones that float32 holds exactly.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.golden.recipe import Case

LOGITS = Path(__file__).parent / "families.npz"
SHAPES = Path(__file__).parent / "families.json"

_COMMON = {
    "vocab_size": 47, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "rms_norm_eps": 2.0**-17, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
_BASES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 16,
                "sliding_window": 9},
    "ministral": {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "head_dim": 16,
                  "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False,
              "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16,
              "use_sliding_window": False, "attention_bias": False},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 16,
               "num_attention_heads": 4, "sliding_window": 9, "query_pre_attn_scalar": 24,
               "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
               "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "num_attention_heads": 3,
             "num_key_value_heads": 1, "pad_token_id": 0},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "head_dim": 16,
             "attention_bias": True, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "granite": {"architectures": ["GraniteForCausalLM"], "model_type": "granite",
                "attention_multiplier": 0.25, "embedding_multiplier": 3.0, "residual_multiplier": 0.375,
                "logits_scaling": 0.5, "attention_bias": True, "mlp_bias": True,
                "tie_word_embeddings": True},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False},
    "olmo3": {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_hidden_layers": 4,
              "rope_theta": 500000.0, "sliding_window": 9, "attention_bias": False, "pad_token_id": 0},
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2",
                   "norm_epsilon": 2.0**-16, "rms_norm_eps": None, "hidden_act": "gelu_pytorch_tanh",
                   "use_bias": True, "sliding_window": None},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "head_dim": 8,
                "intermediate_size": 40, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2moe": {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 6,
                 "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": False,
                 "shared_expert_intermediate_size": 40, "use_sliding_window": False},
    "qwen3moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16,
                 "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                 "norm_topk_prob": True, "use_sliding_window": False, "attention_bias": False},
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def _long_rope(pairs: int) -> dict[str, Any]:
    short = [1.0 + 0.125 * i for i in range(pairs)]
    return {"type": "longrope", "short_factor": short, "long_factor": [4.0 * x * x for x in short]}


_PHI4 = {"partial_rotary_factor": 0.75, "rope_scaling": _long_rope(6), "tie_word_embeddings": True,
         "original_max_position_embeddings": 32}  # fmt: skip
_FAR = {"num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1}


@dataclass(frozen=True)
class FamilyCase(Case):
    """A case whose family is the first word of its name; its tensors are the reference's own."""

    @property
    def family(self) -> str:
        """Key of the family's plain settings."""
        return self.name.partition("_")[0]

    @property
    def config(self) -> dict[str, Any]:
        """The config.json of the case."""
        return {**_COMMON, **_BASES[self.family], **self.changes}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by its Hugging Face name."""
        return {name: tuple(shape) for name, shape in _stored_shapes()[self.name].items()}

    @property
    def norms_count_from_one(self) -> bool:
        """Whether the family adds one to its norm weights."""
        return self.family == "gemma2"


@functools.cache
def _stored_shapes() -> dict[str, dict[str, list[int]]]:
    return json.loads(SHAPES.read_text(encoding="utf-8"))


FAMILY_CASES = {
    case.name: case
    for case in (
        FamilyCase("mistral_window", {}),
        FamilyCase("ministral_mixed", {}),
        FamilyCase("qwen2_tied", {"tie_word_embeddings": True}),
        FamilyCase("qwen2_window", {"use_sliding_window": True}),
        FamilyCase("qwen3_tied", {"tie_word_embeddings": True}),
        FamilyCase("gemma2_caps", {}),
        FamilyCase("phi3_short", {
            "rope_scaling": _long_rope(8), "original_max_position_embeddings": 4096, "sliding_window": 9}),
        FamilyCase("phi3_long", {"rope_scaling": _long_rope(8), "original_max_position_embeddings": 32}),
        FamilyCase("phi3_plain", {"original_max_position_embeddings": 4096}),
        FamilyCase("phi3_mini4", _PHI4),
        FamilyCase("glm4_biases", {}),
        FamilyCase("granite_biases", {}),
        FamilyCase("olmo2_gqa", {}),
        FamilyCase("olmo3_windows", {}),
        FamilyCase("olmo3_biases", {
            "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"],
            "attention_bias": True, "tie_word_embeddings": True,
            "rope_scaling": {**_YARN, "factor": 8.0, "attention_factor": 1.25}}, 44, 24),
        FamilyCase("starcoder2_biases", {}),
        FamilyCase("starcoder2_window", {
            "sliding_window": 9, "use_bias": False, "tie_word_embeddings": True}),
        FamilyCase("mixtral_top2", {}),
        FamilyCase("mixtral_window", {"sliding_window": 9}),
        FamilyCase("qwen2moe_shared", {}),
        FamilyCase("qwen2moe_mixed", {
            "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1],
            "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 9,
            "max_window_layers": 3}),
        FamilyCase("qwen3moe_tied", {"tie_word_embeddings": True}),
        FamilyCase("qwen3moe_mixed", {
            "mlp_only_layers": [0], "norm_topk_prob": False, "use_sliding_window": True,
            "sliding_window": 9, "attention_bias": True}),
        FamilyCase("llama_yarn", {
            **_FAR, "rope_theta": None, "rope_parameters": {
                **_YARN, "rope_theta": 20000.0, "beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.75,
                "mscale_all_dim": 0.25}}, 2100, 24),
        FamilyCase("qwen2_yarn", {**_FAR, "rope_scaling": _YARN}, 2100, 24),
        FamilyCase("qwen3_yarn", {
            **_FAR, "attention_bias": True, "rope_scaling": {
                **_YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5}}, 2100, 24),
        FamilyCase("phi3_far", {
            **_PHI4, "num_hidden_layers": 1, "original_max_position_embeddings": 1024}, 2100, 24),
        FamilyCase("olmo3_far", {
            "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
            "rope_theta": None, "rope_parameters": {
                "full_attention": {**_YARN, "rope_theta": 20000.0, "attention_factor": 1.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}, 2100, 24),
        FamilyCase("glm4_far", {
            **_FAR, "attention_bias": False, "rope_theta": None, "partial_rotary_factor": None,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5}}, 2100, 24),
    )
}  # fmt: skip
