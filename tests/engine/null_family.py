"""Families that compute next to nothing, for what does not depend on the model; they compile in a second."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from xjax.config import CacheSpec, PagedLayer, RecurrentLayer
from xjax.engine.build import Model
from xjax.kernels import pages
from xjax.kernels.pages.xla import gather


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


class RecurrentFamily(NullFamily):
    """Each token changes numbers that are carried along; the next one is told by these and by all pages.

    So one that is lost, stale or another's, or a page, changes every later token. `by_hand` is the rule.
    """

    name = "recurrent"

    def cache_spec(self, config: Config) -> CacheSpec:
        """A layer with pages between two recurrent ones."""
        conv = RecurrentLayer(1, 1, 1, conv_channels=1, conv_width=2)
        return (conv, PagedLayer(1, config.head_dim), RecurrentLayer(2, 1, 1))

    def forward(self, params: Any, config: Config, state: Any, batch: Any, *, wanted: Any = None) -> Any:
        """Walk through the tokens one by one, each row with its own numbers, and then over its pages."""
        first, paged, last = state.recurrent[0], state.kv[1], state.recurrent[2]
        read, write = batch.recurrent_read, batch.recurrent_write
        carried = (first.s[read, 0, 0, 0], first.conv[read, 0, 0], last.s[read, 1, 0, 0])

        def advance(carried: Any, token: Any) -> Any:
            token_id, position, row = token
            number, before, count = (part[row] for part in carried)
            found = (31 * number + token_id + 7 * before + count + 1) % config.vocab_size
            after = (found, token_id, (count + 1) % 17)
            is_real = position >= 0
            carried = tuple(
                part.at[row].set(jnp.where(is_real, new, part[row]))
                for part, new in zip(carried, after, strict=True)
            )
            return carried, carried[0][row]

        tokens = (batch.token_id.astype(jnp.float32), batch.position, batch.row_of)
        carried, numbers = jax.lax.scan(advance, carried, tokens)
        first = replace(
            first,
            s=first.s.at[write, 0, 0, 0].set(carried[0]),
            conv=first.conv.at[write, 0, 0].set(carried[1]),
        )
        last = replace(last, s=last.s.at[write, 1, 0, 0].set(carried[2]))
        values = jnp.broadcast_to(numbers[:, None, None], (len(numbers), 1, config.head_dim))
        paged = replace(
            paged,
            **dict(zip("kv", pages.write(paged.k, paged.v, values, values, batch.write[0]), strict=True)),
        )
        seen = gather(paged.v, batch.table[0])[:, 0, :, -1][batch.row_of]
        is_seen = jnp.arange(seen.shape[1])[None, :] <= batch.position[:, None]
        total = jnp.where(is_seen, seen, 0).sum(axis=1) % config.vocab_size
        hidden = ((numbers + total) % config.vocab_size)[:, None] + params[0][None, :1]
        state = replace(state, recurrent=(first, None, last), kv=(None, paged, None))
        return hidden if wanted is None else hidden[wanted], state

    def logits(
        self, params: Any, config: Config, hidden: jax.Array, *, backend: str = "xla", mesh: Any = None
    ) -> jax.Array:
        """Highest at the hidden number."""
        return -jnp.square(jnp.arange(config.vocab_size, dtype=jnp.float32)[None, :] - hidden)


def recurrent_model() -> Model:
    """The family that carries numbers along."""
    model = null_model(max_context=160)
    return Model(RecurrentFamily(), model.config, model.params, model.dtype)


def by_hand(prompt: list[int], count: int, vocab_size: int = 96) -> list[int]:
    """What a prompt is answered with."""
    number = before = num_seen = total = 0
    tokens, place = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        for token in tokens[place:]:
            number = (31 * number + token + 7 * before + num_seen + 1) % vocab_size
            before, num_seen, total = token, (num_seen + 1) % 17, total + number
        place = len(tokens)
        tokens.append((number + total) % vocab_size)
    return tokens[len(prompt) :]
