"""OLMo 2: norms behind the halves alone, and queries and keys normed over all heads together.

A GGUF of this architecture that has a window is an OLMo 3.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from xjax.errors import LoadError
from xjax.models.decoder import Config, read_gguf, read_hf
from xjax.models.family import Family
from xjax.models.layers import LayerParts
from xjax.models.naming import Naming
from xjax.models.rope_settings import rope_from_hf
from xjax.models.settings import Settings, short

NAMING = Naming(
    hf={
        "attention.post_norm": "post_attention_layernorm.weight",
        "feed_forward.post_norm": "post_feedforward_layernorm.weight",
    }
)


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json."""
    get = Settings(values, "config.json")
    return read_hf(get, parts=layer_parts(get.flag("attention_bias", False)))


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata; layers with a window, which are OLMo 3's, have a plain rotation of their own."""
    # llama.cpp's converter first wrote a config.json's attention_factor, the whole scale, under this key;
    # known from its source alone, since no such file was at hand.
    scale = values.get("olmo2.rope.scaling.attn_factor")
    get = Settings({"olmo2.rope.scaling.yarn_attn_factor": scale, **values}, "GGUF metadata", "olmo2.")
    window = get.integer("attention.sliding_window", 0, low=0)
    windows = _gguf_windows(get, window) if window else ()
    config = read_gguf(get, tensors, windows=windows, parts=layer_parts(has_bias=False))
    if not windows:
        return config
    theta = get.number("rope.freq_base_swa", config.rope.theta)
    return replace(config, local_rope=rope_from_hf(None, dim=config.rope.dim, theta=theta))


def _gguf_windows(get: Settings, window: int) -> tuple[int | None, ...]:
    """Read which layers have the window: one flag for each, or one layer of so many that has not."""
    num_layers, key = get.num_layers("block_count"), "attention.sliding_window_pattern"
    given = get.values.get(get.prefix + key)
    if not isinstance(given, np.ndarray):
        return windows_but_every(get.integer(key, 4), window, num_layers)
    if given.dtype != np.bool_ or given.shape != (num_layers,):
        raise LoadError(f"{get.source}: {get.prefix}{key} must be {num_layers} flags, not {short(given)}")
    return tuple(window if has_window else None for has_window in given)


def windows_but_every(period: int, window: int, num_layers: int) -> tuple[int | None, ...]:
    """Give every layer the window, but one of `period`, the last of them."""
    return tuple(window if (i + 1) % period else None for i in range(num_layers))


def layer_parts(has_bias: bool) -> LayerParts:
    """Say which parts a layer has."""
    return LayerParts(qkv_bias=has_bias, o_bias=has_bias, qk_norm="whole", pre_norms=False, post_norms=True)


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    naming=NAMING,
)
