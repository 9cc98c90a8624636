"""Rotary angles: every kind against its definition in float64, near and far positions."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xjax.errors import LoadError
from xjax.models.rope import Rope, angles, inverse_frequencies, rope_from_gguf, rope_from_hf, rotate
from xjax.models.settings import Settings

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0]}


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


def test_dynamic_is_default_within_the_context():
    assert rope_from_hf({"type": "dynamic", "factor": 2}, dim=8, theta=10.0) == Rope(8, 10.0)


def test_factors_divide():
    rope = Rope(4, 100.0, "factors", factors=(1.0, 5.0))
    np.testing.assert_allclose(inverse_frequencies(rope), [1.0, 0.1 / 5])


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"rope_type": "spiral", "factor": 2}, "spiral"),
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "truncate": False},
            "truncated",
        ),
        (LONG | {"original_max_position_embeddings": 4}, "short_factor must be a list of 4 numbers"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ({"rope_type": "linear", "factor": "big"}, "factor must be a number above 0"),
        ({"rope_type": "linear", "factor": 0}, "factor must be a number above 0"),
        ({"rope_type": "default", "rope_theta": [1]}, "rope_theta must be a number above 0"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor 4 must be below high_freq_factor 4"),
    ],
)
def test_what_is_not_supported_is_said(settings, word):
    with pytest.raises(LoadError, match=word):
        rope_from_hf(settings, dim=8, theta=10.0)


def test_gguf_metadata():
    def read(**scaling):
        values = {f"a.rope.{key}": value for key, value in scaling.items()}
        return rope_from_gguf(Settings(values, "GGUF metadata", "a."), dim=8, theta=10.0)

    assert read() == Rope(8, 10.0)
    assert read(freq_base=5.0, **{"scaling.type": "none"}) == Rope(8, 5.0)
    assert read(**{"scaling.type": "linear", "scaling.factor": 8.0}) == Rope(8, 10.0, "linear", 8.0)
    with pytest.raises(LoadError, match=r"a\.rope\.scaling\.factor is missing"):
        read(**{"scaling.type": "linear"})
    with pytest.raises(LoadError, match="type 'longrope' is not supported"):
        read(**{"scaling.type": "longrope", "scaling.factor": 8.0})


def test_gguf_yarn():
    def read(**scaling):
        values = {f"a.rope.scaling.{key}": value for key, value in scaling.items()}
        values |= {"a.context_length": 4096, "a.rope.scaling.type": "yarn", "a.rope.scaling.factor": 4.0}
        return rope_from_gguf(Settings(values, "GGUF metadata", "a."), dim=8, theta=10.0)

    mscale = 1 + 0.1 * math.log(4)
    plain = Rope(8, 10.0, "yarn", 4.0, 1.0, 32.0, 4096, scale=mscale)
    assert read() == plain
    wanted = dataclasses.replace(plain, original_context=512, low=2.0, high=16.0)
    assert read(original_context_length=512, yarn_beta_slow=2.0, yarn_beta_fast=16.0) == wanted
    assert read(attn_factor=0.5).scale == pytest.approx(mscale / 2)
    assert read(yarn_attn_factor=1.25).scale == 1.25
    assert read(yarn_log_multiplier=1.0).scale == 1.0
    assert read(yarn_log_multiplier=0.0) == plain


def test_long_factors_by_the_context():
    short = rope_from_hf(LONG, dim=4, theta=10.0, context=64, original=64)
    assert short == Rope(4, 10.0, "factors", factors=(1.0, 2.0))
    long = rope_from_hf(LONG, dim=4, theta=10.0, context=256, original=64)
    assert long.factors == (4.0, 8.0)
    assert long.scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    given = LONG | {"attention_factor": 1.5, "type": "su"}
    assert rope_from_hf(given, dim=4, theta=10.0, context=256, original=64).scale == 1.5


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
