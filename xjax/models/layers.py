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

from xjax.kernels import attention, head, pages
from xjax.models.rope import rotate
from xjax.state.batch import Batch
from xjax.state.kv import LayerKV
from xjax.state.mesh import ParamSpec
from xjax.state.quantized import QuantizedArray, Weight, matmul


@struct.dataclass
class AttentionParams:
    """Weights of an attention half; U = K * (H / K + 2) * D.

    norm            [E]         float32
    qkv             [U, E]      for each kv head: its query heads, its key, its value
    o               [E, H * D]
    qkv_bias        [U]         or None
    o_bias          [E]         or None
    q_norm, k_norm  [D]         float32, or None
    post_norm       [E]         float32, or None
    """

    norm: jax.Array
    qkv: Weight
    o: Weight
    qkv_bias: jax.Array | None = None
    o_bias: jax.Array | None = None
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    post_norm: jax.Array | None = None


@struct.dataclass
class FeedForwardParams:
    """Weights of a feed-forward half.

    norm           [E]        float32
    gate_up        [2 * F, E] the gate's rows, then the other's
    down           [E, F]
    gate_up_bias   [2 * F]    or None
    down_bias      [E]        or None
    post_norm      [E]        float32, or None
    """

    norm: jax.Array
    gate_up: Weight
    down: Weight
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    post_norm: jax.Array | None = None


@struct.dataclass
class LayerParams:
    """Both halves of a layer."""

    attention: AttentionParams
    feed_forward: FeedForwardParams


@struct.dataclass
class Params:
    """A whole decoder.

    embed    [V, E]
    layers   LayerParams, one a layer
    norm     [E]      float32
    head     [V, E]   or None: the embedding is used (tied)
    """

    embed: Weight
    layers: tuple[LayerParams, ...]
    norm: jax.Array
    head: Weight | None = None


@dataclass(frozen=True)
class LayerConfig:
    """What the body of a layer must know; layers with equal ones share one trace.

    scale       of the scores, before the soft cap
    window      tokens a token looks back on, itself counted; None for all
    activation  "silu" or "gelu_tanh"
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    scale: float
    activation: str
    window: int | None = None
    soft_cap: float | None = None


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
        batch.shape.num_decode, batch.shape.tile, batch.backend,
    )  # fmt: skip


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Divide by the root mean square of the last axis and multiply by a factor, in float32.

    x        [..., E]  any floating dtype
    weight   [E]       float32
    returns  [..., E]  dtype of x
    """
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (scaled * weight.reshape((1,) * (x.ndim - 1) + weight.shape)).astype(x.dtype)


def _add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias[None, :]


def _add_residual(x: jax.Array, out: jax.Array, post_norm: jax.Array | None, eps: float) -> jax.Array:
    return x + (out if post_norm is None else rms_norm(out, post_norm, eps))


def _activate(x: jax.Array, kind: str) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (jax.nn.silu(wide) if kind == "silu" else jax.nn.gelu(wide, approximate=True)).astype(x.dtype)


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
    num_kv, head_dim = config.num_kv_heads, config.head_dim
    group = config.num_heads // num_kv
    normed = rms_norm(x, params.norm, config.norm_eps)
    qkv = _add_bias(matmul(normed, params.qkv, backend=paging.backend), params.qkv_bias)
    qkv = qkv.reshape(x.shape[0], num_kv, group + 2, head_dim)
    q = qkv[:, :, :group].reshape(x.shape[0], config.num_heads, head_dim)
    k, v = qkv[:, :, group], qkv[:, :, group + 1]
    if params.q_norm is not None and params.k_norm is not None:
        q, k = rms_norm(q, params.q_norm, config.norm_eps), rms_norm(k, params.k_norm, config.norm_eps)
    q, k = rotate(q, *rope), rotate(k, *rope)
    kv = LayerKV(*pages.write(kv.k, kv.v, k, v, paging.write, backend=paging.backend))
    if wanted is not None:
        x, q, paging = x[wanted], q[wanted], paging.only(wanted)
    out = attention.attend(
        q, kv.k, kv.v, paging.table, paging.row_of, paging.position,
        num_decode=paging.num_decode, tile=paging.tile, scale=config.scale, window=config.window,
        soft_cap=config.soft_cap, backend=paging.backend,
    )  # fmt: skip
    out = _add_bias(matmul(out.reshape(x.shape[0], -1), params.o, backend=paging.backend), params.o_bias)
    return _add_residual(x, out, params.post_norm, config.norm_eps), kv


def feed_forward_half(
    params: FeedForwardParams, x: jax.Array, *, config: LayerConfig, backend: str
) -> jax.Array:
    """Pass each token through the gated network and add the result.

    x        [N, E]   model dtype
    returns  [N, E]
    """
    normed = rms_norm(x, params.norm, config.norm_eps)
    both = _add_bias(matmul(normed, params.gate_up, backend=backend), params.gate_up_bias)
    half = both.shape[1] // 2
    inner = _activate(both[:, :half], config.activation) * both[:, half:]
    out = _add_bias(matmul(inner, params.down, backend=backend), params.down_bias)
    return _add_residual(x, out, params.post_norm, config.norm_eps)


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
    return feed_forward_half(params.feed_forward, x, config=config, backend=paging.backend), kv


def embed_tokens(embed: Weight, batch: Batch, scale: float | None = None) -> jax.Array:
    """Look up the tokens, scale them, and put `batch.embeds` in their places.

    embed    [V, E]   model dtype
    returns  [N, E]   model dtype

    The scale is rounded to the model dtype first, as the models were trained.
    """
    if isinstance(embed, QuantizedArray):
        raise TypeError("the embedding must be an array: rows of codes cannot be looked up yet")
    x = jnp.take(embed, batch.token_id, axis=0, mode="clip")
    if scale is not None:
        x = x * jnp.asarray(scale, x.dtype)
    if batch.embeds is not None:
        x = x.at[batch.embed_index].set(batch.embeds.astype(x.dtype), mode="drop")
    return x


def head_logits(
    params: Params, hidden: jax.Array, *, soft_cap: float | None = None, backend: str = "xla"
) -> jax.Array:
    """Score every word with the head, or with the embedding where that is tied to it.

    hidden   [J, E]   model dtype, as `forward` returns it
    returns  [J, V]   float32
    """
    weight = params.embed if params.head is None else params.head
    if isinstance(weight, QuantizedArray):
        scores = matmul(hidden.astype(jnp.float32), weight, backend=backend)
        return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    return head.logits(hidden, weight, soft_cap=soft_cap, backend=backend)


def layer_specs(
    config: LayerConfig,
    embed_dim: int,
    ffn_dim: int,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    post_norms: bool = False,
) -> LayerParams:
    """Describe the parameters of a layer with ParamSpecs."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    fused = (heads + 2 * kv_heads) * dim
    norm = _factor(embed_dim)
    return LayerParams(
        AttentionParams(
            norm=norm,
            qkv=_spec((fused, embed_dim), ("kv_heads", "embed"), units=kv_heads),
            o=_spec((embed_dim, heads * dim), ("embed", "kv_heads"), units=kv_heads),
            qkv_bias=_spec((fused,), ("kv_heads",), units=kv_heads, draw="zeros") if qkv_bias else None,
            o_bias=_spec((embed_dim,), ("embed",), draw="zeros") if o_bias else None,
            q_norm=_factor(dim) if qk_norm else None,
            k_norm=_factor(dim) if qk_norm else None,
            post_norm=norm if post_norms else None,
        ),
        FeedForwardParams(
            norm=norm,
            gate_up=_spec((2 * ffn_dim, embed_dim), ("ffn", "embed"), units=ffn_dim),
            down=_spec((embed_dim, ffn_dim), ("embed", "ffn")),
            gate_up_bias=_spec((2 * ffn_dim,), ("ffn",), units=ffn_dim, draw="zeros") if mlp_bias else None,
            down_bias=_spec((embed_dim,), ("embed",), draw="zeros") if mlp_bias else None,
            post_norm=norm if post_norms else None,
        ),
    )


def decoder_specs(layers: tuple[LayerParams, ...], vocab_size: int, embed_dim: int, *, tied: bool) -> Params:
    """Describe the parameters of a whole decoder with ParamSpecs."""
    return Params(
        embed=_spec((vocab_size, embed_dim), ("vocab", "embed"), draw="embedding"),
        layers=layers,
        norm=_factor(embed_dim),
        head=None if tied else _spec((vocab_size, embed_dim), ("vocab", "embed")),
    )


def _spec(*args: Any, **fields: Any) -> Any:
    # Trees of specs have the type of the tree that they describe.
    return ParamSpec(*args, **fields)


def _factor(size: int) -> Any:
    return _spec((size,), (None,), draw="ones", dtype="float32")
