"""The few tokens a row will almost surely choose from, and the mass of all of them.

Made from logits here, or later by a head that never writes its logits out. Knows the
temperature, since that mass depends on it, and no other parameter.
"""

import jax
from flax import struct

from xjax.kernels.candidates import pick

NUM_CANDIDATES = 128


@struct.dataclass
class Candidates:
    """The first C tokens of each row, in the order larger logit, then lower id.

    values     [J, C] float32  logits, best first; NaN counts as +inf
    ids        [J, C] int32
    logsumexp  [J]    float32  of (logit - values[:, 0]) / temperature over all of V
    logits     [J, V] float32  or None when they were never written out

    Of a greedy row (temperature 0) only the first value and id are set.
    """

    values: jax.Array
    ids: jax.Array
    logsumexp: jax.Array
    logits: jax.Array | None


def from_logits(
    logits: jax.Array, temperature: jax.Array, num: int = NUM_CANDIDATES, *, backend: str = "xla"
) -> Candidates:
    """Pick each row's candidates; only rows with a temperature pay for more than the best one.

    logits       [J, V] float32
    temperature  [J]    float32, 0 for greedy
    returns      Candidates, C = min(num, V)
    """
    num = min(num, logits.shape[1])
    values, ids, logsumexp = pick(logits, temperature, num, backend=backend)
    return Candidates(values=values, ids=ids, logsumexp=logsumexp, logits=logits)
