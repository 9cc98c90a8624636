"""Writing keys and values into pages as one scatter each, in place under donation."""

import jax


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
        return pages.at[page, :, offset].set(new.astype(pages.dtype), mode="promise_in_bounds")

    return put(k_pages, k), put(v_pages, v)
