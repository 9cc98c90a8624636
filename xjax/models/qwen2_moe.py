"""Qwen2-MoE: Qwen2's layers with many small experts and one, with a gate, that every token passes."""

from collections.abc import Mapping
from typing import Any

from xjax.models.decoder import Config, read_gguf, read_hf
from xjax.models.experts import read_dense_layers, read_hf_experts
from xjax.models.family import Family
from xjax.models.layers import LayerParts
from xjax.models.settings import Settings


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json; in front of `max_window_layers` every other layer has a window, where in use."""
    get = Settings(values, "config.json")
    num_layers = get.num_layers("num_hidden_layers")
    window, stop = None, 0
    if get.flag("use_sliding_window", False):
        window = get.integer("sliding_window", 4096)
        stop = get.integer("max_window_layers", 28, low=0)
    experts = read_hf_experts(
        get,
        num_experts="num_experts",
        ffn_dim="moe_intermediate_size",
        shared_ffn_dim=get.integer("shared_expert_intermediate_size"),
        normalizes=get.flag("norm_topk_prob", False),
        dense_layers=read_dense_layers(get, num_layers),
    )
    return read_hf(
        get,
        windows=get.windows(
            num_layers, window, default=lambda i: window if i < stop and i % 2 == 0 else None
        ),
        parts=LayerParts(qkv_bias=get.flag("qkv_bias", True)),
        experts=experts,
    )


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata."""
    return read_gguf(Settings(values, "GGUF metadata", "qwen2moe."), tensors, normalizes=False)


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
)
