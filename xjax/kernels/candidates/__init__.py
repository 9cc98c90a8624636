"""From logits to each row's first tokens and its mass: the contract that every backend fulfils.

    pick(logits, temperature, num, backend=...) -> values, ids, logsumexp

logits       [J, V]    float32; NaN counts as +inf
temperature  [J]       float32; 0 for greedy: such a row gets its best alone, then -inf and 0
values       [J, num]  float32, in the order larger logit, then lower id; num is at most V
ids          [J, num]  int32
logsumexp    [J]       float32 of (logit - values[:, 0]) / temperature over all of V; 0 where greedy

-0 is just below 0 where a row has a temperature, and equal to it where it is greedy. A row's result does
not depend on the others, with `numba` not by a bit, nor on the number of threads.
"""

from collections.abc import Callable

import jax

from xjax.kernels.candidates import xla

Picked = tuple[jax.Array, jax.Array, jax.Array]


def _numba(logits: jax.Array, temperature: jax.Array, num: int) -> Picked:
    from xjax.kernels.candidates import numba

    return numba.pick(logits, temperature, num)


_BACKENDS: dict[str, Callable[..., Picked]] = {"xla": xla.pick, "accelerator": xla.pick, "numba": _numba}


def prepare(backend: str) -> None:
    """Make known to XLA what a backend's programs call; before one is loaded. Raises LoadError."""
    if backend == "numba":
        from xjax.kernels.candidates import numba

        numba.register()


def pick(logits: jax.Array, temperature: jax.Array, num: int, *, backend: str = "xla") -> Picked:
    """Pick each row's first tokens, and take the mass of all.

    logits       [J, V] float32
    temperature  [J]    float32, 0 for greedy
    returns      values [J, num] float32, ids [J, num] int32, logsumexp [J] float32
    """
    return _BACKENDS[backend](logits, temperature, num)
