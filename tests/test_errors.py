"""Errors are one line of printable text, whatever went into them."""

import pytest

from tests.golden.checkpoints import write_folder
from tests.golden.quantized import write_safetensors
from tests.golden.recipe import CASES
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.errors import CapacityError, EngineError, LoadError, RequestError, XjaxError
from xjax.weights.load import load_params, read_config


@pytest.mark.parametrize("kind", [XjaxError, RequestError, CapacityError, LoadError, EngineError])
def test_what_drives_a_terminal_is_escaped(kind):
    assert str(kind("a\nb\x1b[2Jc\x7f\u2028\ud800 é 字")) == r"a\nb\x1b[2Jc\x7f\u2028\ud800 é 字"
    assert str(kind("")) == ""


@pytest.mark.device
def test_name_of_a_tensor(tmp_path):
    """One that would clear the screen and begin a line of its own."""
    write_folder(CASES["llama_tied"], tmp_path)
    values = open_checkpoint(tmp_path).tensors["model.norm.weight"].read()
    write_safetensors(tmp_path / "model.safetensors", {"\x1b[2J\nxjax: all is well": (values, "F32")})
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(LoadError) as caught:
        family, config = read_config(checkpoint)
        load_params(checkpoint, family, config, dtype="float32")
    assert str(caught.value).isprintable()
