"""Products of packed matrices: against float64, and the same bits whatever is beside a row or computes it."""

import ctypes
import functools
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xjax.kernels.linear import linear_packed, rows_packed
from xjax.kernels.linear.forms import FORMS, Fields, Form, int4, int8, pack, unpack

pytestmark = pytest.mark.device

HAS_NUMBA = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
BACKENDS = ["xla", *(["numba"] if HAS_NUMBA else [])]
OTHERS = [int8(1), int8(4), int4(1, has_minimum=False), int4(4, has_minimum=True)]
ALL = [*FORMS.values(), *OTHERS]
ROOT = Path(__file__).resolve().parent.parent.parent


def name(form):
    return f"{form.name}_{form.run}"


def draw(form: Form, num_out: int, num_in: int, seed: int = 0) -> np.ndarray:
    """Records of random codes and of scales small and large, some of them denormal."""
    rng = np.random.default_rng(seed)
    runs = num_in // form.run_inputs

    def scales():
        values = rng.standard_normal((num_out, runs)) * np.exp2(rng.integers(-24, 2, (num_out, runs)))
        return values.astype(np.float32 if form.scale == "f32" else np.float16)

    codes = rng.integers(0, 1 << form.bits, (num_out, num_in)).astype(np.uint8)
    low, kind = (0, np.uint8) if form.has_minimum else (-128, np.int8)
    top = 256 if form.has_minimum else 128
    steps = rng.integers(low, top, (num_out, num_in // form.group)).astype(kind)
    minimum_steps = rng.integers(0, 256, (num_out, num_in // 32)).astype(np.uint8)
    return pack(
        form,
        Fields(
            codes,
            scales(),
            scales() if form.has_minimum else None,
            steps if form.is_nested else None,
            minimum_steps if form.is_nested and form.has_minimum else None,
        ),
    )


def rows_of(num_rows: int, num_in: int, seed: int = 1) -> np.ndarray:
    """Rows whose numbers are of very different sizes; the first N of more rows are N rows."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, num_in)) * np.exp2(
        rng.integers(-4, 5, (num_rows, num_in // 32))
    ).repeat(32, axis=1)
    return x.astype(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """What x becomes as int8 codes and scales, in float64."""
    units = x.astype(np.float32).reshape(len(x), -1, 32)
    highest = np.abs(units).max(-1, keepdims=True)
    inverse = np.where(highest > 0, np.float32(127) / np.where(highest > 0, highest, 1), 0).astype(np.float32)
    codes = np.rint(units * inverse).astype(np.float64)
    return (codes * (highest / np.float32(127))).reshape(x.shape)


@functools.cache
def compiled(form, num_out, backend, machine=None):
    if machine is None:
        return jax.jit(functools.partial(linear_packed, form=form, num_out=num_out, backend=backend))
    from xjax.kernels.linear import numba

    return jax.jit(functools.partial(numba.linear_packed, form=form, num_out=num_out, machine=machine))


def multiply(x, data, form, num_out, backend="numba", machine=None):
    return np.asarray(compiled(form, num_out, backend, machine)(x, data))


def check(found, x, data, form, num_out):
    """Compare with the product of the same codes in float64, relative to the sum of sizes."""
    weights, exact = unpack(form, data, (num_out, x.shape[1])).astype(np.float64), rounded(x)
    size = np.abs(exact) @ np.abs(weights).T
    with_parts = size + np.abs(exact).sum(-1, keepdims=True) * part_sizes(form, data, num_out, x.shape[1])
    np.testing.assert_array_less(np.abs(found - exact @ weights.T), 1e-6 * with_parts + 1e-30)


def part_sizes(form, data, num_out, num_in):
    """How much larger than a weight its parts may be, code * scale and minimum; [Out]."""
    if not form.has_minimum:
        return np.zeros(num_out)
    runs = data.view(form.layout)
    low = np.abs(runs["minimums"].astype(np.float64)).max(1) * (255 if form.is_nested else 1)
    return low.reshape(-1)[:num_out]


# ---- numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ALL, ids=name)
def test_equals_the_product_of_the_same_codes(form, backend):
    shapes = ((37, 3, 5), (16, 1, 1), (1, 1, 2), (160, 2, 13))
    for num_out, runs, num_rows in shapes if backend == "numba" else shapes[:1]:
        num_in = form.run_inputs * runs
        data, x = draw(form, num_out, num_in), rows_of(num_rows, num_in)
        check(multiply(x, data, form, num_out, backend), x, data, form, num_out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_scale_for_all_inputs(backend):
    for num_in in (32, 32 * 7):
        form = int8(num_in // 32)
        data, x = draw(form, 33, num_in), rows_of(3, num_in)
        check(multiply(x, data, form, 33, backend), x, data, form, 33)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS.values(), ids=name)
def test_is_as_near_the_exact_product_as_int8_activations_are(form, backend):
    num_in = 1024
    data, x = draw(form, 32, num_in), rows_of(4, num_in)
    weights = unpack(form, data, (32, num_in)).astype(np.float64)
    step = np.abs(x.reshape(4, -1, 32)).max(-1).repeat(32, axis=1) / 127
    bound = step / 2 @ np.abs(weights).T * (1 + 1e-4)
    assert (np.abs(multiply(x, data, form, 32, backend) - x @ weights.T) <= bound).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", [FORMS["q8_0"], FORMS["q4_k"], FORMS["q6_k"]], ids=name)
def test_rows_that_are_no_numbers_stay_alone(form, backend):
    data, x = draw(form, 20, 512), rows_of(14, 512)
    clean = multiply(x, data, form, 20, backend)
    dirty = x.copy()
    dirty[3, 100], dirty[5, 511], dirty[13, 0] = np.nan, np.inf, -np.inf
    dirty[7], dirty[8] = 0, 1e-37
    found = multiply(dirty, data, form, 20, backend)
    assert np.isnan(found[[3, 5, 13]]).all()
    np.testing.assert_array_equal(found[7:9], 0)
    rest = [row for row in range(14) if row not in (3, 5, 7, 8, 13)]
    np.testing.assert_array_equal(found[rest], clean[rest])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_rows_are_widened_and_the_result_rounded(dtype, backend):
    form = FORMS["q5_1"]
    data, x = draw(form, 24, 64), jnp.asarray(rows_of(6, 64) / 64, dtype)
    found = compiled(form, 24, backend)(x, data)
    wide = compiled(form, 24, backend)(x.astype(jnp.float32), data)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, wide.astype(dtype))


def test_records_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="q8_0"):
        linear_packed(jnp.ones((1, 64)), jnp.zeros((1, 544), jnp.uint8), form=FORMS["q8_0"], num_out=16)


# ---- bits -------------------------------------------------------------------------------


@needs_numba
@pytest.mark.parametrize("form", ALL, ids=name)
def test_a_row_has_the_same_bits_at_any_number_of_rows(form):
    """And in every place: rows are also given backwards."""
    num_out, num_in = 50, 512
    data, x = draw(form, num_out, num_in), rows_of(513, num_in)
    all_rows = multiply(x, data, form, num_out)
    for num_rows in (1, 2, 3, 7, 8, 12, 13, 21, 64):
        np.testing.assert_array_equal(multiply(x[:num_rows], data, form, num_out), all_rows[:num_rows])
        backwards = np.ascontiguousarray(x[:num_rows][::-1])
        np.testing.assert_array_equal(
            multiply(backwards, data, form, num_out), all_rows[:num_rows][::-1], str(num_rows)
        )


@needs_numba
@pytest.mark.parametrize("form", ALL, ids=name)
def test_every_way_to_compute_gives_the_same_bits(form):
    """Every set of instructions that this processor has, and the one that every processor has."""
    from xjax.kernels.linear import micro

    num_in = form.run_inputs * 4
    data, x = draw(form, 41, num_in), rows_of(15, num_in)
    x[2], x[4, 5] = 0, np.nan
    expected = multiply(x, data, form, 41)
    assert micro.supported()[-1] == "plain"
    for machine in micro.supported():
        for num_rows in (1, 2, 15):
            found = multiply(x[:num_rows], data, form, 41, machine=machine)
            np.testing.assert_array_equal(found, expected[:num_rows], f"{machine}, {num_rows} rows")


@needs_numba
def test_codes_at_their_ends_do_not_overflow():
    """The largest sums of products that an integer form must hold."""
    from xjax.kernels.linear import micro

    for form in FORMS.values():
        num_in = form.run_inputs
        for code in (0, (1 << form.bits) - 1):
            data = draw(form, 16, num_in)
            data.view(form.layout)["units"]["codes"] = 255 if code else 0
            x = np.where(np.arange(num_in) % 64 < 32, 1, -1).astype(np.float32)[None] * np.float32(3)
            for machine in micro.supported():
                check(multiply(x, data, form, 16, machine=machine), x, data, form, 16)


@needs_numba
@pytest.mark.parametrize("machine", ["avx512_vnni", "avx_vnni", "avx2", "plain"])
def test_only_rows_and_columns_that_are_there_are_written(machine):
    """The innermost loops on memory full of another number, with less of everything than they could take."""
    from xjax.kernels import native
    from xjax.kernels.linear import micro

    if machine not in micro.supported():
        pytest.skip(f"the processor has no {machine}")
    form, height, num_in = FORMS["q4_1"], 4, 96
    data, x = draw(form, 19, num_in), rows_of(3, num_in)

    def build(module):
        micro.quantize(module, "quantize", 1)
        micro.multiply(module, "multiply", form, height, machine)

    target = native.processor(is_plain=machine == "plain")
    found = native.functions(f"test_guards_{machine}", ["quantize", "multiply"], build, target)
    quantize = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(found["quantize"])
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)(found["multiply"])
    size, groups = micro.piece_bytes(form), num_in // 32
    panel, out = np.full(groups * height * size + 64, 99, np.uint8), np.full((6, 24), 7.0, np.float32)
    for row in range(height):
        place = panel.ctypes.data + row * size
        quantize(x[min(row, 2)].ctypes.data, place, height * size, groups, -form.offset)
    assert (panel[-64:] == 99).all()
    call(data.ctypes.data, panel.ctypes.data, out.ctypes.data, 2, groups, 1, 24 * 4, 19, 3)
    np.testing.assert_array_equal(out[:3, :19], multiply(x, data, form, 19))
    assert (out[3:] == 7).all() and (out[:, 19:] == 7).all()


@needs_numba
def test_executions_at_once_give_the_same_bits():
    form = FORMS["q4_k"]
    data, x = draw(form, 1024, 512), rows_of(40, 512)
    expected = multiply(x, data, form, 1024)
    run, wrong, started = compiled(form, 1024, "numba"), [], threading.Barrier(6)

    def work():
        started.wait()
        for _ in range(20):
            if not np.array_equal(run(x, data), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


IN_ANOTHER_PROCESS = """
import hashlib, numpy as np
from tests.kernels.test_packed import FORMS, draw, multiply, rows_of, look_up
found = b""
for form in (FORMS["q8_0"], FORMS["q4_k"]):
    data = draw(form, 300, 512)
    for rows in (1, 40, 130):
        found += multiply(rows_of(rows, 512), data, form, 300).tobytes()
    found += look_up(np.arange(30), data, form, 512, "numba").tobytes()
print(hashlib.sha256(found).hexdigest())
"""


@needs_numba
def test_any_number_of_threads_gives_the_same_bits():
    """In processes of their own, which load the code that an earlier one compiled."""
    found = set()
    for threads in ("1", "2", "5"):
        environment = os.environ | {"PJRT_NPROC": threads, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            [sys.executable, "-c", IN_ANOTHER_PROCESS],
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        assert result.returncode == 0, result.stderr
        found.add(result.stdout)
    assert len(found) == 1


# ---- rows of an embedding ---------------------------------------------------------------


def look_up(ids, data, form, num_in, backend, dtype=jnp.float32):
    run = functools.partial(rows_packed, form=form, num_in=num_in, dtype=jnp.dtype(dtype), backend=backend)
    return np.asarray(jax.jit(run)(jnp.asarray(ids, jnp.int32), data))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ALL, ids=name)
def test_rows_are_the_numbers_of_the_file(form, backend):
    num_in = form.run_inputs * 3
    data, ids = draw(form, 70, num_in), np.array([69, 0, 17, 17, 33, 5])
    expected = unpack(form, data, (70, num_in))[ids]
    found = look_up(ids, data, form, num_in, backend)
    # XLA may multiply and add in one rounding, which shows where a product has more than 24 bits.
    rtol = 2e-6 if backend == "xla" and form.scale == "f32" and form.has_minimum else 0
    np.testing.assert_allclose(found, expected, rtol=rtol)
    narrow = look_up(ids, data, form, num_in, backend, jnp.bfloat16)
    np.testing.assert_array_equal(narrow, np.asarray(jnp.asarray(found).astype(jnp.bfloat16)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_ids_that_no_row_has_are_the_nearest(backend):
    form = FORMS["q8_0"]
    data = draw(form, 32, 64)
    expected = unpack(form, data, (32, 64))[[31, 0]]
    np.testing.assert_array_equal(look_up([2**31 - 1, -5], data, form, 64, backend), expected)


@needs_numba
def test_rows_by_every_set_of_instructions():
    from xjax.kernels.linear import lookup, micro

    for form in ALL:
        num_in = form.run_inputs
        data = draw(form, 16, num_in)
        expected = unpack(form, data, (16, num_in))
        for machine in micro.supported():
            run = functools.partial(
                lookup.rows_packed, form=form, num_in=num_in, dtype=jnp.float32, machine=machine
            )
            np.testing.assert_array_equal(jax.jit(run)(jnp.arange(16), data), expected)
