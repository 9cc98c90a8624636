"""Granite 3: Llama's layers with multipliers on embeddings, scores, residuals and logits."""

from collections.abc import Mapping
from typing import Any

from xjax.models.decoder import Config, read_gguf, read_hf
from xjax.models.family import Family
from xjax.models.layers import LayerParts
from xjax.models.naming import Naming
from xjax.models.settings import Settings

_NAMING = Naming(gguf_pairs=True)


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json."""
    get = Settings(values, "config.json")
    has_bias = get.flag("attention_bias", False)
    return read_hf(
        get,
        query_scale=get.number("attention_multiplier", 1.0),
        embed_scale=get.number("embedding_multiplier", 1.0),
        residual_scale=get.number("residual_multiplier", 1.0),
        logit_scale=1.0 / get.number("logits_scaling", 1.0),
        parts=LayerParts(qkv_bias=has_bias, o_bias=has_bias, mlp_bias=get.flag("mlp_bias", False)),
    )


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata."""
    get = Settings(values, "GGUF metadata", "granite.")
    return read_gguf(
        get,
        tensors,
        query_scale=get.optional_number("attention.scale"),
        embed_scale=get.number("embedding_scale", 1.0),
        residual_scale=get.number("residual_scale", 1.0),
        logit_scale=1.0 / get.number("logit_scale", 1.0),
    )


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    naming=_NAMING,
)
