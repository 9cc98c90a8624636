"""Llama: what most families are variations of.

Pre-norm halves, SiLU-gated feed-forward, grouped kv heads, rotary embedding with default, linear
or llama3 scaling; biases and a head of its own are optional.
"""

from collections.abc import Mapping
from typing import Any

from xjax.models.decoder import Config, read_gguf, read_hf
from xjax.models.family import Family
from xjax.models.layers import LayerParts
from xjax.models.naming import Naming
from xjax.models.settings import Settings

_NAMING = Naming(gguf_pairs=True)


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json; raises LoadError naming the key that is missing or wrong."""
    get = Settings(values, "config.json")
    has_bias = get.flag("attention_bias", False)
    parts = LayerParts(qkv_bias=has_bias, o_bias=has_bias, mlp_bias=get.flag("mlp_bias", False))
    return read_hf(get, parts=parts)


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata; what the metadata does not say is read off the tensors that are there."""
    return read_gguf(Settings(values, "GGUF metadata", "llama."), tensors, normalizes=True)


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    naming=_NAMING,
)
