"""Numba's attention: the laws that `xla` does not keep to the bit, real shapes, dtypes, errors, disk."""

import functools
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

pytest.importorskip("numba")

from tests.kernels.test_attention import Problem, reference
from xjax.engine.audit import audit_donation
from xjax.kernels.attention import attend, numba
from xjax.kernels.pages import write

pytestmark = pytest.mark.device

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size", "tile", "window"),
    [
        (9, 3, 64, 16, 128, None),  # SmolLM2
        (4, 1, 256, 16, 128, 150),  # Gemma 3, a shorter window
        (5, 5, 40, 16, 32, None),  # part of a vector left
        (7, 1, 80, 7, 16, 33),  # a panel half full; pages that end anywhere
        (26, 2, 1, 1, 5, 1),
    ],
)
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_real_and_odd_shapes(heads, kv_heads, dim, size, tile, window, soft_cap):
    """Contexts over several blocks of 128, with pages around them full of NaN."""
    longest = 31 * size
    lengths = [0, longest, -1, longest // 2]
    chunks = [(4, longest // 3, longest // 2), (5, 0, min(longest, 200)), (6, longest - 1, 1)]
    problem = Problem(
        lengths, chunks, heads=heads, kv_heads=kv_heads, dim=dim, size=size, tile=tile, window=window,
        scale=dim**-0.5,
    )  # fmt: skip
    problem.check(backend="numba", soft_cap=soft_cap)


@pytest.mark.parametrize("seed", range(12))
def test_against_xla_on_random_shapes(seed):
    rng = np.random.default_rng(seed)
    kv_heads, group, size = int(rng.integers(1, 4)), int(rng.integers(1, 14)), int(rng.integers(1, 20))
    lengths = rng.integers(-1, 31 * size, rng.integers(0, 4)).tolist()
    tile, chunks = int(rng.integers(1, 70)), []
    for i in range(int(rng.integers(1, 4))):
        first = int(rng.integers(0, 30 * size))
        chunks.append((len(lengths) + i, first, int(rng.integers(1, 31 * size - first + 1))))
    problem = Problem(
        lengths, chunks, heads=kv_heads * group, kv_heads=kv_heads, dim=int(rng.integers(1, 70)), size=size,
        tile=tile, window=[None, int(rng.integers(1, 200))][seed % 2], seed=seed,
    )  # fmt: skip
    cap = [None, 2.0][seed // 2 % 2]
    found, wanted = problem.run(backend="numba", soft_cap=cap), problem.run(soft_cap=cap)
    np.testing.assert_allclose(found, wanted, atol=5e-6)


def _row(tokens, tile, *, window, as_decode=False, beside=0):
    """Attend the tokens (first, stop) of one sequence, in tiles or one by one, beside other rows."""
    first, stop = tokens
    rng = np.random.default_rng(5)
    size, pages, dim = 16, 20, 64
    k, v = rng.standard_normal((2, 4 * pages + 1, 2, size, dim), np.float32)
    q = rng.standard_normal((size * pages, 6, dim), np.float32)
    tables = (1 + rng.permutation(4 * pages)).reshape(4, pages).astype(np.int32)
    at = np.arange(first, stop, dtype=np.int32)
    if as_decode:
        # Each token's own row of the tables is the same sequence's.
        own = jnp.asarray(np.concatenate([tables[1:], np.repeat(tables[:1], len(at), 0)]))
        rows, places, queries = 3 + np.arange(len(at)), at, q[at]
        options = {"num_decode": len(at), "tile": tile}
    else:
        own, padding = jnp.asarray(tables), -len(at) % tile
        places = np.concatenate([at, np.full(padding, -1, np.int32)])
        rows, queries = (
            np.zeros(len(places), np.int64),
            np.concatenate([q[at], np.ones((padding, 6, dim), "f4")]),
        )
        options = {"num_decode": 0, "tile": tile}
    if beside:
        extra = np.ones((beside * tile, 6, dim), np.float32)
        rows = np.concatenate([rows, np.repeat(1 + np.arange(beside) % 2, tile)])
        places = np.concatenate([places, np.tile(np.arange(tile), beside) + 7])
        queries = np.concatenate([queries, extra])
    run = jax.jit(
        functools.partial(attend, **options, scale=0.125, window=window, soft_cap=None, backend="numba")
    )
    arrays = (queries, k, v, own, rows.astype(np.int32), places.astype(np.int32))
    return np.asarray(run(*map(jnp.asarray, arrays)))[: len(at)]


@pytest.mark.parametrize("window", [None, 1, 37, 130])
def test_bits_depend_on_the_token_alone(window):
    """Tiles of any size, any chunking, one by one as decode, beside other rows: the same bits."""
    whole = _row((0, 300), 128, window=window)
    assert np.isfinite(whole).all()
    for tile in (1, 3, 16, 32, 300):
        np.testing.assert_array_equal(_row((0, 300), tile, window=window), whole)
    for first, stop in ((0, 1), (5, 77), (100, 229), (299, 300)):
        np.testing.assert_array_equal(_row((first, stop), 32, window=window), whole[first:stop])
    np.testing.assert_array_equal(_row((40, 90), 32, window=window, beside=3), whole[40:90])
    np.testing.assert_array_equal(_row((0, 300), 1, window=window, as_decode=True), whole)


def test_the_sum_at_each_position_counts():
    """The comparison above sees a single key: moving one changes every token that sees it."""
    whole, other = _row((0, 300), 128, window=None), _row((1, 300), 128, window=37)
    assert (whole[100:] != other[99:]).any(axis=(1, 2)).all()


def test_bfloat16_bits_are_read_exactly():
    problem = Problem([20, 3, 200], [(3, 5, 70)], size=16, dim=48, tile=32)
    q, k, v, *where = problem.arrays()
    bits = [jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16) for x in (k, v)]
    wide = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in (k, v)]
    run = jax.jit(functools.partial(attend, **problem.options, backend="numba"))
    np.testing.assert_array_equal(run(q, *bits, *where), run(q, *wide, *where))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_other_pages_go_to_xla(dtype):
    problem = Problem([20, 3], [(2, 5, 7)])
    low = [x.astype(dtype) for x in problem.arrays()[:3]]
    runs = [
        jax.jit(functools.partial(attend, **problem.options, backend=name))(*low, *problem.arrays()[3:])
        for name in ("numba", "xla")
    ]
    assert runs[0].dtype == dtype
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in runs))


def test_queries_keep_their_type():
    problem = Problem([20, 3], [(2, 5, 7)])
    q, *rest = problem.arrays()
    found = jax.jit(functools.partial(attend, **problem.options, backend="numba"))(
        q.astype(jnp.bfloat16), *rest
    )
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), problem.run(), atol=2e-2)


def test_nan_stays_with_the_tokens_that_see_it():
    """A key or a query that is NaN spoils what sees it, and that is seen: nothing turns it into a number."""
    problem = Problem([], [(0, 0, 40)], size=4, dim=16, tile=40)
    page, offset = divmod(30, 4)
    problem.k[problem.table[0, page], 0, offset, 3] = np.nan
    problem.q[5, 5] = np.nan
    found = np.isnan(problem.run(backend="numba")).any(-1)
    wanted = np.zeros_like(found)
    wanted[30:, :3] = True
    wanted[5, 5] = True
    np.testing.assert_array_equal(found, wanted)


def test_infinite_and_huge_scores():
    problem = Problem([7], [(1, 0, 9)], size=4, dim=16)
    problem.q *= 1e18
    found = problem.run(backend="numba")
    assert np.isfinite(found).all()
    wanted = reference(
        problem.q, problem.k, problem.v, problem.table, problem.row_of, problem.position,
        scale=0.3, window=None, soft_cap=None,
    )  # fmt: skip
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_page_ids_that_no_page_has_do_not_crash():
    problem = Problem([7], [(1, 0, 9)])
    problem.table[:] = [[10**6, -5] * 16] * 2
    problem.run(backend="numba")


def test_wrong_arrays_are_refused_by_the_call_itself():
    problem = Problem([7], [(1, 0, 9)])
    q, k, v, *where = problem.arrays()
    shapes = (jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct((2, 1 << 20), jnp.float32))
    call = jax.jit(jax.ffi.ffi_call(numba.NAME, shapes))
    numba.register()
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*float32"):
        jax.block_until_ready(call(q.astype(jnp.bfloat16), k, v, *where))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*bfloat16 bits"):
        jax.block_until_ready(call(q, k.astype(jnp.float16), v.astype(jnp.float16), *where))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*q \[N, H, D\]"):
        jax.block_until_ready(call(q[..., :4], k, v, *where))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*layout"):
        jax.block_until_ready(call(q, k, v, *where))


def test_pages_are_read_where_they_are():
    """Written and read in one program, donated pages are neither copied nor moved."""
    problem = Problem([20, 3], [(2, 5, 7)], dim=64, size=16)
    q, k, v, *where = problem.arrays()
    new = jnp.ones((4, 2, 64))

    def run(pages, q, where):
        pages = write(*pages, new, new, jnp.arange(4, dtype=jnp.int32), backend="numba")
        return pages, attend(q, *pages, *where, **problem.options, backend="numba")

    compiled = jax.jit(run, donate_argnums=0).lower((k, v), q, where).compile()
    audit_donation(compiled, donated=(k, v), first_argument=0, name="test", max_temporary=8 << 20)


LOAD = """
import pickle, sys, numpy as np, jax
from jax.experimental import serialize_executable
from xjax.kernels import attention
attention.prepare("numba")
saved, arrays, wanted = pickle.load(open(sys.argv[1], "rb"))
run = serialize_executable.deserialize_and_load(*saved, execution_devices=jax.devices()[:1])
assert np.array_equal(run(*arrays), wanted)
print("equal")
"""


def test_a_saved_program_runs_in_another_process(tmp_path):
    problem = Problem([20, 3], [(2, 5, 7)])
    arrays = [np.asarray(x) for x in problem.arrays()]
    # A new program each time: one that JAX's own cache answers for cannot be saved.
    scale = jnp.float32(1 + time.time_ns() % 2**20 / 2**20)
    run = jax.jit(lambda q, *rest: attend(q * scale, *rest, **problem.options, backend="numba"))
    compiled = run.lower(*arrays).compile()
    saved = serialize_executable.serialize(compiled)
    file = tmp_path / "program"
    file.write_bytes(pickle.dumps((saved, arrays, np.asarray(compiled(*arrays)))))
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(file)],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.stdout.strip() == "equal", result.stderr


NARROW = """
import sys
import llvmlite.binding as llvm
features = llvm.get_host_cpu_features()
for name in sys.argv[2:]:
    features[name] = False
llvm.get_host_cpu_features = lambda: features
from xjax.kernels import lanes
assert lanes.LANES == int(sys.argv[1])
from tests.kernels.test_attention import Problem
for heads, dim, size, tile, window in ((9, 64, 16, 32, None), (3, 40, 5, 8, 33), (6, 7, 4, 5, None)):
    Problem(
        [0, 30 * size, -1], [(3, 7, 23 * size), (4, 0, 1)], heads=heads, kv_heads=3, dim=dim, size=size,
        tile=tile, window=window, scale=dim**-0.5,
    ).check(backend="numba", soft_cap=None if window else 3.0)
print("right")
"""


@pytest.mark.parametrize(("lanes", "without"), [(8, ["avx512f"]), (4, ["avx512f", "avx2", "fma"])])
def test_processors_with_narrower_vectors(lanes, without):
    """What is compiled for AVX2, and for neither, is right too; run on this processor."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment["NUMBA_CACHE_DIR"] = str(Path(os.environ["NUMBA_CACHE_DIR"]) / f"lanes-{lanes}")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NARROW, str(lanes), *without],
        capture_output=True, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert result.stdout.strip() == "right", result.stderr[-2000:]
