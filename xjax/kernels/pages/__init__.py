"""Writing keys and values into pages: the contract that every backend fulfils.

    write(k_pages, v_pages, k, v, target, backend=...)

    k_pages, v_pages  [P, K, S, D]  cache dtype, updated in place where the caller donates them
    k, v              [N, K, D]     rounded to the cache dtype
    target            [N]           int32, page * S + offset; padding names page 0

Pages of dtype uint16 hold the bits of bfloat16 numbers. On CPU XLA would turn a whole bfloat16 array
into float32 and back at each write, so bfloat16 pages are kept that way there; see `page_dtype`.

Which page belongs to whom is the caller's business. Only page 0 may be named twice; which of its
writers wins is open.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from xjax.kernels.pages import xla

# One scatter is as fast as the memory, so nobody needs another form.
_BACKENDS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = dict.fromkeys(
    ("xla", "accelerator", "numba"), xla.write
)


def page_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """Dtype that pages of numbers of `dtype` have on a platform ("cpu", "gpu", "tpu")."""
    return jnp.dtype("uint16") if platform == "cpu" and dtype == jnp.bfloat16 else jnp.dtype(dtype)


def write(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    target: jax.Array,
    *,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Put each token's key and value where `target` says.

    k_pages, v_pages  [P, K, S, D]  cache dtype
    k, v              [N, K, D]     model dtype
    target            [N]           int32, page * S + offset
    returns           two arrays [P, K, S, D]
    """
    return _BACKENDS[backend](k_pages, v_pages, k, v, target)
