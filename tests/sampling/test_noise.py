"""Keys and bits are those of jax.random; the noise is Gumbel's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.sampling.reference import make_sampled
from xjax.sampling.noise import gumbel, row_keys, threefry

pytestmark = pytest.mark.device


def test_keys_are_those_of_jax():
    seeds = [(7, 0), (2**32 - 1, 5), (0, 2**31)]
    sampled = make_sampled(3, seed=seeds, sample_id=[0, 3, 127], position=[0, 9, 131071])
    for j, key in enumerate(row_keys(sampled)):
        low, high = seeds[j]
        expected = jax.random.wrap_key_data(jnp.asarray([high, low], jnp.uint32), impl="threefry2x32")
        expected = jax.random.fold_in(expected, sampled.sample_id[j])
        expected = jax.random.fold_in(expected, sampled.position[j])
        assert np.array_equal(key, jax.random.key_data(expected))


def test_bits_are_those_of_jax():
    key = jnp.asarray([123, 456], jnp.uint32)
    ids = jnp.arange(1000, dtype=jnp.uint32)
    x, y = threefry(key[None], jnp.zeros_like(ids), ids)
    with jax.threefry_partitionable(True):
        expected = jax.random.bits(jax.random.wrap_key_data(key, impl="threefry2x32"), (1000,))
    assert np.array_equal(x ^ y, expected)


def test_noise_is_gumbel_into_its_tail():
    noise = np.sort(gumbel(jnp.asarray([1, 2], jnp.uint32), jnp.arange(2**22, dtype=jnp.int32)))
    assert np.isfinite(noise).all()
    for value in (-2.0, 0.0, 1.0, 4.0, 8.0, 11.0):
        expected = -np.expm1(-np.exp(-value)) * noise.size
        above = noise.size - np.searchsorted(noise, value)
        assert abs(above - expected) < 5 * np.sqrt(expected)
    # Read as a distance from one, with 24 bits, some 230 of these would be equal.
    assert len(np.unique(noise[-2000:])) > 1990
