"""From hidden states to logits: the contract that every backend fulfils.

logits(h, w, soft_cap=...)

h        [J, E]  model dtype, after the final norm
w        [V, E]  floating point
returns  [J, V]  float32; with a soft cap c, c * tanh(logit / c)
"""

from collections.abc import Callable

import jax

from xjax.kernels.head import xla

# The others have no form of their own yet.
_BACKENDS: dict[str, Callable[..., jax.Array]] = dict.fromkeys(("xla", "accelerator", "numba"), xla.logits)


def logits(h: jax.Array, w: jax.Array, *, soft_cap: float | None = None, backend: str = "xla") -> jax.Array:
    """Score every word for each position.

    h        [J, E]  model dtype
    w        [V, E]  floating point
    returns  [J, V]  float32
    """
    return _BACKENDS[backend](h, w, soft_cap)
