"""Qwen3: Llama's layers with norms of queries and keys by head, and a head size of its own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xjax.models.decoder import Config, read_gguf, read_hf
from xjax.models.family import Family
from xjax.models.layers import LayerParts
from xjax.models.qwen2 import read_windows
from xjax.models.settings import Settings


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json; layers from `max_window_layers` on have a window where one is in use."""
    get = Settings(values, "config.json")
    has_bias = get.flag("attention_bias", False)
    parts = LayerParts(qkv_bias=has_bias, o_bias=has_bias, qk_norm="head")
    return read_hf(get, windows=read_windows(get), parts=parts)


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata."""
    config = read_gguf(Settings(values, "GGUF metadata", "qwen3."), tensors, theta=1e6)
    return replace(config, parts=replace(config.parts, qk_norm="head"))


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
)
