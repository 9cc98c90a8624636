"""Names and layouts under which a GGUF's tensors are handed to transformers; torch is not needed."""

import numpy as np
import pytest

from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.errors import LoadError
from xjax.weights.fuse import fuse_qkv
from xjax_server.bench.offline import torch_peer


def test_pairs_become_halves_as_in_our_loader():
    q, k = np.arange(2 * 2 * 8 * 3.0).reshape(32, 3), np.arange(2 * 8 * 3.0).reshape(16, 3)
    fused = np.empty((2 * 4 * 8, 3))
    fuse_qkv(fused, [q, k, k], 2, 8, 8)
    by_head = fused.reshape(2, 4, 8, 3)
    np.testing.assert_array_equal(torch_peer._halves(q, 4), by_head[:, :2].reshape(32, 3))
    np.testing.assert_array_equal(torch_peer._halves(k, 2), by_head[:, 2].reshape(16, 3))


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2_path", "gemma_path"])
def test_every_tensor_has_a_name(name, request):
    checkpoint = open_checkpoint(request.getfixturevalue(name))
    kind, fields = torch_peer.settings_of(checkpoint)
    weights = torch_peer.weights_of(checkpoint)
    assert kind == {"smollm2_path": "llama", "gemma_path": "gemma3_text"}[name]
    per_layer = {"llama": 9, "gemma3_text": 13}[kind]
    assert len(weights) == fields["num_hidden_layers"] * per_layer + 2
    shape = (fields["num_attention_heads"] * fields["head_dim"], fields["hidden_size"])
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape == shape


def test_a_folder_is_refused():
    class Folder:
        kind, architecture, saved = "hf", "LlamaForCausalLM", None

    with pytest.raises(LoadError, match="reads GGUF files"):
        torch_peer.settings_of(Folder())
