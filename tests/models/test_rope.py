"""Rotary angles: every kind against its definition in float64, near and far positions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xjax.kernels.qkv import rotate
from xjax.models.rope import Rope, angles, inverse_frequencies
from xjax.models.rope_settings import rope_from_hf

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_default_and_linear():
    rope = rope_from_hf(None, dim=8, theta=100.0)
    np.testing.assert_allclose(inverse_frequencies(rope), [1, 100**-0.25, 0.1, 100**-0.75])
    for key in ("type", "rope_type"):
        linear = rope_from_hf({key: "linear", "factor": 4}, dim=8, theta=100.0)
        np.testing.assert_allclose(inverse_frequencies(linear), inverse_frequencies(rope) / 4)


def test_llama3_by_wavelength():
    rope = rope_from_hf(LLAMA3 | {"rope_theta": 500000.0}, dim=128, theta=1.0)
    plain = inverse_frequencies(Rope(128, 500000.0))
    ratio = inverse_frequencies(rope) / plain
    wave = 2 * math.pi / plain
    np.testing.assert_allclose(ratio[wave < 8192 / 4], 1.0)
    np.testing.assert_allclose(ratio[wave > 8192], 1 / 8)
    between = (wave >= 8192 / 4) & (wave <= 8192)
    smooth = (8192 / wave[between] - 1) / 3
    assert between.sum() > 3
    np.testing.assert_allclose(ratio[between], (1 - smooth) / 8 + smooth)


def test_factors_divide():
    rope = Rope(4, 100.0, "factors", factors=(1.0, 5.0))
    np.testing.assert_allclose(inverse_frequencies(rope), [1.0, 0.1 / 5])


def test_yarn_by_the_paper():
    """Fast pairs stay, slow ones are divided, between them the share falls with the pair's index."""
    given = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    rope = rope_from_hf(given, dim=64, theta=10000.0)
    plain = inverse_frequencies(Rope(64, 10000.0))
    share, turns = inverse_frequencies(rope) / plain, 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(share[turns > 32 * 1.4], 1.0)
    np.testing.assert_allclose(share[turns < 1 / 1.4], 1 / 8)
    between = np.diff(share[(turns < 32 / 1.4) & (turns > 1.4)])
    assert len(between) > 5
    np.testing.assert_allclose(between, between[0])


@pytest.mark.device
@pytest.mark.parametrize("first", [0, 8000, 130000])
def test_rotation(first):
    rope = rope_from_hf(LLAMA3, dim=16, theta=500000.0)
    position = np.arange(first, first + 5)
    x = np.random.default_rng(0).standard_normal((5, 3, 16), np.float32)
    found = rotate(jnp.asarray(x), *angles(rope, jnp.asarray(position, jnp.int32)))
    turned = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * position[:, None] * inverse_frequencies(rope))[
        :, None
    ]
    # A float32 angle of 130,000 is exact to 0.004, as in every implementation that trained a model.
    np.testing.assert_allclose(
        found, np.concatenate([turned.real, turned.imag], -1), atol=1e-5 + first * 4e-7
    )


def test_angles_are_computed_once_for_all_layers():
    """A compiler that fuses cosines into their readers computes them for every layer and head."""
    rope = Rope(dim=16, theta=10000.0)

    def layers(x, position, weights):
        cos, sin = angles(rope, position)
        for weight in weights:
            x = x + rotate(x, cos, sin) @ weight
        return x

    shapes = (jnp.zeros((32, 4, 16)), jnp.arange(32), [jnp.zeros((16, 16))] * 3)
    text = jax.jit(layers).lower(*shapes).compile().as_text()
    assert (text.count("cosine("), text.count("sine(") - text.count("cosine(")) == (1, 1)
