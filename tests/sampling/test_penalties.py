"""Sparse penalties against dense numpy counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.sampling.reference import make_sampled
from xjax.sampling import penalties

pytestmark = pytest.mark.device

ROWS, SIZE, PAIRS = 5, 60, 80
REPETITION = np.float32([1.0, 1.3, 0.7, 1.1, 2.0])
FREQUENCY = np.float32([0.0, 0.5, -1.0, 2.0, 0.1])
PRESENCE = np.float32([0.0, -0.4, 1.5, 0.0, 2.0])


def dense(logits, pairs, pending, last_token, slot):
    """Counts and bias as whole rows, in float64."""
    result = logits.astype(np.float64)
    for j in range(ROWS):
        counts = {token: count for row, token, count, _ in pairs if row == j and count >= 0}
        if pending[j]:
            token = int(last_token[slot[j]])
            counts[token] = counts.get(token, 0) + 1
        for token, count in counts.items():
            value = result[j, token]
            value = value / REPETITION[j] if value > 0 else value * REPETITION[j]
            result[j, token] = value - FREQUENCY[j] * count - PRESENCE[j] * (count > 0)
        for row, token, _, bias in pairs:
            if row == j:
                result[j, token] += bias
    return result


def packed(pairs, pending, slot):
    rows = pairs + [(ROWS, 0, -1, 0.0)] * (PAIRS - len(pairs))
    row, token, count, bias = (list(column) for column in zip(*rows, strict=True))
    return make_sampled(
        ROWS, full=True, num_pairs=PAIRS, num_slots=9, slot=slot, pending=pending,
        repetition_penalty=REPETITION, frequency_penalty=FREQUENCY, presence_penalty=PRESENCE,
        pair_row=row, pair_id=token, pair_count=count, pair_bias=bias,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_penalties_match_dense_counts(seed):
    generator = np.random.default_rng(seed)
    logits = generator.normal(scale=3, size=(ROWS, SIZE)).astype(np.float32)
    pairs = []
    for j in range(ROWS):
        counted = generator.choice(SIZE, 7, replace=False)
        pairs += [(j, int(t), int(generator.integers(0, 4)), float(j % 2)) for t in counted]
        biased = [int(counted[0]), *map(int, generator.choice(SIZE, 2, replace=False))]
        pairs += [
            (j, t, -1, float(b)) for t, b in zip(dict.fromkeys(biased), [-2.5, 100, -1e9], strict=False)
        ]
    generator.shuffle(pairs)
    pairs = [(int(j), int(t), int(c), float(b)) for j, t, c, b in pairs]
    slot, pending = np.array([3, 0, 8, 1, 9]), np.array([1, 1, 0, 1, 0])
    last_token = generator.integers(0, SIZE, 10).astype(np.int32)
    # The pending token of row 1 has a pair, that of row 0 a pair of bias alone, of row 3 none.
    last_token[0] = next(t for j, t, c, _ in pairs if j == 1 and c >= 0)
    row_0 = {t for j, t, c, _ in pairs if j == 0 and c >= 0}
    last_token[3] = next(t for j, t, c, _ in pairs if j == 0 and c < 0 and (seed % 2 or t not in row_0))
    last_token[1] = next(t for t in range(SIZE) if t not in {p[1] for p in pairs if p[0] == 3})
    result = jax.jit(penalties.apply)(logits, packed(pairs, pending, slot), jnp.asarray(last_token))
    expected = dense(logits, pairs, pending, last_token, slot)
    np.testing.assert_allclose(result, expected, rtol=2e-6, atol=2e-6)
    untouched = np.ones((ROWS, SIZE), bool)
    for j, t, _, _ in pairs:
        untouched[j, t] = False
    for j in np.flatnonzero(pending):
        untouched[j, last_token[slot[j]]] = False
    assert np.array_equal(np.asarray(result)[untouched], logits[untouched])


def test_padding_changes_no_bit():
    logits = np.random.default_rng(0).normal(size=(ROWS, SIZE)).astype(np.float32)
    sampled = packed([], [0] * ROWS, [9] * ROWS)
    assert np.array_equal(penalties.apply(jnp.asarray(logits), sampled, jnp.full(10, 7, jnp.int32)), logits)


def test_a_ban_is_a_bias():
    logits = jnp.ones((ROWS, SIZE), jnp.float32)
    sampled = packed([(0, 5, -1, -np.inf), (0, 5, 2, 0.0), (1, 6, 0, -np.inf)], [0] * ROWS, [9] * ROWS)
    result = np.asarray(penalties.apply(logits, sampled, jnp.zeros(10, jnp.int32)))
    assert result[0, 5] == result[1, 6] == -np.inf
    assert not np.isnan(result).any()
