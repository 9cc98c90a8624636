"""Norms of rows: the contract of every backend.

    norm(x, weight, bias, eps, backend=...)

    x        [..., E]  any floating dtype; [N, E] for "numba"
    weight   [E]       float32; None: x as it is
    bias     [E]       float32: layer norm; None: RMS norm
    returns  [..., E]  dtype of x, computed in float32

With "numba" a row's bits depend on that row alone. How the compiler adds up a row depends on how many
there are, and codes of 8 bits made of the result turn a difference of the last bit into one of a percent.
"""

from typing import Any

import jax

from xjax.kernels.norm.xla import layer_norm, rms_norm

__all__ = ["layer_norm", "norm", "prepare", "rms_norm"]


def prepare(backend: str) -> None:
    """Make known to XLA what a backend's programs call; before one is loaded. Raises LoadError."""
    if backend == "numba":
        from xjax.kernels.norm import numba

        numba.register()


def norm(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float, *, backend: str = "xla"
) -> jax.Array:
    """Apply the norm that a weight and a bias belong to: none, RMS, or layer norm.

    x              [..., E]  any floating dtype
    weight, bias   [E]       float32, or None
    returns        [..., E]  dtype of x
    """
    if weight is None:
        return x
    if backend == "numba":
        from xjax.kernels.norm import numba

        made: Any = numba.norm(x, weight, bias, eps)
        return made
    return rms_norm(x, weight, eps) if bias is None else layer_norm(x, weight, bias, eps)
