"""Gemma 3: windows on five layers of six, each kind with a rotary base of its own.

Halves are normed before and after, norm weights count from one, queries and keys are normed per
head, embeddings are scaled by the root of their size. Of a checkpoint with a vision tower only
the text model is read.
"""

import math
from collections.abc import Mapping
from typing import Any

from xjax.errors import LoadError
from xjax.models.decoder import Config, read_gguf, read_hf
from xjax.models.family import Family
from xjax.models.gemma2 import NAMING
from xjax.models.layers import LayerParts
from xjax.models.rope_settings import rope_from_gguf, rope_from_hf, ropes_from_hf
from xjax.models.settings import Settings

_LOCAL_THETA = 10000.0  # GGUF files do not hold it
_WINDOW_PATTERN = 6  # every sixth layer sees everything
# What a config.json may leave out, as the reference has it.
_DEFAULTS = {
    "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "intermediate_size": 9216, "vocab_size": 262208, "max_position_embeddings": 131072,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
}  # fmt: skip


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json, or its `text_config` where the model has more than text."""
    nested = Settings(values, "config.json").table("text_config")
    given = {key: value for key, value in (nested or values).items() if value is not None}
    get = Settings(_DEFAULTS | given, "config.json")
    num_layers, head_dim = get.num_layers("num_hidden_layers"), get.head_dim("head_dim")
    is_bidirectional = get.flag("use_bidirectional_attention", False)
    if get.optional_number("attn_logit_softcapping") is not None or is_bidirectional:
        raise LoadError(
            "config.json: Gemma 3 with attention soft caps or bidirectional attention is not supported"
        )
    rope, local_rope = ropes_from_hf(
        get,
        dim=head_dim,
        theta=get.number("rope_theta", 1e6),
        local_theta=get.number("rope_local_base_freq", _LOCAL_THETA),
    )
    window = get.integer("sliding_window", 4096)
    pattern = get.integer("sliding_window_pattern", _WINDOW_PATTERN)
    has_bias = get.flag("attention_bias", False)
    return read_hf(
        get,
        rope=rope,
        local_rope=local_rope,
        windows=get.windows(num_layers, window, default=lambda i: _window(i, window, pattern)),
        query_scale=get.number("query_pre_attn_scalar") ** -0.5,
        embed_scale=math.sqrt(get.integer("hidden_size")),
        activation=get.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        final_soft_cap=get.optional_number("final_logit_softcapping"),
        parts=_parts(has_bias),
    )


def _parts(has_bias: bool) -> LayerParts:
    return LayerParts(qkv_bias=has_bias, o_bias=has_bias, qk_norm="head", post_norms=True)


def _window(layer_id: int, window: int, pattern: int) -> int | None:
    return None if (layer_id + 1) % pattern == 0 else window


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata; the local rotary base and the window pattern are the family's own."""
    get = Settings({"gemma3.attention.key_length": 256, **values}, "GGUF metadata", "gemma3.")
    num_layers, head_dim = get.num_layers("block_count"), get.head_dim("attention.key_length")
    embed_dim, window = get.integer("embedding_length"), get.integer("attention.sliding_window")
    num_heads = get.integer("attention.head_count")
    return read_gguf(
        get,
        tensors,
        rope=rope_from_gguf(get, dim=head_dim, theta=1e6),
        local_rope=rope_from_hf(None, dim=head_dim, theta=get.number("rope.freq_base_swa", _LOCAL_THETA)),
        windows=tuple(_window(i, window, _WINDOW_PATTERN) for i in range(num_layers)),
        query_scale=_gguf_query_scale(num_layers, embed_dim, num_heads, head_dim),
        embed_scale=math.sqrt(embed_dim),
        activation="gelu_tanh",
        final_soft_cap=get.optional_number("final_logit_softcapping"),
        parts=_parts(has_bias=False),
    )


def _gguf_query_scale(num_layers: int, embed_dim: int, num_heads: int, head_dim: int) -> float:
    """Return the scale of scores, which the file does not hold: the 27B model's differs from the rest."""
    is_27b = num_layers == 62
    return (embed_dim / num_heads if is_27b else head_dim) ** -0.5


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    naming=NAMING,
)
