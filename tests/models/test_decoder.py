"""What the decoder's config settles for the longest sequence of an engine."""

import dataclasses

import pytest

from tests.golden.recipe import CASES
from xjax.errors import LoadError
from xjax.models import gemma3, llama
from xjax.models.decoder import for_length

GEMMA, LLAMA = CASES["gemma_tied"].config, CASES["llama_tied"].config


def test_no_more_than_the_context():
    config = llama.FAMILY.config_from_hf(LLAMA)
    assert for_length(config, 4096) == config
    assert for_length(config, 100) == dataclasses.replace(config, max_context=100)
    with pytest.raises(LoadError, match="--max-model-len 4097 is above the model's context, 4096"):
        for_length(config, 4097)


def test_a_window_as_wide_as_the_longest_sequence_is_none():
    config = gemma3.FAMILY.config_from_hf(GEMMA)
    assert set(for_length(config, 10).layer_windows) == {9, None}
    assert set(for_length(config, 9).layer_windows) == {None}
    assert for_length(config, 9).local_layers == config.local_layers


def test_ropes_of_both_kinds_of_layers():
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    nested = {"full_attention": dynamic, "sliding_attention": dynamic | {"factor": 2.0}}
    config = gemma3.FAMILY.config_from_hf(GEMMA | {"rope_parameters": nested})
    settled = for_length(config, 16384)
    assert settled.rope.context == settled.local_rope.context == 16384
    assert config.rope.context == config.local_rope.context == 4096
    with pytest.raises(LoadError, match="16384"):
        for_length(config, 16385)
    assert repr(settled) != repr(for_length(config, 8192))  # no program or page of one serves the other
