"""From a fused product to queries and written pages in JAX's own operations."""

import jax
import jax.numpy as jnp

from xjax.kernels import norm, pages

Norms = tuple[jax.Array | None, jax.Array | None]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn each pair of a head by its token's angle, in float32; dimensions behind the pairs stay.

    x         [N, H, D]     any floating dtype
    cos, sin  [N, d / 2]    float32; d <= D rotated dimensions
    returns   [N, H, D]     dtype of x
    """
    half = cos.shape[-1]
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    cos, sin = cos[:, None, :], sin[:, None, :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :].astype(jnp.float32))
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def split(
    qkv: jax.Array,
    bias: jax.Array | None,
    norms: Norms,
    rope: tuple[jax.Array, jax.Array],
    num_kv_heads: int,
    head_dim: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Take a fused product apart; norm and turn queries and keys.

    qkv      [N, U]                    model dtype
    bias     [U]                       or None
    norms    [D] or [H * D]            float32, of queries and of keys, or None
    rope     [N, d / 2]                float32, cosine and sine
    returns  [N, H, D], two [N, K, D]  dtype of qkv: queries, keys, values
    """
    if bias is not None:
        qkv = qkv + bias[None, :]
    heads = qkv.reshape(qkv.shape[0], num_kv_heads, -1, head_dim)
    q = heads[:, :, :-2].reshape(qkv.shape[0], -1, head_dim)
    k, v = heads[:, :, -2], heads[:, :, -1]
    if norms[0] is not None and norms[1] is not None:
        q, k = _norm_heads(q, norms[0], eps), _norm_heads(k, norms[1], eps)
    return rotate(q, *rope), rotate(k, *rope), v


def _norm_heads(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Norm queries or keys [N, H, D]: each head, or all of a token together where weights are for all."""
    if weight.shape[0] == x.shape[2]:
        return norm.rms_norm(x, weight, eps)
    return norm.rms_norm(x.reshape(x.shape[0], -1), weight, eps).reshape(x.shape)


def place(
    qkv: jax.Array,
    bias: jax.Array | None,
    norms: Norms,
    rope: tuple[jax.Array, jax.Array],
    pages_: tuple[jax.Array, jax.Array],
    target: jax.Array,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norm and turn queries and keys, and put keys and values where `target` says.

    qkv      [N, U]             model dtype
    bias     [U]                or None
    norms    [D] or [H * D]     float32, of queries and of keys, or None
    rope     [N, d / 2]         float32, cosine and sine
    pages_   [P, K, S, D]       cache dtype, of keys and of values
    target   [N]                int32
    returns  q [N, H, D], and the pages
    """
    _, num_kv_heads, _, head_dim = pages_[0].shape
    q, k, v = split(qkv, bias, norms, rope, num_kv_heads, head_dim, eps)
    return q, *pages.write(*pages_, k, v, target)
