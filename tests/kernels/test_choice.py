"""Which kernels an option means, by platform and by what the machine lacks."""

import importlib.util

import pytest

from xjax.errors import LoadError
from xjax.kernels import attention, choice

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def _fresh():
    choice._lack.cache_clear()
    yield
    choice._lack.cache_clear()


def test_by_platform():
    assert choice.choose("xla", "cpu") == "xla"
    assert choice.choose("auto", "tpu") == choice.choose("xla", "gpu") == "accelerator"
    with pytest.raises(LoadError, match="for CPUs"):
        choice.choose("numba", "gpu")


def test_several_devices():
    """A call of Numba's cannot be divided among devices by the compiler."""
    assert choice.choose("auto", "cpu", 2) == "xla"
    assert choice.choose("auto", "gpu", 2) == "accelerator"
    with pytest.raises(LoadError, match="numba is for one device"):
        choice.choose("numba", "cpu", 2)


def test_without_numba(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choice.choose("auto", "cpu") == "xla"
    with pytest.raises(LoadError, match="numba is not installed; take --kernels xla"):
        choice.choose("numba", "cpu")


def test_on_another_processor(monkeypatch):
    """auto takes what is fast; who asks by name gets what was asked for."""
    monkeypatch.setattr(choice.machine, "machine", lambda: "aarch64")
    assert choice.choose("auto", "cpu") == "xla"
    assert choice.choose("numba", "cpu") == "numba"


def test_numba_that_cannot_be_imported_is_one_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "xjax.kernels.attention.numba", None)
    monkeypatch.delattr(attention, "numba", raising=False)
    with pytest.raises(LoadError, match="--kernels numba: .*; mend the installation or take --kernels xla"):
        attention.prepare("numba")
    attention.prepare("xla")
