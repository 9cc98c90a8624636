"""Rotary settings of config.json and GGUF files: what is read, what wins, what is refused."""

import dataclasses
import math

import numpy as np
import pytest

from xjax.errors import LoadError
from xjax.models.rope import Rope, inverse_frequencies
from xjax.models.rope_settings import long_from_gguf, rope_from_gguf, rope_from_hf
from xjax.models.settings import Settings

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
LONG_OF_4 = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0]}


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"rope_type": "spiral", "factor": 2}, "spiral"),
        ({"rope_type": "yarn"}, "original_max_position_embeddings is missing"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8}, "factor is missing"),
        (LONG | {"original_max_position_embeddings": 4}, "long_factor must be a list of 4 numbers"),
        (LONG, "original_max_position_embeddings is missing"),
        ({"rope_type": ["yarn"]}, "not supported"),
        ({"rope_type": "dynamic"}, "factor is missing"),
        ({"full_attention": {"rope_type": "yarn"}}, "full_attention has settings of its own"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ({"rope_type": "linear", "factor": "big"}, "factor must be a number above 0"),
        ({"rope_type": "linear", "factor": 0}, "factor must be a number above 0"),
        ({"rope_type": "default", "rope_theta": [1]}, "rope_theta must be a number above 0"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8.5}, "an integer"),
        ({"rope_type": "linear", "factor": 1e-10, "rope_theta": 1e-37}, "finite"),
        ({"rope_type": "linear", "factor": 1e-35}, "finite"),
        (LLAMA3 | {"factor": 1e-35, "original_max_position_embeddings": 1}, "finite"),
        (YARN | {"rope_theta": 1.0}, "give no rotary frequencies"),
        (YARN | {"beta_fast": 5e-324}, "beta_fast must be a number above 0"),
        (YARN | {"factor": 1e-37}, "finite"),
        (LONG_OF_4 | {"original_max_position_embeddings": 1, "factor": 2}, "give no rotary frequencies"),
        (
            LONG_OF_4 | {"original_max_position_embeddings": 9, "factor": 1e-3, "long_factor": [0] * 4},
            "above 0",
        ),
        ({"rope_type": "dynamic", "factor": 1e38, "original_max_position_embeddings": 9}, "finite"),
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
    linear = Rope(8, 10.0, "linear", 8.0)
    assert read(**{"scaling.type": "linear", "scaling.factor": 8.0}) == linear
    # Files from before there were kinds.
    assert read(**{"scaling.factor": 8.0}) == read(scale_linear=8.0) == linear
    assert read(**{"scaling.type": "linear", "scale_linear": 8.0}) == linear
    assert read(**{"scaling.type": "none", "scale_linear": 8.0}) == Rope(8, 10.0)
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


def test_long_factors_by_the_longest_sequence():
    rope = rope_from_hf(LONG, dim=4, theta=100.0, context=256, original=64)
    plain = inverse_frequencies(Rope(4, 100.0))
    np.testing.assert_allclose(inverse_frequencies(rope), plain / [4.0, 8.0])
    np.testing.assert_allclose(inverse_frequencies(rope.for_length(65)), plain / [4.0, 8.0])
    np.testing.assert_allclose(inverse_frequencies(rope.for_length(64)), plain / [1.0, 2.0])
    assert rope.for_length(64).scale == rope.scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    assert rope_from_hf(LONG, dim=4, theta=10.0, context=64, original=64).scale == 1.0
    given = LONG | {"attention_factor": 1.5, "type": "su"}
    assert rope_from_hf(given, dim=4, theta=10.0, context=256, original=64).scale == 1.5
    assert rope_from_hf(LONG | {"rope_type": "yarn"}, dim=4, theta=100.0, context=256, original=64) == rope


def test_dynamic_by_the_longest_sequence():
    rope = rope_from_hf({"type": "dynamic", "factor": 2}, dim=8, theta=10.0, context=512)
    plain = Rope(8, 10.0)
    for length in (1, 512):
        np.testing.assert_array_equal(
            inverse_frequencies(rope.for_length(length)), inverse_frequencies(plain)
        )
    np.testing.assert_array_equal(inverse_frequencies(rope), inverse_frequencies(plain))
    assert rope.reach == 1024
    wider = Rope(8, 10.0 * (2 * 1024 / 512 - 1) ** (8 / 6))
    np.testing.assert_allclose(inverse_frequencies(rope.for_length(1024)), inverse_frequencies(wider))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_other_kinds_are_the_same_for_any_length(kind):
    rope = rope_from_hf(LLAMA3 | {"rope_type": kind}, dim=8, theta=10.0, context=512)
    assert rope.for_length(7) is rope and rope.reach == 0


def test_text_of_models_with_axes_is_default():
    given = {"type": "mrope", "mrope_section": [1, 1, 2]}
    assert rope_from_hf(given, dim=8, theta=10.0) == Rope(8, 10.0)


def test_which_original_context_wins():
    """As in the reference: said outside, then in the mapping, then the context itself."""
    given = {"rope_type": "yarn", "factor": 4.0}
    inside = given | {"original_max_position_embeddings": 100}
    assert rope_from_hf(inside, dim=8, theta=10.0, context=400, original=200).original_context == 200
    assert rope_from_hf(inside, dim=8, theta=10.0, context=400).original_context == 100
    assert rope_from_hf(given, dim=8, theta=10.0, context=400).original_context == 400
    without = {"rope_type": "yarn", "original_max_position_embeddings": 100}
    assert rope_from_hf(without, dim=8, theta=10.0, context=400).factor == 4.0


class Factors:
    """A tensor of a GGUF."""

    def __init__(self, *values):
        self.values = values

    def read(self):
        return np.array(self.values, np.float32)


def test_long_factors_of_a_gguf():
    lists = {"rope_factors_long.weight": Factors(4.0, 8.0), "rope_factors_short.weight": Factors(1.0, 2.0)}

    def read(tensors=lists, **values):
        values = {"a.context_length": 256, **{f"a.{key}": value for key, value in values.items()}}
        return long_from_gguf(Settings(values, "GGUF metadata", "a."), tensors, dim=4, theta=100.0)

    extended = {"rope.scaling.original_context_length": 64}
    assert read(**extended) == rope_from_hf(LONG, dim=4, theta=100.0, context=256, original=64)
    assert read(**extended, **{"rope.scaling.attn_factor": 1.5}).scale == 1.5
    assert read({}) == Rope(4, 100.0)
    assert read({}, **{"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}).kind == "linear"
    for name in lists:
        with pytest.raises(LoadError, match=f"{name} is missing"):
            read({name_: factors for name_, factors in lists.items() if name_ != name})
    with pytest.raises(LoadError, match=r"rope_factors_long.weight must be a list of 2 numbers above 0"):
        read(lists | {"rope_factors_long.weight": Factors(4.0, float("nan"))})
