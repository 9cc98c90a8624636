"""Phi-3 and Phi-4-mini: fused projections in the file, long rotary factors, windows, partial rotation."""

from collections.abc import Mapping
from typing import Any

from xjax.models.decoder import Config, read_gguf, read_hf
from xjax.models.family import Family
from xjax.models.naming import Naming
from xjax.models.rope_settings import long_from_gguf, rope_dim_from_gguf
from xjax.models.settings import Settings

_NAMING = Naming(
    hf={"attention.qkv": "self_attn.qkv_proj.weight", "feed_forward.gate_up": "mlp.gate_up_proj.weight"},
    gguf={"attention.qkv": "attn_qkv.weight", "feed_forward.gate_up": "ffn_up.weight"},
)


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json."""
    get = Settings({"original_max_position_embeddings": 4096, **values}, "config.json")
    windows = get.windows_of_all(get.num_layers("num_hidden_layers"))
    return read_hf(get, windows=windows, is_partial=True)


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata; the long factors are tensors."""
    get = Settings(values, "GGUF metadata", "phi3.")
    default = max(get.integer("embedding_length") // get.integer("attention.head_count"), 1)
    dim = rope_dim_from_gguf(get, get.head_dim("attention.key_length", default))
    window = get.integer("attention.sliding_window", 0, low=0) or None
    rope = long_from_gguf(get, tensors, dim=dim, theta=10000.0)
    windows = (window,) * get.num_layers("block_count")
    return read_gguf(get, tensors, rope=rope, windows=windows, is_partial=True)


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    naming=_NAMING,
)
