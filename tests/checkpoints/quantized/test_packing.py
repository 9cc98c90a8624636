"""Codes in words and bytes, against arithmetic on whole numbers; 8-bit floats against JAX's."""

import jax.numpy as jnp
import numpy as np
import pytest

from xjax.checkpoints.quantized.packing import float8_values, pack_nibbles, unpack_nibbles, unpack_words


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words(bits):
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (3, 64))
    words = []
    for row in codes:
        number = sum(int(code) << (bits * i) for i, code in enumerate(row))
        words.append([(number >> (32 * i)) & 0xFFFFFFFF for i in range(64 * bits // 32)])
    packed = np.array(words, np.uint32).view(np.int32)
    np.testing.assert_array_equal(unpack_words(packed, bits), codes)


def test_nibbles():
    codes = np.random.default_rng(0).integers(0, 16, (5, 8)).astype(np.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (5, 4)
    assert packed[2, 1] == codes[2, 2] + 16 * codes[2, 3]
    np.testing.assert_array_equal(unpack_nibbles(packed), codes)


@pytest.mark.device
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_every_8_bit_float(kind):
    wanted = np.arange(256, dtype=np.uint8).view(jnp.dtype(kind)).astype(np.float32)
    found = float8_values(kind)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found[:128]), np.signbit(wanted[:128]))
