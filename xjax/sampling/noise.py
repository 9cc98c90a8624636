"""Counter-based randomness: the noise of a token id is a function of a row's key and the id.

A row's key and bits are those of `jax.random` (threefry, partitionable), but computed for the
ids that are looked at and no others. Knows no logits.
"""

import jax
import jax.numpy as jnp

from xjax.state.batch import Sampled

# First counter word: noise of token ids and noise of whole blocks of V never share a counter.
OF_TOKENS = 0
OF_BLOCKS = 1

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(key: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encrypt counters with Threefry-2x32, 20 rounds.

    key        [..., 2]  uint32
    high, low  [...]     uint32 counter words, broadcast against the key's leading dims
    returns    two [...] uint32

    Unrolled, so that it is one elementwise kernel. Salmon et al., "Parallel random numbers:
    as easy as 1, 2, 3" (2011).
    """
    first, second = key[..., 0], key[..., 1]
    schedule = (first, second, first ^ second ^ jnp.uint32(_PARITY))
    x, y = high + first, low + second
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation)))
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def row_keys(sampled: Sampled) -> jax.Array:
    """Make the key of each draw from the row's seed, sample id and position, nothing else.

    returns  [J, 2] uint32, as jax.random.fold_in(fold_in(key(seed), sample_id), position)
    """
    key = sampled.seed[:, ::-1]
    for data in (sampled.sample_id, sampled.position):
        words = data.astype(jnp.uint32)
        key = jnp.stack(threefry(key, jnp.zeros_like(words), words), axis=-1)
    return key


def gumbel(key: jax.Array, counter: jax.Array, kind: int = OF_TOKENS) -> jax.Array:
    """Draw the Gumbel noise of each counter value.

    key      [2] or [J, 2]  uint32
    counter  [n] or [J, n]  int32: token ids or block indexes
    returns  like counter   float32

    All 32 bits count where the noise is large, so that a token of probability 1e-9 is drawn
    as often as it should be: the uniform is read as a distance from zero, not from one.
    """
    low = counter.astype(jnp.uint32)
    x, y = threefry(key[..., None, :], jnp.full_like(low, kind), low)
    uniform = (x ^ y).astype(jnp.float32) * 2.0**-32 + 2.0**-33
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))
