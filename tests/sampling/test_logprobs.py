"""Log-probabilities and ranks against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.sampling.reference import make_sampled, order_of
from xjax.sampling.logprobs import measure
from xjax.sampling.sample import sample

pytestmark = pytest.mark.device


@pytest.mark.parametrize("size", [6, 3001])
def test_logprobs_match_float64(size):
    logits = np.random.default_rng(size).normal(scale=4, size=(5, size)).astype(np.float32)
    logits[2] = np.round(logits[2])
    logits[3, : size // 2] = -np.inf
    token, target = np.array([1, 2, 3, 5, 4], np.int32), np.array([-1, 0, -1, -1, 2])
    want = np.array([1, 1, 1, 1, 0])
    sampled = make_sampled(5, full=True, want_logprobs=want, target=target)
    result = jax.jit(measure)(logits, token, sampled)
    num = min(20, size)
    for j in np.flatnonzero(want):
        row = logits[j].astype(np.float64)
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        subject = target[j] if target[j] >= 0 else token[j]
        np.testing.assert_allclose(result.logprob[j], expected[subject], rtol=1e-6, atol=2e-6)
        assert result.rank[j] == 1 + np.count_nonzero(row > row[subject])
        assert np.array_equal(result.top_ids[j], order_of(row)[:num])
        np.testing.assert_allclose(
            result.top_logprobs[j], expected[order_of(row)[:num]], rtol=1e-6, atol=2e-6
        )
    assert not any(np.any(leaf[4]) for leaf in jax.tree.leaves(result))


def test_logprobs_are_of_raw_logits():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32))
    best = int(jnp.argmax(logits[0]))
    sampled = make_sampled(
        1, full=True, num_pairs=1, want_logprobs=1, pair_row=0, pair_id=best, pair_bias=-100, pair_count=-1
    )
    choice = sample(logits, sampled, last_token=jnp.zeros(2, jnp.int32))
    assert choice.logprobs is not None
    assert choice.logprobs.rank[0] == 2 and choice.logprobs.top_ids[0, 0] == best
    assert choice.token[0] == choice.logprobs.top_ids[0, 1]
