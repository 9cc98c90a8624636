"""Write the tiny models of families.py as GGUF files, as llama.cpp's converter lays each family out.

Tensor names come from the gguf package. What the converter does to the values is repeated here: it
interleaves the halves of q and k for Granite and Mixtral, adds one to Gemma's norms, keeps fused tensors
fused, stacks the weights of experts, and writes long rotary factors as tensors.
"""

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.golden.families import FamilyCase
from tests.golden.recipe import weights

_ARCHITECTURES = {
    "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3, "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "phi3": gguf.MODEL_ARCH.PHI3, "glm4": gguf.MODEL_ARCH.GLM4, "granite": gguf.MODEL_ARCH.GRANITE,
    "olmo2": gguf.MODEL_ARCH.OLMO2, "olmo3": gguf.MODEL_ARCH.OLMO2, "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "mixtral": gguf.MODEL_ARCH.LLAMA, "qwen2moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
}  # fmt: skip
_PERMUTED = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")


def write_family(case: FamilyCase, path: Path, *, is_old: bool = False) -> Path:
    """Write one case, float32; an old file has a tensor for each expert."""
    config, arch = case.config, _ARCHITECTURES[case.family]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_metadata(writer, case.family, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors = weights(case)
    if is_old:
        for name, values in _pop_old_experts(tensors).items():
            writer.add_tensor(name, values)
    for name, values in _stack_experts(tensors).items():
        if case.norms_count_from_one and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if case.family in ("granite", "mixtral") and name.endswith(_PERMUTED):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = _interleave(values, heads)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        writer.add_tensor(target, values)
    rope = config.get("rope_scaling") or {}
    if "long_factor" in rope:
        for kind in ("long", "short"):
            factors = np.asarray(rope[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_EXPERT = re.compile(r"(.*layers\.(\d+)\..*experts)\.(\d+)\.(\w+)\.weight")
_OLD_NAMES = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}


def _pop_old_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Take the experts out, under the names that files had before they were stacked."""
    found = {name: match for name in tensors if (match := _EXPERT.fullmatch(name))}
    return {
        f"blk.{match[2]}.{_OLD_NAMES[match[4]]}.{match[3]}.weight": tensors.pop(name)
        for name, match in found.items()
    }


def _stack_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors with those of experts stacked, "experts.3.w1" as a part of "experts.w1"."""
    found, stacks = {}, {}
    for name, values in tensors.items():
        if match := _EXPERT.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{match[4]}.weight", {})[int(match[3])] = values
        else:
            found[name] = values
    stacked = {name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in stacks.items()}
    return found | stacked


def _interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _write_metadata(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope.get("rope_theta", config["rope_theta"]))
    if config["rms_norm_eps"] is not None:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "norm_epsilon" in config:
        writer.add_layer_norm_eps(config["norm_epsilon"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if rope.get("rope_type") == "yarn":
        _write_yarn(writer, rope)
    if family in _EXTRAS:
        _EXTRAS[family](writer, config)


def _write_yarn(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "attention_factor" in rope:
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _write_gemma2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _write_phi3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    original = config["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1.0)))
    writer.add_sliding_window(config.get("sliding_window") or 0)
    if "rope_scaling" in config:
        scale = config["max_position_embeddings"] / original
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        writer.add_rope_scaling_attn_factors(factor)


def _write_glm4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_dimension_count(config["head_dim"] // 2)


def _write_granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _write_olmo3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    rule = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    writer.add_sliding_window_pattern(
        [kind == "sliding_attention" for kind in config.get("layer_types", rule)]
    )
    if "rope_parameters" in config:
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])


def _write_mixtral(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])


def _write_qwen_moe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


_EXTRAS = {"gemma2": _write_gemma2, "phi3": _write_phi3, "glm4": _write_glm4, "granite": _write_granite,
           "olmo3": _write_olmo3, "mixtral": _write_mixtral,
           "qwen2moe": _write_qwen_moe, "qwen3moe": _write_qwen_moe}  # fmt: skip
