"""GLM-4-0414: rotation of neighbours in half of each head, norms on both sides of the halves."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xjax.models.decoder import Config, read_gguf, read_hf
from xjax.models.family import Family
from xjax.models.layers import LayerParts
from xjax.models.naming import Naming
from xjax.models.settings import Settings

_NAMING = Naming(
    hf={
        "attention.post_norm": "post_self_attn_layernorm.weight",
        "feed_forward.gate_up": "mlp.gate_up_proj.weight",
        "feed_forward.post_norm": "post_mlp_layernorm.weight",
    },
    gguf={"feed_forward.gate_up": "ffn_up.weight"},
    hf_pairs=True,
    gguf_pairs=True,
)


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json."""
    get = Settings({"partial_rotary_factor": 0.5, **values}, "config.json")
    parts = LayerParts(qkv_bias=get.flag("attention_bias", False), post_norms=True)
    return read_hf(get, is_partial=True, parts=parts)


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata."""
    config = read_gguf(Settings(values, "GGUF metadata", "glm4."), tensors, is_partial=True)
    return replace(config, parts=replace(config.parts, post_norms=True))


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    naming=_NAMING,
)
