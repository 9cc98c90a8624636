"""A GGUF file as a folder for peers: what is written is what our own reader reads back."""

import json

import numpy as np
import pytest

from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.text.tokenizer import load_tokenizer
from xjax_server.bench.beside.folder import write_folder


@pytest.mark.model
def test_folder_has_the_same_tokens_and_weights(smollm2_path, tmp_path):
    folder = write_folder(smollm2_path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == 30
    file, copy = open_checkpoint(smollm2_path), open_checkpoint(folder)
    text = "Größe: 12 + 30 = 42\n\tdef f(x): return x"
    assert load_tokenizer(copy).encode(text) == load_tokenizer(file).encode(text)
    embedding = copy.tensors["model.embed_tokens.weight"].read()
    np.testing.assert_array_equal(embedding, file.tensors["token_embd.weight"].read())
    down = copy.tensors["model.layers.29.mlp.down_proj.weight"].read()
    np.testing.assert_array_equal(down, file.tensors["blk.29.ffn_down.weight"].read())
