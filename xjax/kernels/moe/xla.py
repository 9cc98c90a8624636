"""Mixture of experts in plain XLA, for processors: a loop over the experts, those in use do something.

The weights of an expert are taken out once and multiplied with its tokens, a tile of them at a time.
Such loops cannot be differentiated backwards: the gradient is that of `ragged`, the same sums.
"""

from typing import Any

import jax
import jax.numpy as jnp

from xjax.kernels.activation import gate
from xjax.kernels.linear.xla import product
from xjax.kernels.moe import ragged

_TILE = 32  # most tokens of an expert at a time


def moe(
    x: jax.Array,
    expert_id: jax.Array,
    weight: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    activation: str,
) -> jax.Array:
    """Pass each token through its experts and add up what they say.

    x           [N, E]         model dtype
    expert_id   [N, k]         int32
    weight      [N, k]         float32
    gate_up     [X, 2 * F, E]  floating point
    down        [X, E, F]      floating point
    returns     [N, E]         dtype of x
    """
    return _moe(x, expert_id, weight, gate_up, down, activation)


def _loop(x, expert_id, weight, gate_up, down, activation):
    num_experts, each = gate_up.shape[0], expert_id.shape[1]
    order, counts = ragged.sort_pairs(expert_id, num_experts)
    tile = min(_TILE, x.shape[0])
    ends = jnp.cumsum(counts)
    # A tile may reach past its expert: what it writes there is written again, or belongs to none.
    order = jnp.concatenate([order, jnp.zeros(tile, order.dtype)])

    def run(expert, results):
        own_gate_up = jax.lax.dynamic_index_in_dim(gate_up, expert, keepdims=False)
        own_down = jax.lax.dynamic_index_in_dim(down, expert, keepdims=False)
        first = ends[expert] - counts[expert]

        def one_tile(i, results):
            start = first + i * tile
            tokens = jax.lax.dynamic_slice_in_dim(order, start, tile) // each
            inner = product(x[tokens], own_gate_up).astype(x.dtype)
            found = product(gate(inner, activation), own_down)
            return jax.lax.dynamic_update_slice_in_dim(results, found, start, axis=0)

        return jax.lax.fori_loop(0, -(-counts[expert] // tile), one_tile, results)

    def visit(expert, results):
        return jax.lax.cond(counts[expert] > 0, run, lambda _, results: results, expert, results)

    results = jnp.zeros((order.size, x.shape[1]), jnp.float32)
    results = jax.lax.fori_loop(0, num_experts, visit, results)
    order, results = order[: expert_id.size], results[: expert_id.size]
    return ragged.combine(results, order, expert_id, weight, num_experts).astype(x.dtype)


def _forward(x, expert_id, weight, gate_up, down, activation):
    saved = (x, expert_id, weight, gate_up, down)
    return _moe(*saved, activation), saved


def _backward(activation, saved, gradient):
    x, expert_id, weight, gate_up, down = saved

    def dense(x, weight, gate_up, down):
        return ragged.moe(x, expert_id, weight, gate_up, down, activation)

    _, pull = jax.vjp(dense, x, weight, gate_up, down)
    to_x, to_weight, to_gate_up, to_down = pull(gradient)
    return to_x, None, to_weight, to_gate_up, to_down


_moe: Any = jax.custom_vjp(_loop, nondiff_argnums=(5,))
_moe.defvjp(_forward, _backward)
