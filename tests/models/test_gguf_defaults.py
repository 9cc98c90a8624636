"""What GGUF metadata leaves out: the format's own defaults, and what the tensors tell."""

from types import SimpleNamespace

import pytest

from xjax.errors import LoadError
from xjax.models.registry import load_config, supported

pytestmark = pytest.mark.device

NEEDED = {
    "block_count": 3,
    "embedding_length": 48,
    "feed_forward_length": 80,
    "attention.head_count": 4,
    "context_length": 256,
}
# What the format lets a file leave out, and what it then means.
DEFAULTS = {"attention.head_count_kv": 4, "attention.key_length": 12, "rope.dimension_count": 12}
EPSILON = {"attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5}
# Settings without which a family's file means nothing.
OWN = {
    "granite": {
        "attention.scale": 0.25, "embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 4.0,
    },
    "gemma2": {"attention.sliding_window": 64, "attention.key_length": 12},
    "gemma3": {"attention.sliding_window": 64, "attention.key_length": 12},
}  # fmt: skip
TENSORS = {"token_embd.weight": SimpleNamespace(shape=(61, 48))}
ARCHITECTURES = [name for entry in supported() for name in entry.gguf if "moe" not in name]


def read(name, values, tensors=TENSORS):
    metadata = {f"{name}.{key}": value for key, value in values.items()}
    return load_config("gguf", name, metadata, tensors)[1]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_left_out_means_the_default(name):
    values = NEEDED | EPSILON | OWN.get(name, {})
    found = read(name, values)
    assert found == read(name, values | DEFAULTS)
    assert (found.num_kv_heads, found.head_dim, found.rope.dim) == (4, 12, 12)
    assert found.vocab_size == 61  # as long as the embedding is
    assert found.tied
    assert not read(name, values, TENSORS | {"output.weight": TENSORS["token_embd.weight"]}).tied


def test_rotary_base():
    assert read("llama", NEEDED) == read("llama", NEEDED | {"rope.freq_base": 10000.0})
    assert read("llama", NEEDED) != read("llama", NEEDED | {"rope.freq_base": 5e5})


@pytest.mark.parametrize("key", NEEDED)
def test_what_has_no_default_is_named(key):
    values = {name: value for name, value in NEEDED.items() if name != key}
    with pytest.raises(LoadError, match=rf"GGUF metadata: llama\.{key}"):
        read("llama", values)
