"""Write the tiny golden models as files: a Hugging Face folder, or a GGUF as its converter lays it."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

from tests.golden.recipe import Case, weights


def write_folder(
    case: Case, folder: Path, *, num_shards: int = 1, prefix: str = "", nest: bool = False
) -> Path:
    """Write config.json and safetensors; `prefix` and `nest` as a multi-modal model has them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in case.config.items() if value is not None}
    if nest:
        config = {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": config,
        }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {prefix + name: value for name, value in weights(case).items()}
    if num_shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder
    index: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: value for i, (name, value) in enumerate(tensors.items()) if i % num_shards == shard}
        safetensors.numpy.save_file(part, folder / file)
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def _permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave the halves of each head, as converters to GGUF do for Llama."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def llama3_factors(config: dict[str, Any]) -> np.ndarray:
    """Divisors of the frequencies as a GGUF holds them for llama3 scaling, [head_dim / 2] float32."""
    rope, dim = config["rope_scaling"], config["head_dim"]
    low_wave = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high_wave = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for i in range(dim // 2):
        wave = 2 * math.pi * config["rope_theta"] ** (2 * i / dim)
        if wave < high_wave:
            factors.append(1.0)
        elif wave > low_wave:
            factors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.asarray(factors, np.float32)


def write_gguf(
    case: Case, path: Path, *, quantize: gguf.GGMLQuantizationType | None = None, split: int = 0
) -> Path:
    """Write one GGUF file, float32 or with its matrices quantized; or files of `split` tensors each."""
    config, is_gemma = case.config, case.config["model_type"] == "gemma3_text"
    writer = gguf.GGUFWriter(path, "gemma3" if is_gemma else "llama", split_max_tensors=split)
    _write_metadata(writer, config, is_gemma)
    names = _GGUF_NAMES | (_GEMMA_NORMS if is_gemma else _LLAMA_NORMS)
    for name, values in weights(case).items():
        stem, _, ending = name.rpartition(".")
        parts = stem.split(".")
        prefix = f"blk.{parts[2]}." if stem.startswith("model.layers.") else ""
        stem = ".".join(parts[3:]) if prefix else stem
        if is_gemma and stem.endswith("norm"):
            values = values + np.float32(1)
        if not is_gemma and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            is_query = stem == "self_attn.q_proj"
            values = _permute(values, config["num_attention_heads" if is_query else "num_key_value_heads"])
        name = f"{prefix}{names[stem]}.{ending}"
        if quantize is not None and values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(name, values)
    if not is_gemma and (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], is_gemma: bool) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if is_gemma:
        writer.add_sliding_window(config["sliding_window"])
    else:
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["head_dim"])
    scaling = config.get("rope_scaling") or {}
    if "linear" in scaling.values():
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
