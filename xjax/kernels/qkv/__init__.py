"""From a fused product to queries and written pages: the contract that every backend fulfils.

    place(qkv, bias, q_norm, k_norm, cos, sin, k_pages, v_pages, target, *, eps, backend)

    qkv               [N, U]        model dtype; U = K * (H / K + 2) * D: for each kv head its queries,
                                    its key, its value
    bias              [U]           or None; added first
    q_norm, k_norm    [D]           float32, or None: RMS norms of each head of queries and keys;
                                    [H * D] and [K * D]: of all heads of a token together
    cos, sin          [N, d / 2]    float32; the first d dimensions of queries and keys are turned
    k_pages, v_pages  [P, K, S, D]  cache dtype, updated in place where the caller donates them
    target            [N]           int32, page * S + offset; padding names page 0
    returns           q [N, H, D] in the dtype of qkv, and the pages

Pages of dtype uint16 hold the bits of bfloat16 numbers. Only `xla` can be differentiated. A token's
result does not depend on the others, with `numba` not by a bit.
"""

from collections.abc import Callable
from typing import Any

import jax

from xjax.kernels.qkv import xla

split, rotate = xla.split, xla.rotate
Placed = tuple[jax.Array, jax.Array, jax.Array]


def _numba(*arguments: Any) -> Placed:
    from xjax.kernels.qkv import numba

    return numba.place(*arguments)


_BACKENDS: dict[str, Callable[..., Placed]] = {"xla": xla.place, "accelerator": xla.place, "numba": _numba}


def prepare(backend: str) -> None:
    """Make known to XLA what a backend's programs call; before one is loaded. Raises LoadError."""
    if backend == "numba":
        from xjax.kernels.qkv import numba

        numba.register()


def place(
    qkv: jax.Array,
    bias: jax.Array | None,
    norms: tuple[jax.Array | None, jax.Array | None],
    rope: tuple[jax.Array, jax.Array],
    pages: tuple[jax.Array, jax.Array],
    target: jax.Array,
    *,
    eps: float,
    backend: str = "xla",
) -> Placed:
    """Norm and turn queries and keys, and put keys and values where `target` says.

    qkv      [N, U]             model dtype
    bias     [U]                or None
    norms    [D] or [H * D]     float32, of queries and of keys, or None
    rope     [N, d / 2]         float32, cosine and sine
    pages    [P, K, S, D]       cache dtype, of keys and of values
    target   [N]                int32
    returns  q [N, H, D], and the pages
    """
    return _BACKENDS[backend](qkv, bias, norms, rope, pages, target, eps)
