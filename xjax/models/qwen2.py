"""Qwen2 and Qwen2.5: Llama's layers with biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from xjax.models.decoder import Config, read_gguf, read_hf
from xjax.models.family import Family
from xjax.models.layers import LayerParts
from xjax.models.settings import Settings


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json; layers from `max_window_layers` on have a window where one is in use."""
    get = Settings(values, "config.json")
    return read_hf(get, windows=read_windows(get), parts=LayerParts(qkv_bias=True))


def read_windows(get: Settings) -> tuple[int | None, ...]:
    """Read the window of each layer as Qwen's config.json files have it."""
    num_layers = get.num_layers("num_hidden_layers")
    window, first = None, num_layers
    if get.flag("use_sliding_window", False):
        window = get.integer("sliding_window", 4096)
        first = get.integer("max_window_layers", 28, low=0)
    return get.windows(num_layers, window, default=lambda i: window if i >= first else None)


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata."""
    return read_gguf(Settings(values, "GGUF metadata", "qwen2."), tensors)


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
)
