"""The pieces that decoder-only models are made of, half a layer at a time.

    attention half     norm -> qkv -> (q/k norm) -> rope -> write pages -> attend -> o -> (norm) -> add
    feed-forward half  norm -> gate/up -> activation -> down -> (norm) -> add

A half is the unit that a backend may later replace as a whole. The parameter classes describe what
all families share; a part that a family lacks is None. Norm weights are kept as the factor itself
in float32. Nothing here knows a checkpoint's names or a family's quirks.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from xjax.errors import LoadError
from xjax.kernels import attention, chain, head, pages, qkv
from xjax.kernels.activation import activate
from xjax.kernels.norm import norm
from xjax.models.chains import first_of, norm_of, second_of
from xjax.models.experts import Experts, ExpertsParams, experts_specs, gate_shards, mix
from xjax.state.batch import NO_POSITION, Batch
from xjax.state.kv import LayerKV
from xjax.state.mesh import ParamSpec, joined, on_shards, whole
from xjax.state.packed import PackedArray, look_up
from xjax.state.quantized import Codes, Weight, matmul


@struct.dataclass
class AttentionParams:
    """Weights of an attention half; U = K * (H / K + 2) * D.

    norm            [E]         float32, or None
    qkv             [U, E]      for each kv head: its query heads, its key, its value
    o               [E, H * D]
    qkv_bias        [U]         or None
    o_bias          [E]         or None
    q_norm, k_norm  [D]         float32, or None; of all heads together [H * D] and [K * D]
    post_norm       [E]         float32, or None
    norm_bias       [E]         float32, or None
    """

    norm: jax.Array | None
    qkv: Weight
    o: Weight
    qkv_bias: jax.Array | None = None
    o_bias: jax.Array | None = None
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    post_norm: jax.Array | None = None
    norm_bias: jax.Array | None = None


@struct.dataclass
class FeedForwardParams:
    """Weights of a feed-forward half.

    norm           [E]        float32, or None
    gate_up        [2 * F, E] the gate's rows, then the other's; [F, E] where nothing is gated
    down           [E, F]
    gate_up_bias   [2 * F]    or None
    down_bias      [E]        or None
    post_norm      [E]        float32, or None
    norm_bias      [E]        float32, or None
    """

    norm: jax.Array | None
    gate_up: Weight
    down: Weight
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    post_norm: jax.Array | None = None
    norm_bias: jax.Array | None = None


@struct.dataclass
class LayerParams:
    """Both halves of a layer."""

    attention: AttentionParams
    feed_forward: FeedForwardParams | ExpertsParams


@struct.dataclass
class Params:
    """A whole decoder.

    embed       [V, E]
    layers      LayerParams, one a layer
    norm        [E]      float32
    head        [V, E]   or None: the embedding is used (tied)
    norm_bias   [E]      float32, or None
    """

    embed: Weight
    layers: tuple[LayerParams, ...]
    norm: jax.Array
    head: Weight | None = None
    norm_bias: jax.Array | None = None


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """Which optional parts a layer has.

    norm         "rms", or "layer": subtracts the mean and has a bias
    qk_norm      norms of queries and keys: None, by "head", or of all heads as a "whole"
    pre_norms    norms in front of both halves
    post_norms   norms behind both halves, before their results are added
    is_gated     a gate beside the feed-forward's first product
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm: str = "rms"
    qk_norm: str | None = None
    pre_norms: bool = True
    post_norms: bool = False
    is_gated: bool = True

    def __post_init__(self) -> None:
        if self.norm not in ("rms", "layer") or self.qk_norm not in (None, "head", "whole"):
            raise LoadError(f"norms {self.norm!r} with {self.qk_norm!r} of queries and keys are unknown")


@dataclass(frozen=True)
class LayerConfig:
    """What the body of a layer must know; layers with equal ones share one trace.

    scale            of the scores, before the soft cap
    window           tokens a token looks back on, itself counted; None for all
    activation       "silu", "gelu_tanh" or "gelu"
    residual_scale   what each half is multiplied by before it is added
    experts          of the feed-forward half, or None: it has none
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    scale: float
    activation: str
    window: int | None = None
    soft_cap: float | None = None
    residual_scale: float = 1.0
    parts: LayerParts = LayerParts()
    experts: Experts | None = None


@struct.dataclass
class Paging:
    """Where the tokens of a step read and write in one page group.

    write              [N]     int32
    table              [B, M]  int32
    row_of, position   [N]     int32
    """

    write: jax.Array
    table: jax.Array
    row_of: jax.Array
    position: jax.Array
    num_decode: int = struct.field(pytree_node=False)
    tile: int = struct.field(pytree_node=False)
    backend: str = struct.field(pytree_node=False)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    def only(self, wanted: jax.Array) -> "Paging":
        """Let some tokens read, each on its own as decodes do.

        wanted   [J] int32
        """
        return self.replace(  # pyright: ignore[reportAttributeAccessIssue]
            row_of=self.row_of[wanted], position=self.position[wanted], num_decode=wanted.shape[0]
        )


def paging_of(batch: Batch, group: int) -> Paging:
    """Take the part of a batch that layers of one page group read."""
    return Paging(
        batch.write[group], batch.table[group], batch.row_of, batch.position,
        batch.shape.num_decode, batch.shape.tile, batch.backend, batch.mesh,
    )  # fmt: skip


def _add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias[None, :]


def _add_residual(
    x: jax.Array, out: jax.Array, post_norm: jax.Array | None, config: LayerConfig, backend: str
) -> jax.Array:
    out = norm(out, post_norm, None, config.norm_eps, backend=backend)
    if config.residual_scale != 1.0:  # not rounded to a narrow dtype before it multiplies
        out = (out.astype(jnp.float32) * config.residual_scale).astype(out.dtype)
    return x + out


def attention_half(
    params: AttentionParams,
    kv: LayerKV,
    x: jax.Array,
    paging: Paging,
    rope: tuple[jax.Array, jax.Array],
    *,
    config: LayerConfig,
    wanted: jax.Array | None = None,
) -> tuple[jax.Array, LayerKV]:
    """Let each token attend to its sequence, itself included, and add what it found.

    x        [N, E]         model dtype
    rope     [N, D / 2]     float32, cosine and sine
    wanted   [J]            int32 tokens whose result is wanted, None for all; every token is written
    returns  [N, E] or [J, E], and the pages, which are updated in place under donation
    """
    product = functools.partial(matmul, backend=paging.backend, mesh=paging.mesh)
    first = first_of(params.qkv, paging.backend)
    if first is None:
        normed = norm(x, params.norm, params.norm_bias, config.norm_eps, backend=paging.backend)
        fused = product(normed, params.qkv)
    else:
        pre_norm = norm_of(params.norm, params.norm_bias)
        fused = chain.run(x, pre_norm, first, eps=config.norm_eps, backend=paging.backend)
    q, kv = _place(params, kv, fused, paging, rope, config)
    if wanted is not None:
        x, q, paging = x[wanted], q[wanted], paging.only(wanted)
    attend = functools.partial(
        attention.attend, num_decode=paging.num_decode, tile=paging.tile, scale=config.scale,
        window=config.window, soft_cap=config.soft_cap, backend=paging.backend,
    )  # fmt: skip
    out = on_shards(attend, paging.mesh, (1, 1, 1, None, None, None))(
        q, kv.k, kv.v, paging.table, paging.row_of, paging.position
    )
    out, first = out.reshape(x.shape[0], -1), first_of(params.o, paging.backend)
    if first is not None:
        finish = chain.Finish(x, params.o_bias, params.post_norm, config.residual_scale)
        return chain.run(out, None, first, None, finish, eps=config.norm_eps, backend=paging.backend), kv
    out = _add_bias(product(out, params.o, split=1), params.o_bias)
    return _add_residual(x, out, params.post_norm, config, paging.backend), kv


def _place(
    params: AttentionParams,
    kv: LayerKV,
    fused: jax.Array,
    paging: Paging,
    rope: tuple[jax.Array, jax.Array],
    config: LayerConfig,
) -> tuple[jax.Array, LayerKV]:
    """Make queries [N, H, D] of a product [N, U] and write its keys and values."""
    norms = (params.q_norm, params.k_norm)
    if paging.mesh is None:
        q, k, v = qkv.place(
            fused, params.qkv_bias, norms, rope, (kv.k, kv.v), paging.write,
            eps=config.norm_eps, backend=paging.backend,
        )  # fmt: skip
        return q, LayerKV(k, v)
    sizes = (config.num_kv_heads, config.head_dim)
    q, k, v = qkv.split(fused, params.qkv_bias, norms, rope, *sizes, config.norm_eps)
    write = functools.partial(pages.write, backend=paging.backend)
    return q, LayerKV(*on_shards(write, paging.mesh, (1, 1, 1, 1, None))(kv.k, kv.v, k, v, paging.write))


def feed_forward_half(
    params: FeedForwardParams | ExpertsParams,
    x: jax.Array,
    is_real: jax.Array,
    *,
    config: LayerConfig,
    backend: str,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Pass each token through the network, or through its experts, and add the result.

    x         [N, E]   model dtype
    is_real   [N]      bool; the others are padding
    returns   [N, E]
    """
    if isinstance(params, FeedForwardParams):
        first = first_of(params.gate_up, backend)
        second = second_of(
            params.down, params.gate_up_bias, activation=config.activation, is_gated=config.parts.is_gated
        )
        if first is not None and second is not None:
            finish = chain.Finish(x, params.down_bias, params.post_norm, config.residual_scale)
            pre_norm = norm_of(params.norm, params.norm_bias)
            return chain.run(x, pre_norm, first, second, finish, eps=config.norm_eps, backend=backend)
    normed = norm(x, params.norm, params.norm_bias, config.norm_eps, backend=backend)
    if isinstance(params, ExpertsParams):
        assert config.experts is not None
        out = mix(
            params, normed, is_real, experts=config.experts, activation=config.activation, backend=backend,
            mesh=mesh,
        )  # fmt: skip
        return _add_residual(x, out, params.post_norm, config, backend)
    product = functools.partial(matmul, backend=backend, mesh=mesh)
    inner = _add_bias(product(normed, params.gate_up), params.gate_up_bias)
    if config.parts.is_gated:
        inner = gate_shards(inner, config.activation, mesh)
    else:
        inner = activate(inner, config.activation)
    out = _add_bias(product(inner, params.down, split=1), params.down_bias)
    return _add_residual(x, out, params.post_norm, config, backend)


@functools.partial(jax.jit, static_argnames="config")
def decoder_layer(
    params: LayerParams,
    kv: LayerKV,
    x: jax.Array,
    paging: Paging,
    rope: tuple[jax.Array, jax.Array],
    *,
    config: LayerConfig,
    wanted: jax.Array | None = None,
) -> tuple[jax.Array, LayerKV]:
    """Run both halves; a jit of its own so that equal layers are traced once.

    x        [N, E]        model dtype
    rope     [N, D / 2]    float32, cosine and sine
    wanted   [J]           int32 tokens whose result is wanted, None for all
    returns  [N, E] or [J, E], and the pages
    """
    x, kv = attention_half(params.attention, kv, x, paging, rope, config=config, wanted=wanted)
    position = paging.position if wanted is None else paging.position[wanted]
    is_real = position != NO_POSITION
    x = feed_forward_half(
        params.feed_forward, x, is_real, config=config, backend=paging.backend, mesh=paging.mesh
    )
    return x, kv


def embed_tokens(embed: Weight, batch: Batch, scale: float | None = None) -> jax.Array:
    """Look up the tokens, scale them, and put `batch.embeds` in their places.

    embed    [V, E]   model dtype
    returns  [N, E]   model dtype

    The scale is rounded to the model dtype first, as the models were trained.
    """
    if isinstance(embed, PackedArray):
        x = look_up(batch.token_id, embed, backend=batch.backend)
    elif isinstance(embed, Codes):
        raise TypeError("the embedding must be an array, or packed: rows of other codes cannot be looked up")
    else:
        x = whole(jnp.take(embed, batch.token_id, axis=0, mode="clip"), batch.mesh)
    if scale is not None:
        x = x * jnp.asarray(scale, x.dtype)
    if batch.embeds is not None:
        x = x.at[batch.embed_index].set(batch.embeds.astype(x.dtype), mode="drop")
    return x


def head_logits(
    params: Params,
    hidden: jax.Array,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Score every word with the head, or with the embedding where that is tied to it.

    hidden   [J, E]   model dtype, as `forward` returns it
    returns  [J, V]   float32, times `scale`, then capped
    """
    weight = params.embed if params.head is None else params.head
    if scale == 1.0 and not isinstance(weight, Codes):
        return joined(head.logits(hidden, weight, soft_cap=soft_cap, backend=backend), mesh)
    if isinstance(weight, Codes):
        scores = matmul(hidden.astype(jnp.float32), weight, backend=backend, mesh=mesh)
    else:
        scores = head.logits(hidden, weight, backend=backend)
    scores = joined(scores, mesh)
    scores = scores if scale == 1.0 else scores * scale
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def layer_specs(config: LayerConfig, embed_dim: int, ffn_dim: int) -> LayerParams:
    """Describe the parameters of a layer with ParamSpecs."""
    heads, kv_heads, dim, parts = config.num_heads, config.num_kv_heads, config.head_dim, config.parts
    fused = (heads + 2 * kv_heads) * dim
    is_whole = parts.qk_norm == "whole"
    sizes = (heads * dim, kv_heads * dim) if is_whole else (dim, dim)
    q_norm, k_norm = (_factor(size) if parts.qk_norm else None for size in sizes)
    pre_norm = _factor(embed_dim) if parts.pre_norms else None
    post_norm = _factor(embed_dim) if parts.post_norms else None
    norm_bias = _zeros(embed_dim) if parts.norm == "layer" else None
    return LayerParams(
        AttentionParams(
            norm=pre_norm,
            qkv=_spec((fused, embed_dim), ("kv_heads", "embed"), units=kv_heads),
            o=_spec((embed_dim, heads * dim), ("embed", "kv_heads"), units=kv_heads),
            qkv_bias=_bias(fused, "kv_heads", kv_heads) if parts.qkv_bias else None,
            o_bias=_bias(embed_dim, "embed") if parts.o_bias else None,
            q_norm=q_norm,
            k_norm=k_norm,
            post_norm=post_norm,
            norm_bias=norm_bias,
        ),
        _feed_forward_specs(
            config, embed_dim, ffn_dim, norm=pre_norm, post_norm=post_norm, norm_bias=norm_bias
        ),
    )


def _feed_forward_specs(
    config: LayerConfig, embed_dim: int, ffn_dim: int, **norms: Any
) -> FeedForwardParams | ExpertsParams:
    if config.experts is not None:
        return experts_specs(config.experts, embed_dim, **norms)
    inner, has_bias = (2 if config.parts.is_gated else 1) * ffn_dim, config.parts.mlp_bias
    return FeedForwardParams(
        gate_up=_spec((inner, embed_dim), ("ffn", "embed"), units=ffn_dim),
        down=_spec((embed_dim, ffn_dim), ("embed", "ffn")),
        gate_up_bias=_bias(inner, "ffn", ffn_dim) if has_bias else None,
        down_bias=_bias(embed_dim, "embed") if has_bias else None,
        **norms,
    )


def decoder_specs(
    layers: tuple[LayerParams, ...],
    vocab_size: int,
    embed_dim: int,
    *,
    tied: bool,
    has_norm_bias: bool = False,
) -> Params:
    """Describe the parameters of a whole decoder with ParamSpecs."""
    return Params(
        embed=_spec((vocab_size, embed_dim), ("vocab", "embed"), draw="embedding"),
        layers=layers,
        norm=_factor(embed_dim),
        head=None if tied else _spec((vocab_size, embed_dim), ("vocab", "embed")),
        norm_bias=_zeros(embed_dim) if has_norm_bias else None,
    )


def _spec(*args: Any, **fields: Any) -> Any:
    # Trees of specs have the type of the tree that they describe.
    return ParamSpec(*args, **fields)


def _factor(size: int) -> Any:
    return _spec((size,), (None,), draw="ones", dtype="float32")


def _zeros(size: int) -> Any:
    return _spec((size,), (None,), draw="zeros", dtype="float32")


def _bias(size: int, axis: str, units: int = 0) -> Any:
    return _spec((size,), (axis,), units=units, draw="zeros")
