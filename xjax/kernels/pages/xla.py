"""Writing keys and values into pages as one scatter each, in place under donation; and reading them."""

import jax
import jax.numpy as jnp


def write(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, target: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Put each token's key and value where `target` says.

    k_pages, v_pages  [P, K, S, D]  cache dtype
    k, v              [N, K, D]     model dtype
    target            [N]           int32, page * S + offset
    returns           two arrays [P, K, S, D]
    """
    page_size = k_pages.shape[2]
    page, offset = target // page_size, target % page_size

    def put(pages: jax.Array, new: jax.Array) -> jax.Array:
        if pages.dtype == jnp.uint16:
            new = jax.lax.bitcast_convert_type(new.astype(jnp.bfloat16), jnp.uint16)
        return pages.at[page, :, offset].set(new.astype(pages.dtype), mode="promise_in_bounds")

    return put(k_pages, k), put(v_pages, v)


def gather(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """Read pages head-major, as numbers.

    pages      [P, K, S, D]         cache dtype
    page_ids   [..., n]             int32, each below P
    returns    [..., K, n * S, D]   float32
    """
    _, num_heads, page_size, head_dim = pages.shape
    head = jnp.arange(num_heads, dtype=page_ids.dtype).reshape((1,) * (page_ids.ndim - 1) + (num_heads, 1))
    found = pages.at[page_ids[..., None, :], head].get(mode="promise_in_bounds")
    if found.dtype == jnp.uint16:
        found = jax.lax.bitcast_convert_type(found, jnp.bfloat16)
    shape = (*page_ids.shape[:-1], num_heads, page_ids.shape[-1] * page_size, head_dim)
    return found.reshape(shape).astype(jnp.float32)
