"""Draws against the float64 reference, and the law that a row depends on itself alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.sampling.reference import chi_square_p, distribution, make_sampled, order_of
from xjax.kernels.candidates.rows import WIDTH, blocks
from xjax.sampling import sample as sample_module
from xjax.sampling import wide
from xjax.sampling.candidates import NUM_CANDIDATES, from_logits
from xjax.sampling.sample import NO_TOKEN, NOT_FINITE, NOT_REACHED, choose, sample

pytestmark = pytest.mark.device

GOOD_FIT = 1e-6
TEMPERATURES, TOP_KS, TOP_PS, MIN_PS = (0.6, 1.4), (0, 6, 150), (1.0, 0.85), (0.0, 0.04)
KINDS = list(itertools.product(TEMPERATURES, TOP_KS, TOP_PS, MIN_PS))


@jax.jit
def _draw(logits, sampled):
    logits = jnp.broadcast_to(logits[None], (sampled.token.shape[0], logits.shape[0]))
    return choose(from_logits(logits, sampled.temperature), sampled)


def draws(logits, num=1024, *, temperature=1.0, seed=(5, 6), draw=_draw, **limits) -> np.ndarray:
    """`num` tokens of one row: the same logits at as many positions, in steps of one shape."""
    if 40 < logits.size < 300:  # as if of 300: shapes are few, since each is compiled
        logits = np.append(logits, np.full(300 - logits.size, -np.inf, np.float32))
    tokens, num_rows = [], {40: 8192, 300: 1024}.get(logits.size, 200)
    for start in range(0, num, num_rows):
        position = np.arange(start, start + num_rows)
        sampled = make_sampled(num_rows, position=position, seed=seed, temperature=temperature, **limits)
        token, flags = draw(jnp.asarray(logits), sampled)
        assert not np.any(flags)
        tokens.append(np.asarray(token))
    return np.concatenate(tokens)


def normal(seed, *shape, scale=2.0):
    return np.random.default_rng(seed).normal(scale=scale, size=shape).astype(np.float32)


# ---- the distribution -------------------------------------------------------------------


@pytest.mark.parametrize(("size", "num"), [(40, 8192), (300, 1024)])
def test_every_combination_fits(size, num):
    logits = normal(size, size)
    for kind in KINDS:
        limits = dict(zip(("temperature", "top_k", "top_p", "min_p"), kind, strict=True))
        fit = chi_square_p(draws(logits, num, **limits), distribution(logits, **limits))
        assert fit > GOOD_FIT, limits


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.95}, {"top_k": 1000, "top_p": 0.9}, {"top_k": 50}])
def test_a_real_vocabulary_fits(limits):
    logits = normal(3, 49152, scale=1.5)
    probabilities = distribution(logits, **limits)
    tokens = draws(logits, 600, **limits)
    assert probabilities[tokens].min() > 0
    # Hundreds of draws cannot test 49152 tokens one by one, so tokens near in order are joined.
    place = np.empty(logits.size, int)
    place[order_of(logits)] = np.arange(logits.size) * 2 // 3
    place = np.floor(np.log2(place + 1) * 3).astype(int)
    assert chi_square_p(place[tokens], np.bincount(place, weights=probabilities)) > GOOD_FIT


def test_a_tied_support_is_exact():
    # Nearly equal weights, so that some thousand draws show every token that can be drawn.
    logits = np.round(np.random.default_rng(8).uniform(0, 0.3, 160) * 16).astype(np.float32) / 16
    for top_k, top_p, min_p in [(0, 0.5, 0), (0, 0.95, 0), (37, 1, 0), (37, 0.7, 0), (150, 1, 0),
                                (150, 0.9, 0), (0, 1, 0.86), (0, 1, 0), (1, 1, 0)]:  # fmt: skip
        limits = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        probabilities = distribution(logits, **limits)
        tokens = draws(logits, 3072, **limits)
        assert set(tokens) == set(np.flatnonzero(probabilities)), limits
        assert chi_square_p(tokens, probabilities) > GOOD_FIT, limits


@jax.jit
def _wide_support(row, limits):
    logits = blocks(row, WIDTH, -jnp.inf)
    ids = jnp.arange(logits.size, dtype=jnp.int32).reshape(logits.shape)
    weights = jnp.exp((logits - jnp.max(row)) / limits.temperature)
    ranks = wide.ordered(logits)
    cut = wide.find_cut(ranks, ids, weights, limits, row.shape[0])
    return (cut.keeps(ranks, ids) & (weights > 0)).reshape(-1)[: row.shape[0]]


def test_wide_cuts_are_exact():
    generator = np.random.default_rng(0)
    for trial in range(60):
        logits = generator.normal(scale=generator.uniform(0.1, 5), size=1700).astype(np.float32)
        if trial % 2:
            logits = np.round(logits) + np.float32(0)  # a handful of values, hundreds of ties each
        if trial % 3 == 0:
            logits[generator.random(1700) < 0.3] = -np.inf
        limits = {
            "temperature": float(generator.uniform(0.5, 2)),
            "top_k": int(generator.choice([0, 1, 129, 700, 1699])),
            "top_p": float(generator.choice([1.0, 0.999, generator.uniform(0.01, 1)])),
        }
        expected = distribution(logits, **limits) > 0
        scalars = wide.Limits(
            temperature=jnp.float32(limits["temperature"]),
            top_k=jnp.int32(limits["top_k"]),
            top_p=jnp.float32(limits["top_p"]),
            min_p=jnp.float32(0),
        )
        assert np.array_equal(_wide_support(jnp.asarray(logits), scalars), expected), (trial, limits)


def test_narrow_counts_are_exact():
    generator = np.random.default_rng(1)
    logits = normal(2, 64, 900)
    limits = {
        "top_k": generator.choice([0, 1, 20, 128], 64),
        "top_p": generator.choice([1.0, 0.3, 0.9], 64),
        "min_p": generator.choice([0.0, 0.02, 0.3], 64),
    }
    candidates = jax.jit(from_logits)(jnp.asarray(logits), jnp.ones(64))
    arrays = wide.Limits(
        temperature=jnp.ones(64),
        top_k=jnp.asarray(limits["top_k"], jnp.int32),
        top_p=jnp.asarray(limits["top_p"], jnp.float32),
        min_p=jnp.asarray(limits["min_p"], jnp.float32),
    )
    scaled = candidates.values - candidates.values[:, :1]
    count, is_reached = jax.jit(sample_module.reach, static_argnums=3)(
        scaled, candidates.logsumexp, arrays, False
    )
    for j in range(64):
        expected = np.count_nonzero(distribution(logits[j], **{k: v[j] for k, v in limits.items()}))
        assert is_reached[j] or expected > NUM_CANDIDATES or limits["top_p"][j] == 0.9
        assert not is_reached[j] or count[j] == expected
    assert 0.5 < np.mean(is_reached) < 1


# ---- the tests can fail -----------------------------------------------------------------


def _broken_draw():
    """A fresh jit, which sees what was patched."""
    return jax.jit(lambda logits, sampled: _draw.__wrapped__(logits, sampled))


@pytest.mark.parametrize("extra", [1, -1])
def test_a_top_p_off_by_one_is_seen(monkeypatch, extra):
    right = sample_module.reach

    def wrong(*args):
        count, is_reached = right(*args)
        return count + extra, is_reached

    monkeypatch.setattr(sample_module, "reach", wrong)
    logits = normal(40, 40)
    tokens = draws(logits, 8192, top_p=0.85, draw=_broken_draw())
    assert chi_square_p(tokens, distribution(logits, top_p=0.85)) < GOOD_FIT


def test_a_wrong_wide_cut_is_seen(monkeypatch):
    monkeypatch.setattr(wide, "_last_id", lambda ties, ids, quota: jnp.int32(ids.size - 1))
    logits = np.zeros(300, np.float32)
    tokens = draws(logits, top_k=200, draw=_broken_draw())
    assert chi_square_p(tokens, distribution(logits, top_k=200)) < GOOD_FIT


def test_a_slightly_wrong_temperature_is_seen():
    logits = normal(40, 40)
    assert chi_square_p(draws(logits, 8192, temperature=1.1), distribution(logits)) < GOOD_FIT


# ---- the law ----------------------------------------------------------------------------

MIXED = [  # greedy, and rows that need candidates, a cut over V by k, by p, or all of V
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 200, "top_p": 0.95},
    {"temperature": 2.5, "top_p": 0.97},
    {"temperature": 1e-6},
    {"temperature": 1.0, "top_k": 40, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 300},
]


@functools.partial(jax.jit, static_argnames="masked")
def _sample(logits, sampled, last_token, masked=False):
    words = -(-logits.shape[1] // 32)
    allowed = jnp.full((logits.shape[0], words), -1, jnp.int32) if masked else None
    return sample(logits, sampled, last_token=last_token, allowed=allowed)


def _mixed_rows(rows, position, **more):
    values = {
        name: [MIXED[j].get(name, default) for j in rows]
        for name, default in [("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)]
    }
    seed = [(17 * j + 1, j) for j in rows]
    positions = [position + j for j in rows]
    return make_sampled(
        len(rows), position=positions, sample_id=rows, seed=seed, num_slots=8, **values, **more
    )


def test_a_row_depends_on_itself_alone():
    last = jnp.zeros(9, jnp.int32)
    num_differing_seeds = 0
    for position in range(0, 400, 20):
        logits = normal(position, 8, 1000)
        together = _sample(logits, _mixed_rows(range(8), position), last)
        full = _mixed_rows(range(8), position, full=True, num_pairs=16, want_logprobs=[0, 1] * 4)
        assert np.array_equal(_sample(logits, full, last, masked=True).token, together.token)
        reverse = list(range(7, -1, -1))
        turned = _sample(logits[::-1], _mixed_rows(reverse, position), last)
        assert np.array_equal(turned.token[::-1], together.token)
        for j in range(8):
            alone = _sample(logits[j : j + 1], _mixed_rows([j], position), last)
            assert alone.token[0] == together.token[j], (position, j)
        other = _sample(logits, _mixed_rows(range(8), position + 1), last)
        num_differing_seeds += np.count_nonzero(np.asarray(other.token != together.token))
    assert num_differing_seeds > 60


def test_every_part_of_the_key_counts():
    logits = normal(4, 300, scale=1.0)
    base = draws(logits)
    assert np.array_equal(draws(logits), base)
    for change in ({"seed": (6, 6)}, {"seed": (5, 7)}, {"sample_id": 1}):
        assert np.mean(draws(logits, **change) == base) < 0.2


def test_borders_draw_alike():
    # The same noise on both sides of a border: 128 candidates suffice or V is needed.
    logits = normal(11, 300, scale=4.0)
    narrow = draws(logits, top_k=NUM_CANDIDATES)
    over_v = draws(logits, top_k=NUM_CANDIDATES + 1)
    assert np.mean(narrow == over_v) > 0.97


# ---- edges ------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id():
    logits = normal(0, 8, 1000)
    logits[1, [700, 30, 31]] = logits[2, [776]] = logits[4, 999] = 100
    logits[3] = 1
    token = _sample(logits, make_sampled(8), jnp.zeros(9, jnp.int32)).token
    assert np.array_equal(token, np.argmax(logits, axis=1))


def _sparse(size, **values):
    logits = np.full(size, -np.inf, np.float32)
    logits[[int(name[1:]) for name in values]] = list(values.values())
    return logits


@pytest.mark.parametrize("size", [40, 300])
@pytest.mark.parametrize(
    ("values", "limits", "expected"),
    [
        ({"_0": 3e38, "_1": -3e38, "_2": 1}, {"temperature": 1e-6}, {0}),
        ({"_5": 3, "_1": 2.9999, "_2": 1}, {"temperature": 1e-6}, {5}),
        ({"_39": 5, "_3": 5}, {}, {39, 3}),
        ({"_39": -2e38, "_3": -2e38, "_4": -3e38}, {"temperature": 100.0}, {39, 3}),
        ({"_4": 2, "_6": 2, "_8": 2}, {"top_p": 1e-6}, {4}),
        ({"_4": 2, "_6": 2, "_8": 2}, {"top_p": 0.5}, {4, 6}),
        ({"_4": 2, "_6": 2, "_8": 2}, {"top_k": 2}, {4, 6}),
        ({"_4": 2, "_6": 2, "_8": 1.9}, {"min_p": 1.0}, {4, 6}),
        ({"_4": 2, "_6": 2, "_8": 1}, {"top_k": 200}, {4, 6, 8}),
        ({"_4": 2, "_6": 2, "_8": 2}, {"top_k": 1}, {4}),
    ],
)
def test_edges(size, values, limits, expected):
    assert set(draws(_sparse(size, **values), **limits)) == expected


@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_p": 1e-4}, {"top_k": 200, "top_p": 1e-4}])
def test_all_equal_logits_keep_the_lowest_id(limits):
    assert set(draws(np.full(300, -3e38, np.float32), **limits)) == {0}


@pytest.mark.parametrize("place", [0, 1, 63, 70, 999])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_are_flagged(temperature, place):
    logits = normal(0, 8, 1000)
    logits[0, place], logits[1, place], logits[2] = np.nan, np.inf, -np.inf
    choice = _sample(logits, make_sampled(8, temperature=temperature, num_slots=8), jnp.zeros(9, jnp.int32))
    assert list(choice.flags) == [NOT_FINITE, NOT_FINITE, NOT_FINITE | NO_TOKEN, 0, 0, 0, 0, 0]
    assert np.all((choice.token >= 0) & (choice.token < 1000))


def test_candidates_without_logits_say_when_they_are_too_few():
    logits = jnp.asarray(normal(9, 3, 2000))
    sampled = make_sampled(3, temperature=[0.0, 1.0, 1.0], top_k=[0, 20, 0])

    @jax.jit
    def both(logits, sampled):
        candidates = from_logits(logits, sampled.temperature)
        return choose(candidates, sampled), choose(candidates.replace(logits=None), sampled)

    (token, flags), (narrow_token, narrow_flags) = both(logits, sampled)
    assert list(flags) == [0, 0, 0]
    assert list(narrow_flags) == [0, 0, NOT_REACHED]
    assert np.array_equal(token[:2], narrow_token[:2])
