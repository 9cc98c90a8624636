"""What the golden tests share."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def quick_compiles() -> Iterator[None]:
    """Programs that run once are compiled without optimizations, in half the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
