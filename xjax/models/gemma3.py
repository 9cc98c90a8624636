"""Gemma 3, the text model: windows on five layers of six, each kind with a rotary base of its own.

Halves are normed before and after, norm weights count from one, queries and keys are normed per
head, embeddings are scaled by the root of their size. A checkpoint with a vision tower is read
for its text model alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from xjax.config import CacheSpec, PagedLayer, page_groups
from xjax.errors import LoadError
from xjax.models import layers
from xjax.models.layers import LayerConfig, Params
from xjax.models.rope import Rope, angles, rope_from_gguf, rope_from_hf
from xjax.models.settings import Settings, check_heads
from xjax.state.batch import Batch
from xjax.state.kv import EngineState
from xjax.state.mesh import abstract_params, init_params, param_shardings

HF_NAMES: Mapping[str, str] = {
    "attention.post_norm": "post_attention_layernorm.weight",
    "feed_forward.norm": "pre_feedforward_layernorm.weight",
    "feed_forward.post_norm": "post_feedforward_layernorm.weight",
}
GGUF_NAMES: Mapping[str, str] = {}
HF_NORM_OFFSET: float = 1.0
GGUF_PAIRED_ROPE: bool = False

_LOCAL_THETA = 10000.0  # GGUF files do not hold it
_WINDOW_PATTERN = 6  # every sixth layer sees everything


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that shapes a Gemma 3.

    windows        one for each layer: its width, or None for full attention
    rope           of full layers        local_rope   of window layers
    query_scale    what attention scores are multiplied by
    embed_scale    what embeddings are multiplied by
    """

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
    local_rope: Rope
    windows: tuple[int | None, ...]
    query_scale: float
    embed_scale: float
    activation: str = "gelu_tanh"
    qkv_bias: bool = False
    o_bias: bool = False
    final_soft_cap: float | None = None


def config_from_hf(values: Mapping[str, Any]) -> Config:
    """Read a config.json, or its `text_config` where the model has more than text."""
    nested = Settings(values, "config.json").table("text_config")
    get = Settings(nested if nested is not None else values, "config.json")
    num_layers, head_dim = get.num_layers("num_hidden_layers", 26), get.integer("head_dim", 256)
    num_heads, num_kv_heads = get.integer("num_attention_heads", 8), get.integer("num_key_value_heads", 4)
    check_heads("config.json", num_heads, num_kv_heads, head_dim)
    embed_dim, attention_bias = get.integer("hidden_size", 2304), get.flag("attention_bias", False)
    if get.optional_number("attn_logit_softcapping") is not None or get.flag(
        "use_bidirectional_attention", False
    ):
        raise LoadError(
            "config.json: Gemma 3 with attention soft caps or bidirectional attention is not supported"
        )
    rope, local_rope = _hf_ropes(get, head_dim)
    return Config(
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_dim=get.integer("intermediate_size", 9216),
        vocab_size=get.integer("vocab_size", 262208),
        max_context=get.integer("max_position_embeddings", 131072),
        norm_eps=get.number("rms_norm_eps", 1e-6),
        tied=get.flag("tie_word_embeddings", True),
        rope=rope,
        local_rope=local_rope,
        windows=_hf_windows(get, num_layers),
        query_scale=get.number("query_pre_attn_scalar", 256) ** -0.5,
        embed_scale=math.sqrt(embed_dim),
        activation=get.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        final_soft_cap=get.optional_number("final_logit_softcapping"),
    )


def _hf_ropes(get: Settings, head_dim: int) -> tuple[Rope, Rope]:
    """Read both rotary settings, in the flat form or the one nested by layer kind."""
    nested = get.table("rope_parameters")
    if nested is not None and "full_attention" in nested:
        both = Settings(nested, "config.json")
        return (
            rope_from_hf(both.table("full_attention"), dim=head_dim, theta=1e6),
            rope_from_hf(both.table("sliding_attention"), dim=head_dim, theta=_LOCAL_THETA),
        )
    rope = rope_from_hf(
        nested or get.table("rope_scaling"), dim=head_dim, theta=get.number("rope_theta", 1e6)
    )
    return rope, Rope(head_dim, get.number("rope_local_base_freq", _LOCAL_THETA))


def _hf_windows(get: Settings, num_layers: int) -> tuple[int | None, ...]:
    window, kinds = get.integer("sliding_window", 4096), get.values.get("layer_types")
    if kinds is None:
        return _windows(num_layers, window, get.integer("sliding_window_pattern", _WINDOW_PATTERN))
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
        kinds_text = " or ".join(known)
        raise LoadError(f"config.json: layer_types must name {kinds_text} {num_layers} times")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _windows(num_layers: int, window: int, pattern: int) -> tuple[int | None, ...]:
    return tuple(None if (i + 1) % pattern == 0 else window for i in range(num_layers))


def config_from_gguf(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    """Read GGUF metadata; the local rotary base and the window pattern are the family's own."""
    get = Settings(values, "GGUF metadata", "gemma3.")
    num_layers, head_dim = get.num_layers("block_count"), get.integer("attention.key_length", 256)
    num_heads = get.integer("attention.head_count")
    num_kv_heads = get.integer("attention.head_count_kv", num_heads)
    check_heads("GGUF metadata", num_heads, num_kv_heads, head_dim)
    embed_dim, embed = get.integer("embedding_length"), tensors.get("token_embd.weight")
    return Config(
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_dim=get.integer("feed_forward_length"),
        vocab_size=embed.shape[0] if embed is not None else get.integer("vocab_size"),
        max_context=get.integer("context_length"),
        norm_eps=get.number("attention.layer_norm_rms_epsilon", 1e-6),
        tied="output.weight" not in tensors,
        rope=rope_from_gguf(get, dim=head_dim, theta=1e6),
        local_rope=Rope(head_dim, get.number("rope.freq_base_swa", _LOCAL_THETA)),
        windows=_windows(num_layers, get.integer("attention.sliding_window"), _WINDOW_PATTERN),
        query_scale=_gguf_query_scale(num_layers, embed_dim, num_heads, head_dim),
        embed_scale=math.sqrt(embed_dim),
        final_soft_cap=get.optional_number("final_logit_softcapping"),
    )


def _gguf_query_scale(num_layers: int, embed_dim: int, num_heads: int, head_dim: int) -> float:
    """Return the scale of scores, which the file does not hold: the 27B model's differs from the rest."""
    is_27b = num_layers == 62
    return (embed_dim / num_heads if is_27b else head_dim) ** -0.5


def cache_spec(config: Config) -> CacheSpec:
    """Window layers let pages behind their window go."""
    return tuple(PagedLayer(config.num_kv_heads, config.head_dim, window) for window in config.windows)


def specs(config: Config) -> Params:
    """Describe every parameter with a ParamSpec."""
    layer = layers.layer_specs(
        _layer_config(config, None), config.embed_dim, config.ffn_dim,
        qkv_bias=config.qkv_bias, o_bias=config.o_bias, qk_norm=True, post_norms=True,
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


def _layer_config(config: Config, window: int | None) -> LayerConfig:
    return LayerConfig(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        scale=config.query_scale,
        activation=config.activation,
        window=window,
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
    x = layers.embed_tokens(params.embed, batch, config.embed_scale)
    groups = page_groups(cache_spec(config))
    paging = {group.window: layers.paging_of(batch, g) for g, group in enumerate(groups)}
    rope, local_rope = (
        angles(config.rope, batch.rope_position),
        angles(config.local_rope, batch.rope_position),
    )
    kv, outputs = [], []
    last = len(params.layers) - 1
    for i, (layer, pages, window) in enumerate(zip(params.layers, state.kv, config.windows, strict=True)):
        turn, layer_config = rope if window is None else local_rope, _layer_config(config, window)
        x, pages = layers.decoder_layer(
            layer, pages, x, paging[window], turn, config=layer_config, wanted=wanted if i == last else None
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
    return layers.head_logits(params, hidden, soft_cap=config.final_soft_cap, backend=backend)
