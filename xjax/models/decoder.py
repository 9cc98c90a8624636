"""The decoder that most families are: their files only say how its parts are set.

    embed (x scale) -> layers, each with its window and rotary base -> norm -> head (x scale, soft cap)

`Config` describes all of it; `read_hf` and `read_gguf` read what every checkpoint calls alike. A
family whose layers are of another kind writes a forward pass of its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh

from xjax.config import CacheSpec, PagedLayer, page_groups
from xjax.errors import LoadError
from xjax.kernels.activation import ACTIVATIONS
from xjax.kernels.norm import norm
from xjax.models import layers
from xjax.models.experts import Experts, read_gguf_experts
from xjax.models.layers import LayerConfig, LayerParts, Params
from xjax.models.layout import Layout
from xjax.models.rope import Rope, angles
from xjax.models.rope_settings import factors_from_gguf, rope_dim_from_gguf, rope_from_gguf, rope_from_hf
from xjax.models.settings import Settings, check_heads, short
from xjax.state.batch import Batch
from xjax.state.kv import EngineState

_MAX_COUNT = 1 << 30  # of anything; it has to fit into the positions' int32


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that shapes a decoder.

    windows          one for each layer, its width or None for full attention; empty: all full
    rope             of full layers; of window layers too where local_rope is None
    query_scale      what attention scores are multiplied by; None: head_dim ** -0.5
    embed_scale      what embeddings are multiplied by, in the model dtype; None: nothing
    residual_scale   what each half is multiplied by before it is added
    logit_scale      what logits are multiplied by, before final_soft_cap
    parts            which optional parts a layer has
    experts          None: every layer has an ordinary feed-forward
    layout           how fused weights lie for the devices that share the model
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
    local_rope: Rope | None = None
    windows: tuple[int | None, ...] = ()
    query_scale: float | None = None
    embed_scale: float | None = None
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    soft_cap: float | None = None
    final_soft_cap: float | None = None
    activation: str = "silu"
    parts: LayerParts = field(default_factory=LayerParts)
    experts: Experts | None = None
    layout: Layout = field(default_factory=Layout)

    def __post_init__(self) -> None:
        """Refuse what no reader makes: a converted model brings a config that an other version wrote."""
        counts = (self.num_layers, self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim)
        counts += (self.ffn_dim, self.vocab_size, self.max_context)
        counts += tuple(window for window in self.windows if window is not None)
        numbers = (self.norm_eps, self.query_scale, self.embed_scale, self.residual_scale, self.logit_scale)
        numbers += (self.soft_cap, self.final_soft_cap)
        if not all(1 <= count <= _MAX_COUNT for count in counts) or self.num_heads % self.num_kv_heads:
            raise LoadError("sizes or heads are out of range")
        if not all(number is None or 0 < number < math.inf for number in numbers):
            raise LoadError("a scale, cap or epsilon is not above 0")
        if self.activation not in ACTIVATIONS:
            raise LoadError(f"activation {self.activation!r} is unknown")
        if len(self.windows) not in (0, self.num_layers):
            raise LoadError(f"{len(self.windows)} windows for {self.num_layers} layers")
        if any(rope.dim > self.head_dim for rope in (self.rope, self.local_rope) if rope is not None):
            raise LoadError("more dimensions of a head are rotated than there are")
        if not all(0 <= i < self.num_layers for i in (self.experts.dense_layers if self.experts else ())):
            raise LoadError(f"layers without experts must lie in 0 to {self.num_layers - 1}")

    @property
    def layer_experts(self) -> tuple[Experts | None, ...]:
        """The experts of each layer's feed-forward."""
        dense = range(self.num_layers) if self.experts is None else self.experts.dense_layers
        return tuple(None if i in dense else self.experts for i in range(self.num_layers))

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer; one as wide as the whole context is none."""
        windows = self.windows or (None,) * self.num_layers
        return tuple(None if window is None or window >= self.max_context else window for window in windows)

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """Which layers use `local_rope`."""
        return tuple(window is not None for window in self.windows) or (False,) * self.num_layers


def read_hf(
    get: Settings,
    *,
    theta: float = 10000.0,
    norm_eps: str = "rms_norm_eps",
    is_partial: bool = False,
    **fields: Any,
) -> Config:
    """Read what config.json files call alike; `fields` win over what is read.

    theta        of the rotary embedding where the file has none
    norm_eps     key of the norms' epsilon
    is_partial   whether the family reads partial_rotary_factor; others have it without meaning it
    """
    embed_dim, num_heads = get.integer("hidden_size"), get.integer("num_attention_heads")
    num_kv_heads = get.integer("num_key_value_heads", num_heads)
    head_dim = get.head_dim("head_dim", max(embed_dim // num_heads, 1))
    check_heads(get.source, num_heads, num_kv_heads)
    scaling = get.table("rope_parameters") or get.table("rope_scaling")
    max_context = get.integer("max_position_embeddings", 2048)
    found: dict[str, Any] = {
        "num_layers": get.num_layers("num_hidden_layers"),
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "ffn_dim": get.integer("intermediate_size"),
        "vocab_size": get.integer("vocab_size"),
        "max_context": max_context,
        "norm_eps": get.number(norm_eps, 1e-6),
        "tied": get.flag("tie_word_embeddings", False),
        "activation": get.activation("hidden_act", default="silu"),
    }
    if "rope" not in fields:
        share = (scaling or {}).get("partial_rotary_factor", get.values.get("partial_rotary_factor"))
        if not is_partial and share not in (None, 1, 1.0):
            raise LoadError(f"{get.source}: partial_rotary_factor is not supported for this architecture")
        found["rope"] = rope_from_hf(
            scaling,
            dim=_rope_dim(get, head_dim, share),
            theta=get.number("rope_theta", theta),
            context=max_context,
            original=get.optional_integer("original_max_position_embeddings"),
        )
    return Config(**(found | fields))


def _rope_dim(get: Settings, head_dim: int, share: object) -> int:
    if share is None:
        return head_dim
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        wanted = "must be above 0 and at most 1"
        raise LoadError(f"{get.source}: partial_rotary_factor {wanted}, not {short(share)}")
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise LoadError(f"{get.source}: partial_rotary_factor {share} of {head_dim} must be an even size")
    return dim


def read_gguf(
    get: Settings,
    tensors: Mapping[str, Any],
    *,
    theta: float = 10000.0,
    is_partial: bool = False,
    normalizes: bool | None = None,
    **fields: Any,
) -> Config:
    """Read what GGUF metadata calls alike, and off the tensors what it does not say; `fields` win.

    theta        of the rotary embedding where the file has none
    is_partial   whether a family may rotate only some dimensions of a head
    normalizes   whether weights of experts sum to one where the file does not say; None: no experts
    """
    embed_dim, num_heads = get.integer("embedding_length"), get.integer("attention.head_count")
    num_kv_heads = get.integer("attention.head_count_kv", num_heads)
    head_dim = get.head_dim("attention.key_length", max(embed_dim // num_heads, 1))
    has_experts = get.integer("expert_count", 0, low=0) > 0
    if has_experts and normalizes is None:
        raise LoadError(f"{get.source}: {get.prefix}expert_count is not 0; this architecture has no experts")
    check_heads(get.source, num_heads, num_kv_heads)
    rope_dim = rope_dim_from_gguf(get, head_dim)
    if rope_dim != head_dim and not is_partial:
        raise LoadError(f"{get.source}: {get.prefix}rope.dimension_count must be the head size, {head_dim}")
    embed = tensors.get("token_embd.weight")
    if embed is not None and len(embed.shape) != 2:
        raise LoadError(f"{get.source}: tensor token_embd.weight must be a matrix, found {embed.shape}")
    parts = LayerParts(
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
    )
    found: dict[str, Any] = {
        "num_layers": get.num_layers("block_count"),
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "ffn_dim": get.integer("feed_forward_length"),
        "vocab_size": embed.shape[0] if embed is not None else get.integer("vocab_size"),
        "max_context": get.integer("context_length"),
        "tied": "output.weight" not in tensors,
        "parts": parts,
    }
    if has_experts and normalizes is not None:
        found["experts"] = read_gguf_experts(get, tensors, found["num_layers"], normalizes=normalizes)
    if "norm_eps" not in fields:
        found["norm_eps"] = get.number("attention.layer_norm_rms_epsilon", 1e-6)
    if "rope" not in fields:
        found["rope"] = _gguf_rope(get, rope_dim, tensors, theta)
    return Config(**(found | fields))


def _gguf_rope(get: Settings, dim: int, tensors: Mapping[str, Any], theta: float) -> Rope:
    if "rope_factors_long.weight" in tensors:
        raise LoadError(f"{get.source}: long rotary factors are not supported for this architecture")
    if "rope_freqs.weight" not in tensors:
        return rope_from_gguf(get, dim=dim, theta=theta)
    return factors_from_gguf(get, tensors["rope_freqs.weight"], dim=dim, theta=theta)


def for_length(config: Config, length: int) -> Config:
    """Settle what goes by the longest sequence that an engine runs: rotary frequencies, windows as wide.

    Raises LoadError where the model cannot take so many tokens.
    """
    ropes = {"rope": config.rope, "local_rope": config.local_rope}
    longest = max(config.max_context, *(rope.reach for rope in ropes.values() if rope is not None))
    if length > longest:
        raise LoadError(f"--max-model-len {length} is above the model's context, {longest}")
    ropes = {name: None if rope is None else rope.for_length(length) for name, rope in ropes.items()}
    return replace(config, max_context=length, **ropes)


def cache_spec(config: Config) -> CacheSpec:
    """Window layers let pages behind their window go."""
    return tuple(PagedLayer(config.num_kv_heads, config.head_dim, window) for window in config.layer_windows)


def specs(config: Config) -> Params:
    """Describe every parameter with a ParamSpec."""
    all_layers = tuple(
        layers.layer_specs(_layer_config(config, None, experts), config.embed_dim, config.ffn_dim)
        for experts in config.layer_experts
    )
    return layers.decoder_specs(
        all_layers, config.vocab_size, config.embed_dim,
        tied=config.tied, has_norm_bias=config.parts.norm == "layer",
    )  # fmt: skip


def _layer_config(config: Config, window: int | None, experts: Experts | None) -> LayerConfig:
    scale = config.query_scale
    return LayerConfig(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        scale=config.head_dim**-0.5 if scale is None else scale,
        activation=config.activation,
        window=window,
        soft_cap=config.soft_cap,
        residual_scale=config.residual_scale,
        parts=config.parts,
        experts=experts,
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
    rope = local_rope = angles(config.rope, batch.rope_position)
    if config.local_rope is not None:
        local_rope = angles(config.local_rope, batch.rope_position)
    kv, outputs = [], []
    last = len(params.layers) - 1
    windows, is_local, experts = config.layer_windows, config.local_layers, config.layer_experts
    for i, (layer, pages) in enumerate(zip(params.layers, state.kv, strict=True)):
        window = windows[i]
        turn, layer_config = local_rope if is_local[i] else rope, _layer_config(config, window, experts[i])
        x, pages = layers.decoder_layer(
            layer, pages, x, paging[window], turn, config=layer_config, wanted=wanted if i == last else None
        )
        kv.append(pages)
        outputs.append(x)
    hidden = norm(x, params.norm, params.norm_bias, config.norm_eps, backend=batch.backend)
    state = replace(state, kv=tuple(kv))
    return (hidden, state, tuple(outputs)) if trace else (hidden, state)


def logits(
    params: Params, config: Config, hidden: jax.Array, *, backend: str = "xla", mesh: Mesh | None = None
) -> jax.Array:
    """Score every word.

    hidden   [J, E]   model dtype, as `forward` returns it
    mesh     devices that share the model, or None; each gets all scores
    returns  [J, V]   float32
    """
    scale, cap = config.logit_scale, config.final_soft_cap
    return layers.head_logits(params, hidden, scale=scale, soft_cap=cap, backend=backend, mesh=mesh)
