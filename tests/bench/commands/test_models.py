"""Random models by name: written once, where everything is kept, whole for every command."""

import pytest

from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.errors import LoadError
from xjax.text.tokenizer import load_tokenizer
from xjax_server.bench.commands import models
from xjax_server.bench.loading.files import Shape


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Small models below a folder of their own."""
    shape = Shape(layers=2, embed=256, ffn=512, heads=4, kv_heads=2, vocab=320)
    monkeypatch.setattr(models, "Shape", lambda: shape)
    monkeypatch.setattr(models, "cache_home", lambda: tmp_path)


def test_a_random_model_is_written_once_with_a_vocabulary(tiny, tmp_path):
    (path,) = models.find_models(["random-1b-q4_k"])
    assert path.startswith(str(tmp_path))
    checkpoint = open_checkpoint(tmp_path / path)
    assert {view.dtype for name, view in checkpoint.tensors.items() if "norm" not in name} == {"q4_k"}
    tokenizer = load_tokenizer(checkpoint, cache_dir=tmp_path)
    # A space before the text, which is three bytes, and what is no ASCII byte by byte.
    assert tokenizer.encode("Hä") == [1, *(3 + byte for byte in "▁Hä".encode())]
    assert tokenizer.eos_ids == {2}
    before = (tmp_path / path).stat().st_mtime_ns
    assert models.find_models(["random-1b-q4_k"]) == [path]
    assert (tmp_path / path).stat().st_mtime_ns == before


def test_an_unknown_form_is_refused():
    with pytest.raises(LoadError, match=r"no random model is called random-1b-q9.*random-1b-q4_k"):
        models.find_models(["random-1b-q9"])
