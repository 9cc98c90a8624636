"""OLMo 2: norms behind the halves alone, and queries and keys normed over all heads together."""

from collections.abc import Mapping
from typing import Any

from xjax.errors import LoadError
from xjax.models.decoder import Config, read_gguf, read_hf
from xjax.models.family import Family
from xjax.models.layers import LayerParts
from xjax.models.naming import Naming
from xjax.models.settings import Settings

_NAMING = Naming(
    hf={
        "attention.post_norm": "post_attention_layernorm.weight",
        "feed_forward.post_norm": "post_feedforward_layernorm.weight",
    }
)


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json."""
    get = Settings(values, "config.json")
    return read_hf(get, parts=_parts(get.flag("attention_bias", False)))


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata."""
    get = Settings(values, "GGUF metadata", "olmo2.")
    if get.values.get("olmo2.attention.sliding_window") is not None:
        raise LoadError("GGUF metadata: olmo2 with a window, which is OLMo 3, is not supported")
    return read_gguf(get, tensors, parts=_parts(has_bias=False))


def _parts(has_bias: bool) -> LayerParts:
    return LayerParts(qkv_bias=has_bias, o_bias=has_bias, qk_norm="whole", pre_norms=False, post_norms=True)


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    naming=_NAMING,
)
