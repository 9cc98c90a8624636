"""Mixtral: Llama's layers with experts; the weights of those picked sum to one."""

from collections.abc import Mapping
from typing import Any

from xjax.models.decoder import Config, read_hf
from xjax.models.experts import read_hf_experts
from xjax.models.family import Family
from xjax.models.llama import config_from_gguf
from xjax.models.naming import Naming
from xjax.models.settings import Settings

_NAMING = Naming(
    hf={
        "feed_forward.router": "block_sparse_moe.gate.weight",
        "feed_forward.experts.gate_up": (
            "block_sparse_moe.experts.{}.w1.weight",
            "block_sparse_moe.experts.{}.w3.weight",
        ),
        "feed_forward.experts.down": "block_sparse_moe.experts.{}.w2.weight",
    },
    gguf_pairs=True,
)


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json."""
    get = Settings(values, "config.json")
    experts = read_hf_experts(
        get, num_experts="num_local_experts", ffn_dim="intermediate_size", normalizes=True
    )
    windows = get.windows_of_all(get.num_layers("num_hidden_layers"))
    return read_hf(get, windows=windows, experts=experts, theta=1e6)


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    naming=_NAMING,
)
