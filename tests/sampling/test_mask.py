"""Grammar bits in the order the host packs them."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.sampling.reference import make_sampled
from xjax.sampling import mask
from xjax.sampling.sample import NO_TOKEN, NOT_FINITE, sample

pytestmark = pytest.mark.device


def _pack(allowed: np.ndarray) -> np.ndarray:
    padded = np.pad(allowed, [(0, 0), (0, -allowed.shape[1] % 32)])
    return np.packbits(padded, axis=1, bitorder="little").view("<i4")


@pytest.mark.parametrize("size", [31, 32, 100])
def test_only_allowed_tokens_stay(size):
    generator = np.random.default_rng(size)
    logits = generator.normal(size=(4, size)).astype(np.float32)
    allowed = generator.random((4, size)) < 0.5
    allowed[1] = True
    result = np.asarray(mask.apply(jnp.asarray(logits), jnp.asarray(_pack(allowed))))
    assert np.array_equal(result, np.where(allowed, logits, -np.inf))


def test_a_banned_or_broken_row_is_flagged():
    logits = np.zeros((3, 40), np.float32)
    logits[1, 3] = np.nan
    allowed = np.zeros((3, 40), bool)
    allowed[1:, 7] = True
    for temperature in (0.0, 1.0):
        choice = sample(
            jnp.asarray(logits),
            make_sampled(3, temperature=temperature),
            last_token=jnp.zeros(4, jnp.int32),
            allowed=jnp.asarray(_pack(allowed)),
        )
        assert list(choice.flags) == [NOT_FINITE | NO_TOKEN, NOT_FINITE, 0]
        assert choice.token[2] == 7
