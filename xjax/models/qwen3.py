"""Qwen3: Llama's layers with norms of queries and keys by head, and a head size of its own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xjax.models.decoder import (
    Config,
    abstract,
    cache_spec,
    forward,
    init,
    logits,
    read_gguf,
    read_hf,
    shardings,
    specs,
)
from xjax.models.layers import LayerParts
from xjax.models.naming import Naming
from xjax.models.settings import Settings

__all__ = [
    "NAMING", "abstract", "cache_spec", "config_from_gguf", "config_from_hf",
    "forward", "init", "logits", "shardings", "specs",
]  # fmt: skip

NAMING = Naming()


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json; layers from `max_window_layers` on have a window where one is in use."""
    get = Settings(values, "config.json")
    num_layers = get.num_layers("num_hidden_layers")
    window, first = None, num_layers
    if get.flag("use_sliding_window", False):
        window = get.integer("sliding_window", 4096)
        first = get.integer("max_window_layers", 28, low=0)
    windows = get.windows(num_layers, window, default=lambda i: window if i >= first else None)
    has_bias = get.flag("attention_bias", False)
    parts = LayerParts(qkv_bias=has_bias, o_bias=has_bias, qk_norm="head")
    return read_hf(get, windows=windows, parts=parts)


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata."""
    config = read_gguf(Settings(values, "GGUF metadata", "qwen3."), tensors, theta=1e6)
    return replace(config, parts=replace(config.parts, qk_norm="head"))
