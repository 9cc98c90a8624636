"""A family that computes nothing, for what does not depend on the model; it compiles in a second."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from xjax.config import CacheSpec, PagedLayer
from xjax.engine.build import Model


@dataclass(frozen=True)
class Config:
    """As much as the engine asks of a config."""

    num_layers: int = 2
    embed_dim: int = 8
    ffn_dim: int = 8
    num_heads: int = 1
    head_dim: int = 8
    vocab_size: int = 96
    max_context: int = 512


class NullFamily:
    """The next token is the last one plus one."""

    name = "null"

    def cache_spec(self, config: Config) -> CacheSpec:
        """A page group of small layers."""
        return (PagedLayer(1, config.head_dim),) * config.num_layers

    def for_length(self, config: Config, length: int) -> Config:
        """Of the context alone."""
        return replace(config, max_context=length)

    def forward(self, params: Any, config: Config, state: Any, batch: Any, *, wanted: Any = None) -> Any:
        """Hidden states that hold the token id."""
        hidden = batch.token_id[:, None].astype(jnp.float32) + params[0][None, :1]
        return hidden if wanted is None else hidden[wanted], state

    def logits(
        self, params: Any, config: Config, hidden: jax.Array, *, backend: str = "xla", mesh: Any = None
    ) -> jax.Array:
        """Highest at the successor of the token id."""
        ids = jnp.arange(config.vocab_size, dtype=jnp.float32)[None, :]
        return -jnp.square(ids - (hidden + 1) % config.vocab_size)


def null_model(**config: Any) -> Model:
    """The family with parameters of zero."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = jax.device_put((jnp.zeros(8), jnp.zeros(8)), sharding)
    return Model(NullFamily(), Config(**config), params, jnp.dtype("float32"))
