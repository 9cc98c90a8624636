"""Engines over tiny models whose programs are compiled once for all tests of the folder."""

import pytest

from tests.engine.tiny import make_kit, tiny_gemma, tiny_llama
from xjax.engine.pack import shapes_of


@pytest.fixture(scope="session")
def llama_kit():
    """One page group; every shape ready."""
    kit = make_kit(tiny_llama())
    kit.table.wait(shapes_of(kit.plan.scheduler))
    return kit


@pytest.fixture(scope="session")
def gemma_kit():
    """Two page groups, windows crossed; every shape ready."""
    kit = make_kit(tiny_gemma(), rows=(4,))
    kit.table.wait(shapes_of(kit.plan.scheduler))
    return kit


@pytest.fixture
def llama_engine(llama_kit):
    """A fresh engine, whose pages must all be free again at the end."""
    yield from _checked(llama_kit)


@pytest.fixture
def gemma_engine(gemma_kit):
    """A fresh engine, whose pages must all be free again at the end."""
    yield from _checked(gemma_kit)


def _checked(kit):
    engine = kit.engine()
    yield engine
    engine.close()
    engine._scheduler.check()
