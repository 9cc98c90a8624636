"""Model files for a benchmark, by the names that the command line takes."""

from collections.abc import Iterable

from xjax.checkpoints.hub import resolve
from xjax.config import cache_home


def find_models(names: Iterable[str]) -> list[str]:
    """Paths of models; "default" is the default one. Raises LoadError for what is not there."""
    return [str(resolve(None if name == "default" else name, cache_dir=cache_home())) for name in names]
