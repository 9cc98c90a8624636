"""Paged attention: the contract that every backend fulfils.

    attend(q, k, v, table, row_of, position, *, num_decode, tile, scale, window, soft_cap, backend)

    q         [N, H, D]      model dtype
    k, v      [P, K, S, D]   cache dtype; head h of q reads kv head h // (H // K)
    table     [B, M]         int32 page ids by page index in the sequence, padded with page 0
    row_of    [N]            int32, row of `table`
    position  [N]            int32, index in the sequence; -1 for padding
    returns   [N, H, D]      dtype of q; zeros for padding

A token attends to positions p with p <= its own and, with a window, p > own - window. The first
`num_decode` tokens each have a row of their own; the rest lies in tiles of `tile` tokens of one row
each, at rising positions, padding behind. Softmax in float32. Whatever pages hold at other positions,
NaN too, does not reach the result. Reads pages only; writing is `pages.write`.

Only `xla` can be differentiated. A token's result is the same to the bit whatever else is in the batch.
"""

from collections.abc import Callable
from typing import Any

import jax

from xjax.errors import LoadError
from xjax.kernels.attention import xla


def _numba(*arrays: jax.Array, **static: Any) -> jax.Array:
    from xjax.kernels.attention import numba

    return numba.attend(*arrays, **static)


_BACKENDS: dict[str, Callable[..., jax.Array]] = {
    "xla": xla.attend,
    "accelerator": xla.attend,
    "numba": _numba,
}


def prepare(backend: str) -> None:
    """Make known to XLA what a backend's programs call; before one is loaded. Raises LoadError."""
    if backend != "numba":
        return
    try:
        from xjax.kernels.attention import numba
    except ImportError as error:
        raise LoadError(f"--kernels numba: {error}; mend the installation or take --kernels xla") from error
    numba.register()


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    row_of: jax.Array,
    position: jax.Array,
    *,
    num_decode: int,
    tile: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    backend: str = "xla",
) -> jax.Array:
    """Attend each token to the pages of its own sequence.

    q         [N, H, D]      model dtype
    k, v      [P, K, S, D]   cache dtype
    table     [B, M]         int32 page ids
    row_of    [N]            int32
    position  [N]            int32, -1 for padding
    returns   [N, H, D]      dtype of q
    """
    return _BACKENDS[backend](
        q, k, v, table, row_of, position,
        num_decode=num_decode, tile=tile, scale=scale, window=window, soft_cap=soft_cap,
    )  # fmt: skip
