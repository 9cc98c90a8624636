"""Mixture of experts as two grouped products over tokens that are sorted by expert; for accelerators."""

import jax
import jax.numpy as jnp

from xjax.kernels.activation import gate

# Rows of one group each times that group's matrix, [R, In] x [X, Out, In] -> [R, Out].
_GROUPED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def sort_pairs(expert_id: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Order the pairs of a token and an expert by expert, those of none last.

    expert_id   [N, k]    int32
    returns     order [N * k] int32 of pairs, and how many each expert has [X] int32
    """
    ids = expert_id.reshape(-1)
    ids = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[ids].add(1)
    return jnp.argsort(ids, stable=True).astype(jnp.int32), counts[:num_experts]


def combine(results: jax.Array, order: jax.Array, expert_id: jax.Array, weight: jax.Array, num_experts: int):
    """Bring sorted results back to their tokens and add them up, weighted.

    results     [N * k, E]  float32, what rows of none hold does not matter
    order       [N * k]     int32
    expert_id   [N, k]      int32
    weight      [N, k]      float32
    returns     [N, E]      float32
    """
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    results = results[back].reshape(*expert_id.shape, -1)
    is_real = ((expert_id >= 0) & (expert_id < num_experts))[:, :, None]
    return jnp.sum(jnp.where(is_real, results, 0.0) * weight[:, :, None], axis=1)


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
    num_experts, each = gate_up.shape[0], expert_id.shape[1]
    order, counts = sort_pairs(expert_id, num_experts)
    inner = _grouped(x[order // each], gate_up, counts).astype(x.dtype)
    results = _grouped(gate(inner, activation), down, counts)
    return combine(results, order, expert_id, weight, num_experts).astype(x.dtype)


def _grouped(x: jax.Array, w: jax.Array, counts: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot_general(x, w, counts, _GROUPED, preferred_element_type=jnp.float32)
