"""Gemma 2: a window on every other layer, soft caps on scores and logits.

Halves are normed before and after, norm weights count from one, embeddings are scaled by the root
of their size.
"""

import math
from collections.abc import Mapping
from typing import Any

from xjax.errors import LoadError
from xjax.models.decoder import Config, read_gguf, read_hf
from xjax.models.family import Family
from xjax.models.layers import LayerParts
from xjax.models.naming import Naming
from xjax.models.settings import Settings

NAMING = Naming(
    hf={
        "attention.post_norm": "post_attention_layernorm.weight",
        "feed_forward.norm": "pre_feedforward_layernorm.weight",
        "feed_forward.post_norm": "post_feedforward_layernorm.weight",
    },
    hf_norm_offset=1.0,
)

_LARGEST = 46  # layers of the 27B model, whose scores have a scale of their own


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json; without `layer_types` the even layers have the window."""
    get = Settings({"head_dim": 256, "tie_word_embeddings": True, **values}, "config.json")
    num_layers, window = get.num_layers("num_hidden_layers"), get.integer("sliding_window", 4096)
    has_bias = get.flag("attention_bias", False)
    if get.flag("use_bidirectional_attention", False):
        raise LoadError("config.json: Gemma 2 with bidirectional attention is not supported")
    return read_hf(
        get,
        windows=get.windows(num_layers, window, default=lambda i: None if i % 2 else window),
        query_scale=get.number("query_pre_attn_scalar", 256) ** -0.5,
        embed_scale=math.sqrt(get.integer("hidden_size")),
        soft_cap=get.optional_number("attn_logit_softcapping"),
        final_soft_cap=get.optional_number("final_logit_softcapping"),
        activation=get.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        parts=LayerParts(qkv_bias=has_bias, o_bias=has_bias, post_norms=True),
    )


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata; which layers have the window is the family's own."""
    get = Settings(values, "GGUF metadata", "gemma2.")
    num_layers, window = get.num_layers("block_count"), get.integer("attention.sliding_window", 4096)
    embed_dim, num_heads = get.integer("embedding_length"), get.integer("attention.head_count")
    head_dim = get.integer("attention.key_length", 256)
    return read_gguf(
        get,
        tensors,
        windows=tuple(None if i % 2 else window for i in range(num_layers)),
        query_scale=(embed_dim / num_heads if num_layers == _LARGEST else head_dim) ** -0.5,
        embed_scale=math.sqrt(embed_dim),
        soft_cap=get.number("attn_logit_softcapping", 50.0),
        final_soft_cap=get.number("final_logit_softcapping", 30.0),
        activation="gelu_tanh",
        parts=LayerParts(post_norms=True),
    )


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    naming=NAMING,
)
