"""Products with packed weights and what stands between them, in JAX's own operations."""

import jax
import jax.numpy as jnp

from xjax.kernels import activation
from xjax.kernels import norm as norms
from xjax.kernels.chain.parts import Finish, First, Norm, Packed, Second
from xjax.kernels.linear import packed


def run(
    x: jax.Array,
    norm: Norm | None,
    first: First,
    second: Second | None,
    finish: Finish | None,
    eps: float,
) -> jax.Array:
    """Pass rows through one product or two.

    x        [N, E]     model dtype
    returns  [N, Out]   dtype of x
    """
    out = x if norm is None else norms.norm(x, norm.weight, norm.bias, eps)
    out = in_turns(first, [_product(out, piece) for piece in first.pieces])
    if second is not None:
        out = out if second.bias is None else out + second.bias[None, :]
        act = activation.gate if second.is_gated else activation.activate
        out = _product(act(out, second.activation), second.weight)
    if finish is None:
        return out
    out = out if finish.bias is None else out + finish.bias[None, :]
    out = norms.norm(out, finish.post_norm, None, eps)
    if finish.scale != 1.0:  # not rounded to a narrow dtype before it multiplies
        out = (out.astype(jnp.float32) * finish.scale).astype(out.dtype)
    return finish.residual + out


def _product(x: jax.Array, weight: Packed) -> jax.Array:
    return packed.linear_packed(x, weight.data, weight.form, weight.num_out)


def in_turns(first: First, outs: list[jax.Array]) -> jax.Array:
    """Put what several matrices gave into its order.

    outs     [N, rows]   of each piece
    returns  [N, Out]
    """
    if len(outs) == 1:
        return outs[0]
    num_periods = first.num_out // sum(count for _, count in first.turns)
    periods = [out.reshape(out.shape[0], num_periods, -1) for out in outs]
    taken, strips = [0] * len(outs), []
    for piece, count in first.turns:
        strips.append(periods[piece][:, :, taken[piece] : taken[piece] + count])
        taken[piece] += count
    return jnp.concatenate(strips, axis=2).reshape(outs[0].shape[0], first.num_out)
