"""Model files for a benchmark, by the names that the command line takes.

A name such as `random-1b-q4_k` is a Llama of 1.24 billion random numbers in that form, written once
below the folder of everything that is kept between runs.
"""

from collections.abc import Iterable

from xjax.checkpoints.hub import resolve
from xjax.config import cache_home
from xjax.errors import LoadError
from xjax_server.bench.loading.files import GGUFS, Shape, write_model

RANDOM = "random-1b-"


def find_models(names: Iterable[str]) -> list[str]:
    """Paths of models; "default" is the default one. Raises LoadError for what is not there."""
    return [_find(name) for name in names]


def _find(name: str) -> str:
    if not name.startswith(RANDOM):
        return str(resolve(None if name == "default" else name, cache_dir=cache_home()))
    form = f"gguf-{name.removeprefix(RANDOM)}"
    if form not in GGUFS:
        known = ", ".join(RANDOM + stored for stored in GGUFS.values())
        raise LoadError(f"no random model is called {name}; expected one of {known}")
    try:
        return str(write_model(cache_home() / "bench-models", form, Shape()))
    except OSError as error:
        raise LoadError(f"{name} cannot be written below {cache_home()}: {error.strerror}") from error
