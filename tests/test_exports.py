"""The public names, pinned: a name that appears or vanishes is a decision, not an accident."""

import subprocess
import sys
from importlib import import_module, metadata

import pytest

import xjax

PUBLIC = [
    "CapacityError",
    "CompletionOutput",
    "EngineError",
    "FinishReason",
    "LLM",
    "LoadError",
    "Request",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
    "TokenEvent",
    "XjaxError",
    "__version__",
    "convert",
]


def test_public_names():
    assert sorted(xjax.__all__) == sorted(PUBLIC)
    assert dir(xjax) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_name_can_be_had(name):
    assert getattr(xjax, name) is not None


def test_names_are_those_of_their_modules():
    assert xjax.SamplingParams is import_module("xjax.request").SamplingParams
    assert xjax.LoadError is import_module("xjax.errors").LoadError


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = xjax.Engine


def test_version_is_that_of_the_package():
    assert metadata.version("xjax") == xjax.__version__


def test_host_names_load_no_jax():
    code = "import sys; from xjax import SamplingParams, LoadError; print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
