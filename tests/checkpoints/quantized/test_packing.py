"""Codes in words and bytes, against arithmetic on whole numbers; 8-bit floats against JAX's."""

import jax.numpy as jnp
import numpy as np
import pytest

from xjax.checkpoints.quantized.packing import (
    float8_values,
    pack_nibbles,
    unpack_nibbles,
    unpack_rows,
    unpack_words,
)


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
    np.testing.assert_array_equal(unpack_rows(np.ascontiguousarray(packed.T), bits), codes.T)


def test_nibbles():
    codes = np.random.default_rng(0).integers(0, 16, (8, 5)).astype(np.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (4, 5)
    assert packed[1, 2] == codes[2, 2] + 16 * codes[3, 2]
    np.testing.assert_array_equal(unpack_nibbles(np.ascontiguousarray(packed.T)), codes.T)


@pytest.mark.device
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_every_8_bit_float(kind):
    wanted = np.arange(256, dtype=np.uint8).view(jnp.dtype(kind)).astype(np.float32)
    found = float8_values(kind)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found[:128]), np.signbit(wanted[:128]))
