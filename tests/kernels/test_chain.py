"""Chains of packed products: what stands between them to the bit, the same bits wherever a row is."""

import functools
import math
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba")

from tests.kernels.rows import activated
from tests.kernels.test_packed import draw
from tests.kernels.test_packed import rows_of as _rows_of
from xjax.kernels import chain
from xjax.kernels.activation import ACTIVATIONS, activate
from xjax.kernels.chain import Finish, First, Norm, Packed, Second
from xjax.kernels.linear import linear_packed
from xjax.kernels.linear.forms import FORMS

pytestmark = pytest.mark.device

EPS = np.float32(1e-5)
F = np.float32


# ---- what `rows` does, in numpy ---------------------------------------------------------


def lane_sums(x):
    """Sums of rows, lane by lane of 16, then by halves."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 16))).reshape(len(x), -1, 16)
    sums = np.zeros((len(x), 16), F)
    for i in range(padded.shape[1]):
        sums = sums + padded[:, i]
    for step in (8, 4, 2, 1):
        sums = sums + sums[:, np.arange(16) ^ step]
    return sums[:, :1]


def norm_rows(x, weight, bias=None):
    mean = F(0) if bias is None else lane_sums(x) / F(x.shape[1])
    away = x - mean
    factor = F(1) / np.sqrt(lane_sums(away * away) / F(x.shape[1]) + EPS)
    return away * factor * weight + (F(0) if bias is None else bias)


def finish_rows(out, finish):
    out = out + (F(0) if finish.bias is None else finish.bias)
    if finish.post_norm is not None:
        factor = F(1) / np.sqrt(lane_sums(out * out) / F(out.shape[1]) + EPS)
        out = out * factor * finish.post_norm
    return out * F(finish.scale) + finish.residual


# ---- problems ---------------------------------------------------------------------------


def rows_of(num_rows, num_in) -> Any:
    return _rows_of(num_rows, num_in)


def numbers(*shape, seed) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def packed(form, num_out, num_in, seed):
    data: Any = draw(FORMS[form], num_out, num_in, seed)
    return Packed(data, FORMS[form], num_out)


def times(x, weight, backend="numba"):
    run = jax.jit(functools.partial(linear_packed, form=weight.form, num_out=weight.num_out, backend=backend))
    return np.asarray(run(x, weight.data))


def run(x, norm, first, second=None, finish=None, backend="numba"):
    """As a model calls it: arrays are arguments."""
    arrays, tree = jax.tree.flatten(
        (x, *(None if part is None else vars(part) for part in (norm, first, second, finish))),
        is_leaf=lambda leaf: isinstance(leaf, np.ndarray),
    )
    is_array = [isinstance(leaf, np.ndarray) for leaf in arrays]

    @jax.jit
    def call(*given):
        parts = iter(given)
        leaves = [next(parts) if flag else leaf for flag, leaf in zip(is_array, arrays, strict=True)]
        x, *made = jax.tree.unflatten(tree, leaves)
        kinds = (Norm, First, Second, Finish)
        given_parts = zip(kinds, made, strict=True)
        whole: list[Any] = [None if part is None else kind(**part) for kind, part in given_parts]
        return chain.run(x, *whole, eps=float(EPS), backend=backend)

    return np.asarray(call(*(leaf for leaf in arrays if isinstance(leaf, np.ndarray))))


def one(weight):
    return First((weight,), ((0, weight.num_out),))


# ---- laws -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 3, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_norm_in_front(num_rows, bias):
    x, weight = rows_of(num_rows, 320), packed("q4_1", 100, 320, 1)
    norm = Norm(numbers(320, seed=2), numbers(320, seed=3) if bias else None)
    normed = norm_rows(x, norm.weight, norm.bias)
    wide = x.astype(np.float64)
    wide = wide - (wide.mean(1, keepdims=True) if bias else 0)
    wide = wide / np.sqrt((wide * wide).mean(1, keepdims=True) + EPS) * norm.weight
    np.testing.assert_allclose(normed, wide + (norm.bias if bias else 0), rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(run(x, norm, one(weight)), times(normed, weight))


@pytest.mark.parametrize("num_rows", [1, 5, 33])
@pytest.mark.parametrize("parts", ["residual", "bias", "norm", "all"])
def test_what_follows(num_rows, parts):
    x, weight = rows_of(num_rows, 256), packed("q4_k", 90, 256, 1)
    finish = Finish(
        numbers(num_rows, 90, seed=4),
        numbers(90, seed=5) if parts in ("bias", "all") else None,
        numbers(90, seed=6) if parts in ("norm", "all") else None,
        0.22 if parts == "all" else 1.0,
    )
    np.testing.assert_array_equal(
        run(x, None, one(weight), None, finish), finish_rows(times(x, weight), finish)
    )


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_equal_float64(kind):
    """Called by itself: codes of 8 bits behind it would hide what is wrong."""
    x = np.concatenate([np.linspace(-40, 40, 4001), np.linspace(-1, 1, 2001), [0, -0.0, 90, -90]]).astype(F)
    wide = x.astype(np.float64)
    inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    halves = {
        "silu": lambda: 1 / (1 + np.exp(-wide)),
        "gelu_tanh": lambda: 1 / (1 + np.exp(-2 * np.maximum(inner, -300))),
        "gelu": lambda: np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in wide]),
    }
    np.testing.assert_allclose(activated(kind, x), wide * halves[kind](), rtol=4e-6, atol=1e-12)
    np.testing.assert_allclose(activated(kind, x), activate(jnp.asarray(x), kind), rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(activated(kind, np.array([np.inf, np.nan], F)), [np.inf, np.nan])


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize(("is_gated", "joined"), [(True, False), (True, True), (False, False)])
def test_two_products(kind, is_gated, joined):
    inner, norm = 96, Norm(numbers(128, seed=2))
    width = inner * (2 if is_gated else 1)
    first = one(packed("q5_0", width, 128, 1))
    if joined:
        pieces = (packed("q5_0", inner, 128, 1), packed("q8_0", inner, 128, 7))
        first = First(pieces, ((0, inner), (1, inner)))
    second = Second(numbers(width, seed=8), kind, is_gated, packed("q4_0", 128, inner, 9))
    for num_rows in (1, 2, 40):
        x = rows_of(num_rows, 128)
        finish = Finish(x)
        out = np.concatenate([times(norm_rows(x, norm.weight), piece) for piece in first.pieces], axis=1)
        out = out + second.bias
        act = activated(kind, out[:, :inner].ravel()).reshape(num_rows, inner)
        act = act * out[:, inner:] if is_gated else act
        wanted = finish_rows(times(act, second.weight), finish)
        np.testing.assert_array_equal(run(x, norm, first, second, finish), wanted)


@pytest.mark.parametrize("num_rows", [1, 4, 35])
def test_matrices_in_turns(num_rows):
    x = rows_of(num_rows, 256)
    pieces = (packed("q5_0", 60, 256, 1), packed("q6_k", 30, 256, 2), packed("q8_0", 10, 256, 3))
    first = First(pieces, ((0, 5), (2, 2), (1, 6), (0, 7)))
    outs = [times(x, piece) for piece in pieces]
    rows = []
    for period in range(5):
        a, b, c = (out[:, period * n : (period + 1) * n] for out, n in zip(outs, (12, 6, 2), strict=True))
        rows += [a[:, :5], c, b, a[:, 5:]]
    wanted = np.concatenate(rows, axis=1)
    np.testing.assert_array_equal(run(x, None, first), wanted)
    finish = Finish(numbers(num_rows, 100, seed=4), post_norm=numbers(100, seed=5))
    np.testing.assert_array_equal(run(x, None, first, None, finish), finish_rows(wanted, finish))


def test_equals_xla():
    """Apart from codes of activations that lie on the edge between two."""
    x, norm = rows_of(9, 128), Norm(numbers(128, seed=2))
    pieces = (packed("q5_0", 96, 128, 1), packed("q8_0", 96, 128, 7))
    first = First(pieces, ((0, 96), (1, 96)))
    second = Second(None, "silu", True, packed("q4_0", 128, 96, 9))
    finish = Finish(x, numbers(128, seed=3), numbers(128, seed=4), 0.5)
    found = run(x, norm, first, second, finish)
    wanted = run(x, norm, first, second, finish, backend="xla")
    assert np.median(np.abs(found - wanted)) < 1e-5
    np.testing.assert_allclose(found, wanted, atol=0.01 * np.abs(wanted).max())


def _feed_forward(num_rows=513):
    norm, first = Norm(numbers(96, seed=2), numbers(96, seed=3)), one(packed("q4_1", 512, 96, 1))
    second = Second(numbers(512, seed=4), "gelu_tanh", True, packed("q6_k", 96, 256, 9))
    x = rows_of(num_rows, 96)
    return x, norm, first, second, Finish(x, numbers(96, seed=5), numbers(96, seed=6), 0.7)


def test_bits_depend_on_the_row_alone():
    x, norm, first, second, finish = _feed_forward()
    whole = run(x, norm, first, second, finish)
    assert np.isfinite(whole).all()
    for rows in (slice(0, 1), slice(512, 513), slice(100, 107), slice(37, 300)):
        part = Finish(x[rows], finish.bias, finish.post_norm, finish.scale)
        np.testing.assert_array_equal(run(x[rows], norm, first, second, part), whole[rows])


def test_a_row_that_is_no_number_stays_alone():
    x, norm, first, second, finish = _feed_forward(40)
    whole = run(x, norm, first, second, finish)
    bad = x.copy()
    bad[17, 5] = np.nan
    found = run(bad, norm, first, second, Finish(bad, finish.bias, finish.post_norm, finish.scale))
    assert np.isnan(found[17]).all()
    np.testing.assert_array_equal(np.delete(found, 17, 0), np.delete(whole, 17, 0))


def test_several_executions_at_once():
    x, norm, first, second, finish = _feed_forward(64)
    wanted = run(x, norm, first, second, finish)
    wrong = []

    def work():
        for _ in range(20):
            found = run(x, norm, first, second, finish)
            if not np.array_equal(found, wanted):
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads) and not wrong


def test_what_does_not_fit_is_an_error():
    x, weight = rows_of(2, 64), packed("q4_0", 32, 64, 1)
    with pytest.raises(Exception, match="do not fit"):
        run(x, Norm(numbers(63, seed=1)), one(weight))
    with pytest.raises(Exception, match="do not fit"):
        run(x, None, one(weight._replace(num_out=64)))
    with pytest.raises(Exception, match="do not fit"):
        run(x, None, one(weight), None, Finish(numbers(3, 32, seed=1)))
