"""Log-probabilities of raw logits: before penalties, bias, masks and temperature.

Knows which rows want them and for which token; nothing of how the token was chosen.
"""

import jax
import jax.numpy as jnp
from flax import struct

from xjax.kernels.candidates.rows import WIDTH, blocks, for_rows, scale, take_row, top, total
from xjax.state.batch import Sampled

NUM_TOP = 20


@struct.dataclass
class Logprobs:
    """Of the rows that want them; zeros elsewhere. A is min(20, V).

    logprob       [J]    float32  of the target, or of the chosen token
    rank          [J]    int32    1 + the number of tokens with a larger logit
    top_ids       [J, A] int32    best first
    top_logprobs  [J, A] float32
    """

    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def measure(logits: jax.Array, token: jax.Array, sampled: Sampled) -> Logprobs:
    """Report each wanting row's token, its rank and the best few; others cost nothing.

    logits   [J, V] float32, raw
    token    [J]    int32, the chosen ones
    returns  Logprobs
    """
    num = min(NUM_TOP, logits.shape[1])
    subject = jnp.where(sampled.target >= 0, sampled.target, token)

    def report(j: jax.Array, out: Logprobs) -> Logprobs:
        row = take_row(logits, j)
        values, ids = top(row, num)
        one = jnp.float32(1)
        log_mass = jnp.log(total(blocks(jnp.exp(scale(row, values[0], one)), WIDTH, 0.0)))
        own = row[subject[j]]
        return Logprobs(
            logprob=out.logprob.at[j].set(scale(own, values[0], one) - log_mass),
            rank=out.rank.at[j].set(1 + jnp.sum(row > own, dtype=jnp.int32)),
            top_ids=out.top_ids.at[j].set(ids),
            top_logprobs=out.top_logprobs.at[j].set(scale(values, values[0], one) - log_mass),
        )

    rows = logits.shape[0]
    empty = Logprobs(
        logprob=jnp.zeros(rows, jnp.float32),
        rank=jnp.zeros(rows, jnp.int32),
        top_ids=jnp.zeros((rows, num), jnp.int32),
        top_logprobs=jnp.zeros((rows, num), jnp.float32),
    )
    return for_rows(sampled.want_logprobs > 0, report, empty)
