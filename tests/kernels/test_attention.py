"""Paged attention against numpy in float64: ragged, windowed, poisoned, differentiated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xjax.kernels.attention import attend, xla

pytestmark = pytest.mark.device


def reference(q, k, v, table, row_of, position, *, scale, window, soft_cap):
    """Attend token by token in float64; q [N, H, D], pages [P, K, S, D]."""
    num_heads, num_kv, size = q.shape[1], k.shape[1], k.shape[2]
    out = np.zeros(q.shape)
    for n, p in enumerate(position):
        if p < 0:
            continue
        at = np.arange(0 if window is None else max(p - window + 1, 0), p + 1)
        page, offset = table[row_of[n]][at // size], at % size
        for h in range(num_heads):
            head = h // (num_heads // num_kv)
            keys, values = (x[page, head, offset].astype(np.float64) for x in (k, v))
            scores = keys @ q[n, h].astype(np.float64) * scale
            scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
            weight = np.exp(scores - scores.max())
            out[n, h] = weight @ values / weight.sum()
    return out


class Problem:
    """Pages of a few rows with decode tokens in front and tiles behind; NaN where nothing was written.

    lengths   tokens of each row before its decode token; -1 for a padding row
    chunks    for each tile run: row, first position, number of tokens
    """

    def __init__(
        self, lengths, chunks, *, heads=6, kv_heads=2, dim=8, size=4, tile=4, window=None, scale=0.3, seed=0
    ):
        rng = np.random.default_rng(seed)
        num_rows = max([len(lengths), *(row + 1 for row, _, _ in chunks)])
        max_pages = 32
        self.table = (1 + rng.permutation(num_rows * max_pages)).reshape(num_rows, max_pages).astype(np.int32)
        position, row_of = list(lengths), list(range(len(lengths)))
        for row, first, count in chunks:
            padding = -count % tile
            position += [*range(first, first + count), *[-1] * padding]
            row_of += [row] * (count + padding)
        self.position, self.row_of = np.array(position, np.int32), np.array(row_of, np.int32)
        shape = (num_rows * max_pages + 1, kv_heads, size, dim)
        self.k, self.v = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        for row in range(num_rows):
            mine = self.position[(self.row_of == row) & (self.position >= 0)]
            if not len(mine):
                self.table[row] = 0
                continue
            low = 0 if window is None else max(mine.min() - window + 1, 0)
            at = np.arange(low, mine.max() + 1)
            page = self.table[row][at // size]
            self.k[page, :, at % size], self.v[page, :, at % size] = rng.standard_normal(
                (2, len(at), kv_heads, dim), np.float32
            )
            self.table[row, : low // size] = 0
            self.table[row, mine.max() // size + 1 :] = 0
        self.q = rng.standard_normal((len(position), heads, dim), np.float32)
        self.options = {"num_decode": len(lengths), "tile": tile, "scale": scale, "window": window}

    def arrays(self):
        return [jnp.asarray(x) for x in (self.q, self.k, self.v, self.table, self.row_of, self.position)]

    def run(self, *, soft_cap=None, backend="xla"):
        run = jax.jit(functools.partial(attend, **self.options, soft_cap=soft_cap, backend=backend))
        return np.asarray(run(*self.arrays()))

    def check(self, *, soft_cap=None, backend="xla"):
        wanted = reference(
            self.q, self.k, self.v, self.table, self.row_of, self.position,
            scale=self.options["scale"], window=self.options["window"], soft_cap=soft_cap,
        )  # fmt: skip
        found = self.run(soft_cap=soft_cap, backend=backend)
        np.testing.assert_allclose(found, wanted, atol=3e-6)
        assert not found[self.position < 0].any()


@pytest.fixture(params=["xla", "numba"])
def backend(request):
    if request.param == "numba":
        pytest.importorskip("numba")
    return request.param


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Blocks of two pages, so that short rows cross many of them."""
    monkeypatch.setattr(xla, "_DECODE_BLOCK", 8)
    monkeypatch.setattr(xla, "_TILE_BLOCK", 8)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (8, 1)])
@pytest.mark.parametrize("window", [None, 1, 5, 16])
def test_ragged(heads, kv_heads, window, backend):
    Problem(
        [0, 37, -1, 8, 80], [(5, 0, 11), (6, 22, 4), (7, 3, 1), (8, 40, 17)],
        heads=heads, kv_heads=kv_heads, window=window,
    ).check(backend=backend)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_random_lengths(seed, backend):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(-1, 90, rng.integers(0, 5)).tolist()
    chunks = [(len(lengths) + i, int(rng.integers(0, 60)), int(rng.integers(1, 30))) for i in range(3)]
    Problem(lengths, chunks, window=[None, 7][seed % 2], size=[4, 3][seed // 2], seed=seed).check(
        backend=backend
    )


def test_soft_cap(backend):
    Problem([9, 30], [(2, 5, 7)]).check(soft_cap=0.7, backend=backend)


def test_only_padding_is_zero(backend):
    problem = Problem([-1, -1], [(2, 0, 4)])
    problem.position[:] = -1
    problem.table[:] = 0
    assert not problem.run(backend=backend).any()


def test_a_row_does_not_depend_on_the_others(backend):
    """Bit for bit: a row alone, beside a longer one and beside padding."""
    alone = Problem([37, -1, -1], [(3, 9, 9)])
    crowd = Problem([37, -1, -1], [(3, 9, 9)])
    crowd.position[1:3] = [80, 3]
    crowd.table[1:3] = np.arange(1, 65).reshape(2, 32)
    crowd.k, crowd.v = np.nan_to_num(crowd.k), np.nan_to_num(crowd.v)
    first, second = alone.run(backend=backend), crowd.run(backend=backend)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[3:], second[3:])


def test_trips_follow_the_lengths(monkeypatch):
    """A table of many pages costs nothing when the rows are short: the loops' bounds are read off."""
    trips, loop = [], jax.lax.fori_loop

    def counted(low, high, *rest):
        jax.debug.callback(lambda count: trips.append(int(count)), high)
        return loop(low, high, *rest)

    monkeypatch.setattr(jax.lax, "fori_loop", counted)
    Problem([8, -1], [(2, 0, 4)], size=4).run()
    jax.effects_barrier()
    assert sorted(trips) == [1, 2]


@pytest.mark.parametrize("window", [None, 6])
def test_gradient_is_that_of_the_sum_and_of_finite_differences(window):
    problem = Problem([5, 11], [(2, 4, 6)], window=window, heads=4)
    q, k, v, *where = problem.arrays()
    weight = jnp.asarray(np.random.default_rng(3).standard_normal(q.shape, np.float32))

    def loss(q, k, v):
        return jnp.sum(weight * attend(q, k, v, *where, **problem.options))

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    rng = np.random.default_rng(4)
    for i, (gradient, value) in enumerate(zip(gradients, (q, k, v), strict=True)):
        assert np.isfinite(gradient).all()
        direction = np.where(np.isfinite(value), rng.standard_normal(value.shape), 0)
        ends = []
        for sign in (1, -1):
            arrays = [np.asarray(x, np.float64) for x in (q, k, v)]
            arrays[i] = arrays[i] + sign * 1e-5 * direction
            out = reference(
                *arrays,
                problem.table,
                problem.row_of,
                problem.position,
                scale=0.3,
                window=window,
                soft_cap=None,
            )
            ends.append(float((np.asarray(weight, np.float64) * out).sum()))
        slope = (ends[0] - ends[1]) / 2e-5
        assert float(np.sum(np.asarray(gradient) * direction)) == pytest.approx(slope, rel=1e-4, abs=1e-4)


def test_bfloat16_keeps_its_type_and_accumulates_in_float32():
    problem = Problem([20, 3], [(2, 5, 7)])
    arrays = problem.arrays()
    low = [x.astype(jnp.bfloat16) for x in arrays[:3]]
    run = jax.jit(functools.partial(attend, **problem.options))
    found = run(*low, *arrays[3:])
    assert found.dtype == jnp.bfloat16
    exact = run(*(x.astype(jnp.float32) for x in low), *arrays[3:])
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(exact), atol=1e-2)
