"""`open_checkpoint` on both kinds of model."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.errors import LoadError


def _folder(folder: Path, config: Any, weights: str = "model.safetensors") -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file({"w": np.ones((2, 3), np.float32)}, folder / weights)
    return folder


def _gguf(path: Path, arch: str = "llama", with_tensor: bool = True) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    if with_tensor:
        writer.add_tensor("w", np.ones((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"architectures": ["LlamaForCausalLM"], "hidden_size": 3})
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.kind, checkpoint.architecture, checkpoint.path) == ("hf", "LlamaForCausalLM", folder)
    assert checkpoint.config["hidden_size"] == 3
    assert checkpoint.generation_config == {}
    assert checkpoint.files == (folder / "model.safetensors",)
    assert checkpoint.tensors["w"].read().shape == checkpoint.tensors["w"].shape == (2, 3)
    (folder / "generation_config.json").write_text('{"top_k": 5}')
    assert open_checkpoint(folder).generation_config == {"top_k": 5}


def test_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    path = _gguf(tmp_path / "m.gguf")
    for name in (path, tmp_path):
        checkpoint = open_checkpoint(name)
        assert (checkpoint.kind, checkpoint.architecture) == ("gguf", "llama")
        assert checkpoint.path == path
        assert checkpoint.config["general.architecture"] == "llama"
        assert checkpoint.tensors["w"].shape == (2, 3)  # [out, in], as in numpy
    _gguf(tmp_path / "n.gguf")
    with pytest.raises(LoadError, match="found several .m.gguf, n.gguf.: name one"):
        open_checkpoint(tmp_path)


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no such file or folder"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(LoadError, match="found neither"):
        open_checkpoint(tmp_path)
    with pytest.raises(LoadError, match="holds no tensors"):
        open_checkpoint(_gguf(tmp_path / "vocabulary.gguf", with_tensor=False))
    (tmp_path / "text.txt").write_text("hello, this is text")
    with pytest.raises(LoadError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "text.txt")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "config.json: not valid JSON"),
        ("[]", "expected a JSON object, found list"),
        ({}, "'architectures' does not name"),
        ({"architectures": []}, "'architectures' does not name"),
        ({"architectures": "Llama"}, "'architectures' does not name"),
        ({"architectures": [None]}, "'architectures' does not name"),
    ],
)
def test_bad_configs(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(LoadError, match="config.json") as caught:
        open_checkpoint(_folder(tmp_path, config))
    assert message in str(caught.value)


def test_a_weight_file_instead_of_its_folder(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"architectures": ["X"]})
    with pytest.raises(LoadError, match="name the folder"):
        open_checkpoint(folder / "model.safetensors")


def test_views_outlive_the_checkpoint_and_reading_twice_gives_the_same(tmp_path: Path) -> None:
    view = open_checkpoint(_gguf(tmp_path / "m.gguf")).tensors["w"]
    first = view.read()
    np.testing.assert_array_equal(first, view.read())
    np.testing.assert_array_equal(first, np.ones((2, 3)))
    assert not view.raw().flags.writeable
    out = np.zeros((2, 3), np.float16)
    view.read_into(out)
    np.testing.assert_array_equal(out, np.ones((2, 3)))


@pytest.mark.model
def test_the_default_model(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    assert checkpoint.architecture == "llama"
    assert len(checkpoint.tensors) == 272
    assert checkpoint.tensors["blk.0.ffn_gate.weight"].shape == (1536, 576)
    norm = checkpoint.tensors["blk.0.attn_norm.weight"].read()
    assert norm.shape == (576,)
    assert np.isfinite(norm).all()
