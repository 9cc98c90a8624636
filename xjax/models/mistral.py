"""Mistral: Llama's layers, with windows on all in the first models, on some in Ministral."""

from collections.abc import Mapping
from typing import Any

from xjax.models.decoder import Config, read_hf
from xjax.models.family import Family
from xjax.models.llama import config_from_gguf
from xjax.models.naming import Naming
from xjax.models.settings import Settings

_NAMING = Naming(gguf_pairs=True)


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json; without `layer_types` a window is every layer's."""
    get = Settings(values, "config.json")
    return read_hf(get, windows=get.windows_of_all(get.num_layers("num_hidden_layers")))


FAMILY = Family(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    naming=_NAMING,
)
