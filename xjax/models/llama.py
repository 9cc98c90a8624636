"""Llama: Llama 2 and 3, SmolLM2 and what else has their shape.

Pre-norm halves, SiLU-gated feed-forward, grouped kv heads, rotary embedding with default, linear
or llama3 scaling; biases and a head of its own are optional.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from xjax.config import CacheSpec, PagedLayer
from xjax.errors import LoadError
from xjax.models import layers
from xjax.models.layers import LayerConfig, Params
from xjax.models.rope import Rope, angles, rope_from_gguf, rope_from_hf
from xjax.models.settings import Settings, check_heads
from xjax.state.batch import Batch
from xjax.state.kv import EngineState
from xjax.state.mesh import abstract_params, init_params, param_shardings

HF_NAMES: Mapping[str, str] = {}  # how the checkpoint's names differ from weights.names
GGUF_NAMES: Mapping[str, str] = {}
HF_NORM_OFFSET: float = 0.0  # added to norm weights of a Hugging Face folder
GGUF_PAIRED_ROPE: bool = True  # q and k rows lie in neighbouring pairs in a GGUF


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that shapes a Llama."""

    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_context: int
    norm_eps: float
    tied: bool
    rope: Rope
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json; raises LoadError naming the key that is missing or wrong."""
    get = Settings(values, "config.json")
    embed_dim, num_heads = get.integer("hidden_size"), get.integer("num_attention_heads")
    num_kv_heads = get.integer("num_key_value_heads", num_heads)
    head_dim = get.integer("head_dim", embed_dim // num_heads)
    check_heads("config.json", num_heads, num_kv_heads, head_dim)
    attention_bias = get.flag("attention_bias", False)
    scaling = get.table("rope_parameters") or get.table("rope_scaling")
    return Config(
        num_layers=get.num_layers("num_hidden_layers"),
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_dim=get.integer("intermediate_size"),
        vocab_size=get.integer("vocab_size"),
        max_context=get.integer("max_position_embeddings", 2048),
        norm_eps=get.number("rms_norm_eps", 1e-6),
        tied=get.flag("tie_word_embeddings", False),
        rope=rope_from_hf(scaling, dim=head_dim, theta=get.number("rope_theta", 10000.0)),
        activation=get.activation("hidden_act", default="silu"),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=get.flag("mlp_bias", False),
    )


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata; what the metadata does not say is read off the tensors that are there."""
    get = Settings(values, "GGUF metadata", "llama.")
    embed_dim, num_heads = get.integer("embedding_length"), get.integer("attention.head_count")
    num_kv_heads = get.integer("attention.head_count_kv", num_heads)
    head_dim = get.integer("attention.key_length", embed_dim // num_heads)
    if get.integer("expert_count", 0, low=0):
        raise LoadError("GGUF metadata: llama.expert_count is not 0; experts are not supported")
    check_heads("GGUF metadata", num_heads, num_kv_heads, head_dim)
    if get.integer("rope.dimension_count", head_dim) != head_dim:
        raise LoadError(f"GGUF metadata: llama.rope.dimension_count must be the head size, {head_dim}")
    embed = tensors.get("token_embd.weight")
    return Config(
        num_layers=get.num_layers("block_count"),
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_dim=get.integer("feed_forward_length"),
        vocab_size=embed.shape[0] if embed is not None else get.integer("vocab_size"),
        max_context=get.integer("context_length"),
        norm_eps=get.number("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in tensors,
        rope=_gguf_rope(get, head_dim, tensors),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
    )


def _gguf_rope(get: Settings, head_dim: int, tensors: Mapping[str, Any]) -> Rope:
    if "rope_freqs.weight" not in tensors:
        return rope_from_gguf(get, dim=head_dim, theta=10000.0)
    factors = tuple(float(x) for x in tensors["rope_freqs.weight"].read().reshape(-1))
    if len(factors) != head_dim // 2:
        raise LoadError(f"rope_freqs.weight: expected {head_dim // 2} factors, found {len(factors)}")
    return Rope(head_dim, get.number("rope.freq_base", 10000.0), "factors", factors=factors)


def cache_spec(config: Config) -> CacheSpec:
    """Every layer keeps all its pages."""
    return (PagedLayer(config.num_kv_heads, config.head_dim),) * config.num_layers


def specs(config: Config) -> Params:
    """Describe every parameter with a ParamSpec."""
    layer = layers.layer_specs(
        _layer_config(config), config.embed_dim, config.ffn_dim,
        qkv_bias=config.qkv_bias, o_bias=config.o_bias, mlp_bias=config.mlp_bias,
    )  # fmt: skip
    all_layers = (layer,) * config.num_layers
    return layers.decoder_specs(all_layers, config.vocab_size, config.embed_dim, tied=config.tied)


def abstract(config: Config, dtype: jnp.dtype) -> Params:
    """Describe the parameters with ShapeDtypeStructs."""
    return abstract_params(specs(config), dtype)


def shardings(config: Config, mesh: Mesh) -> Params:
    """Give each parameter its sharding."""
    return param_shardings(specs(config), mesh)


def init(key: jax.Array, config: Config, dtype: jnp.dtype) -> Params:
    """Draw random parameters.

    key   []   a jax.random key
    """
    return init_params(key, specs(config), dtype)


def _layer_config(config: Config) -> LayerConfig:
    return LayerConfig(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        scale=config.head_dim**-0.5,
        activation=config.activation,
    )


def forward(
    params: Params,
    config: Config,
    state: EngineState,
    batch: Batch,
    *,
    wanted: jax.Array | None = None,
    trace: bool = False,
) -> Any:
    """Run the tokens of a step through every layer, reading and writing the pages of `state`.

    wanted   [J] int32 tokens whose hidden states are wanted, None for all: the last layer's
             work is then done for these alone
    returns  hidden [N, E] or [J, E] in the model dtype, after the final norm, and the new state;
             with `trace` also a tuple of each layer's output
    """
    x = layers.embed_tokens(params.embed, batch)
    paging, rope = layers.paging_of(batch, 0), angles(config.rope, batch.rope_position)
    layer_config, kv, outputs = _layer_config(config), [], []
    last = len(params.layers) - 1
    for i, (layer, pages) in enumerate(zip(params.layers, state.kv, strict=True)):
        x, pages = layers.decoder_layer(
            layer, pages, x, paging, rope, config=layer_config, wanted=wanted if i == last else None
        )
        kv.append(pages)
        outputs.append(x)
    hidden, state = layers.rms_norm(x, params.norm, config.norm_eps), replace(state, kv=tuple(kv))
    return (hidden, state, tuple(outputs)) if trace else (hidden, state)


def logits(params: Params, config: Config, hidden: jax.Array, *, backend: str = "xla") -> jax.Array:
    """Score every word.

    hidden   [J, E]   model dtype, as `forward` returns it
    returns  [J, V]   float32
    """
    return layers.head_logits(params, hidden, backend=backend)
