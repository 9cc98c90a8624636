"""Products with packed weights and all that stands between them: the contract of every backend.

    run(x, norm, first, second, finish, *, eps, backend)

    x        [N, E]           model dtype
    norm     of x             or None
    first    its product      [N, Out]; of several matrices, in turns
    second   bias, activation, and another product; or None
    finish   bias, norm, scale, residual; or None
    returns  [N, Out]         dtype of x

    [norm -> quantize -> first] -> [bias -> activation -> quantize -> second] -> [finish]

Products are those of `kernels.linear.linear_packed`, to the bit. A row's result does not depend on
the others, with `numba` not by a bit. Has no gradient.
"""

from collections.abc import Callable
from typing import Any

import jax

from xjax.kernels.chain import xla
from xjax.kernels.chain.parts import Finish, First, Norm, Packed, Second

__all__ = ["Finish", "First", "Norm", "Packed", "Second", "prepare", "run"]


def _numba(*arguments: Any) -> jax.Array:
    from xjax.kernels.chain import numba

    return numba.run(*arguments)


_BACKENDS: dict[str, Callable[..., jax.Array]] = {"xla": xla.run, "accelerator": xla.run, "numba": _numba}


def prepare(backend: str) -> None:
    """Make known to XLA what a backend's programs call; before one is loaded. Raises LoadError."""
    if backend == "numba":
        from xjax.kernels.chain import numba

        numba.register()


def run(
    x: jax.Array,
    norm: Norm | None,
    first: First,
    second: Second | None = None,
    finish: Finish | None = None,
    *,
    eps: float,
    backend: str = "xla",
) -> jax.Array:
    """Pass rows through one product or two.

    x        [N, E]     model dtype
    returns  [N, Out]   dtype of x
    """
    return _BACKENDS[backend](x, norm, first, second, finish, eps)
