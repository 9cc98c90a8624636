"""OLMo 3: OLMo 2's layers with windows on three of four, whose rotation is never scaled."""

from collections.abc import Mapping
from typing import Any

from xjax.models.decoder import Config, read_hf
from xjax.models.family import Family
from xjax.models.olmo2 import NAMING, config_from_gguf, layer_parts, windows_but_every
from xjax.models.rope_settings import ropes_from_hf
from xjax.models.settings import Settings

_THETA = 500000.0


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json; without `layer_types` every fourth layer sees everything."""
    get = Settings({"rms_norm_eps": 1e-5, **values}, "config.json")
    num_layers, window = get.num_layers("num_hidden_layers"), get.integer("sliding_window", 4096)
    embed_dim, num_heads = get.integer("hidden_size"), get.integer("num_attention_heads")
    head_dim = get.head_dim("head_dim", max(embed_dim // num_heads, 1))
    # Files from before there was a base for each kind of layer mean the one that they have for both.
    theta = get.number("rope_theta", _THETA)
    rope, local_rope = ropes_from_hf(get, dim=head_dim, theta=theta, local_theta=theta)
    every_fourth = windows_but_every(4, window, num_layers)
    return read_hf(
        get,
        rope=rope,
        local_rope=local_rope,
        windows=get.windows(num_layers, window, default=lambda i: every_fourth[i]),
        parts=layer_parts(get.flag("attention_bias", False)),
    )


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    naming=NAMING,
)
