"""Qwen3-MoE: Qwen3's layers with many small experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xjax.models.decoder import Config, read_gguf, read_hf
from xjax.models.experts import read_dense_layers, read_hf_experts
from xjax.models.family import Family
from xjax.models.layers import LayerParts
from xjax.models.settings import Settings


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json; a window that is in use is every layer's."""
    get = Settings(values, "config.json")
    num_layers, has_bias = get.num_layers("num_hidden_layers"), get.flag("attention_bias", False)
    window = get.integer("sliding_window", 4096) if get.flag("use_sliding_window", False) else None
    experts = read_hf_experts(
        get,
        num_experts="num_experts" if get.values.get("num_experts") is not None else "num_local_experts",
        ffn_dim="moe_intermediate_size",
        normalizes=get.flag("norm_topk_prob", False),
        dense_layers=read_dense_layers(get, num_layers),
    )
    return read_hf(
        get,
        windows=(window,) * num_layers,
        parts=LayerParts(qkv_bias=has_bias, o_bias=has_bias, qk_norm="head"),
        experts=experts,
    )


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata; weights of experts sum to one where the file does not say, as in llama.cpp."""
    get = Settings(values, "GGUF metadata", "qwen3moe.")
    config = read_gguf(get, tensors, theta=1e6, normalizes=True)
    return replace(config, parts=replace(config.parts, qk_norm="head"))


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
)
