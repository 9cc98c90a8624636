"""Writing into pages: the right place, no copy of the pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xjax.kernels.pages import page_dtype, write
from xjax.kernels.pages.xla import gather

pytestmark = pytest.mark.device


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_land_where_they_should(dtype):
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((2, 5, 3, 4, 8), np.float32)
    new = rng.standard_normal((2, 6, 3, 8), np.float32)
    target = np.array([7, 0, 19, 4, 0, 12], np.int32)  # twice into page 0, as padding does
    k_pages, v_pages = (jnp.asarray(x, dtype) for x in pages)
    found = write(k_pages, v_pages, jnp.asarray(new[0]), jnp.asarray(new[1]), jnp.asarray(target))
    for side in range(2):
        wanted = np.array(jnp.asarray(pages[side], dtype).astype(jnp.float32))
        for token, place in enumerate(target):
            wanted[place // 4, :, place % 4] = jnp.asarray(new[side, token], dtype).astype(jnp.float32)
        assert found[side].dtype == dtype
        np.testing.assert_array_equal(np.asarray(found[side].astype(jnp.float32))[1:], wanted[1:])


def test_donated_pages_are_written_in_place():
    pages = jax.ShapeDtypeStruct((64, 2, 16, 8), jnp.float32)
    new = jax.ShapeDtypeStruct((4, 2, 8), jnp.float32)
    compiled = (
        jax.jit(write, donate_argnums=(0, 1))
        .lower(pages, pages, new, new, jax.ShapeDtypeStruct((4,), jnp.int32))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * 64 * 2 * 16 * 8 * 4
    assert memory.temp_size_in_bytes < 64 * 2 * 16 * 8 * 4


def test_bfloat16_as_bits():
    assert page_dtype(jnp.dtype("bfloat16"), "cpu") == jnp.uint16
    assert page_dtype(jnp.dtype("bfloat16"), "gpu") == jnp.bfloat16
    assert page_dtype(jnp.dtype("float32"), "cpu") == jnp.float32
    new = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, 8), np.float32))
    target = jnp.asarray([8, 9, 10, 12], jnp.int32)
    found = []
    for dtype in ("uint16", "bfloat16"):
        pages = jnp.zeros((5, 3, 4, 8), dtype)
        k, v = write(pages, pages, new, -new, target)
        assert k.dtype == dtype
        found.append([gather(x, jnp.asarray([[2, 3], [0, 2]], jnp.int32)) for x in (k, v)])
    assert found[0][0].shape == (2, 3, 8, 8)
    for bits, numbers in zip(*found, strict=True):
        np.testing.assert_array_equal(bits, numbers)
    np.testing.assert_array_equal(
        found[0][0][0, :, [0, 1, 2, 4]], new.astype(jnp.bfloat16).astype(jnp.float32)
    )
