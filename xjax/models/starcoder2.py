"""StarCoder2: layer norms with biases, a feed-forward without a gate, windows."""

from collections.abc import Mapping
from typing import Any

from xjax.models.decoder import Config, read_gguf, read_hf
from xjax.models.family import Family
from xjax.models.layers import LayerParts
from xjax.models.naming import Naming
from xjax.models.settings import Settings

_NAMING = Naming(
    hf={
        "norm_bias": "model.norm.bias",
        "attention.norm_bias": "input_layernorm.bias",
        "feed_forward.norm_bias": "post_attention_layernorm.bias",
        "feed_forward.gate_up": "mlp.c_fc.weight",
        "feed_forward.gate_up_bias": "mlp.c_fc.bias",
        "feed_forward.down": "mlp.c_proj.weight",
        "feed_forward.down_bias": "mlp.c_proj.bias",
    },
    gguf={
        "norm_bias": "output_norm.bias",
        "attention.norm_bias": "attn_norm.bias",
        "feed_forward.norm_bias": "ffn_norm.bias",
        "feed_forward.gate_up": "ffn_up.weight",
        "feed_forward.gate_up_bias": "ffn_up.bias",
    },
)


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json."""
    get = Settings({"tie_word_embeddings": True, **values}, "config.json")
    windows = get.windows_of_all(get.num_layers("num_hidden_layers"))
    return read_hf(
        get,
        norm_eps="norm_epsilon",
        windows=windows,
        activation=get.activation("hidden_act", default="gelu_pytorch_tanh"),
        parts=_parts(get.flag("use_bias", True)),
    )


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata."""
    get = Settings(values, "GGUF metadata", "starcoder2.")
    return read_gguf(
        get,
        tensors,
        norm_eps=get.number("attention.layer_norm_epsilon", 1e-5),
        activation="gelu_tanh",
        parts=_parts("blk.0.ffn_up.bias" in tensors),
    )


def _parts(has_bias: bool) -> LayerParts:
    return LayerParts(qkv_bias=has_bias, o_bias=has_bias, mlp_bias=has_bias, norm="layer", is_gated=False)


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    naming=_NAMING,
)
