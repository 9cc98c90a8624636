"""Mixture of experts: the contract that every backend fulfils.

    moe(x, expert_id, weight, gate_up, down, *, activation, backend)

    x           [N, E]         model dtype
    expert_id   [N, k]         int32; X, or any other number that no expert has, for none
    weight      [N, k]         float32
    gate_up     [X, 2 * F, E]  floating point; of each expert the gate's rows, then the other's
    down        [X, E, F]      floating point
    returns     [N, E]         dtype of x: sum over k of weight * down(act(gate(x)) * up(x))

A token of no expert gets zeros and costs nothing where that can be had: padding is such a token. Dots
are accumulated in float32. A token's result does not depend on the others, but for the rounding of the
products, and with `numba` not even by that. The others can be differentiated.

    xla           a loop over the experts in use
    numba         the same as calls that read the weights where they lie
    accelerator   tokens sorted by expert, and grouped products
"""

from collections.abc import Callable
from typing import Any

import jax

from xjax.kernels.moe import ragged, xla


def _numba(*arrays: Any) -> jax.Array:
    from xjax.kernels.moe import numba

    return numba.moe(*arrays)


_BACKENDS: dict[str, Callable[..., jax.Array]] = {
    "xla": xla.moe,
    "accelerator": ragged.moe,
    "numba": _numba,
}


def prepare(backend: str) -> None:
    """Make known to XLA what a backend's programs call; before one is loaded."""
    if backend == "numba":
        from xjax.kernels.moe import numba

        numba.register()


def moe(
    x: jax.Array,
    expert_id: jax.Array,
    weight: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    activation: str,
    backend: str = "xla",
) -> jax.Array:
    """Pass each token through its experts and add up what they say.

    x           [N, E]         model dtype
    expert_id   [N, k]         int32
    weight      [N, k]         float32
    gate_up     [X, 2 * F, E]  floating point
    down        [X, E, F]      floating point
    returns     [N, E]         dtype of x
    """
    return _BACKENDS[backend](x, expert_id, weight, gate_up, down, activation)
