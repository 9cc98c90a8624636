"""The few tokens a row will almost surely choose from, and the mass of all of them.

Made from logits here, or later by a head that never writes its logits out. Knows the
temperature, since that mass depends on it, and no other parameter.
"""

import jax
import jax.numpy as jnp
from flax import struct

from xjax.sampling.rows import WIDTH, blocks, first_best, for_rows, scale, take_row, top, total, without_nan

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


def from_logits(logits: jax.Array, temperature: jax.Array, num: int = NUM_CANDIDATES) -> Candidates:
    """Pick each row's candidates; only rows with a temperature pay for more than the best one.

    logits       [J, V] float32
    temperature  [J]    float32, 0 for greedy
    returns      Candidates, C = min(num, V)
    """
    num = min(num, logits.shape[1])
    best, best_id = first_best(without_nan(logits))

    def pick(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values, ids, logsumexp = carry
        row = take_row(logits, j)
        row_values, row_ids = top(row, num)
        weights = jnp.exp(scale(row, best[j], temperature[j]))
        mass = total(blocks(weights, WIDTH, 0.0))
        return values.at[j].set(row_values), ids.at[j].set(row_ids), logsumexp.at[j].set(jnp.log(mass))

    rest = (logits.shape[0], num - 1)
    values = jnp.concatenate([best[:, None], jnp.full(rest, -jnp.inf, jnp.float32)], axis=1)
    ids = jnp.concatenate([best_id[:, None], jnp.zeros(rest, jnp.int32)], axis=1)
    values, ids, logsumexp = for_rows(temperature > 0, pick, (values, ids, jnp.zeros_like(best)))
    return Candidates(values=values, ids=ids, logsumexp=logsumexp, logits=logits)
