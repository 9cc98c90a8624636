"""Packed weights behind the one product: numbers, look-ups, rows in turn, and where they lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from xjax.kernels.linear.forms import FORMS, Fields, Form, int4, int8, pack, unpack
from xjax.state.mesh import make_mesh
from xjax.state.packed import JoinedArray, PackedArray, look_up
from xjax.state.quantized import is_quantized, matmul, spread, to_float, working_bytes

pytestmark = pytest.mark.device

ALL = [*FORMS.values(), int8(2), int8(16), int4(1, has_minimum=True), int4(4, has_minimum=False)]


def make(form: Form, num_out: int, num_in: int = 512, dtype: str = "float32") -> PackedArray:
    """Random codes, numbers up to about 1."""
    rng = np.random.default_rng(num_out + form.bits)

    def scales(most: float) -> np.ndarray:
        kind = np.float32 if form.scale == "f32" else np.float16
        return (rng.uniform(-1, 1, (num_out, num_in // form.run_inputs)) / most).astype(kind)

    def steps(width: int) -> np.ndarray:
        kind = np.uint8 if form.has_minimum else np.int8
        return rng.integers(1, 64, (num_out, num_in // width)).astype(kind)

    nested, most = form.is_nested, 1 << form.bits
    fields = Fields(
        rng.integers(0, most, (num_out, num_in)).astype(np.uint8),
        scales(most * (64 if nested else 1)),
        scales(64 if nested else 1) if form.has_minimum else None,
        steps(form.group) if nested else None,
        steps(32) if nested and form.has_minimum else None,
    )
    return PackedArray(jnp.asarray(pack(form, fields)), form, (num_out, num_in), dtype)


@pytest.mark.parametrize("form", ALL, ids=lambda form: f"{form.name}-{form.run}")
def test_numbers_are_those_of_the_form(form):
    array = make(form, 37)
    found = jax.jit(to_float, static_argnums=1)(array, jnp.dtype("float32"))
    # A product of float32 numbers may be fused with the sum; of others it is exact.
    tolerance = 2e-7 if form.scale == "f32" and form.has_minimum else 0
    wanted = unpack(form, np.asarray(array.data), array.shape)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", ["xla", "numba"])
@pytest.mark.parametrize("form", ALL, ids=lambda form: f"{form.name}-{form.run}")
def test_product_is_near_that_of_the_numbers(form, backend):
    """Inputs may be rounded to 8 bits a group of 32: half a step of 1 / 127 of the largest each."""
    array = make(form, 40)
    x = np.random.default_rng(1).standard_normal((3, 512)).astype(np.float32)
    w = unpack(form, np.asarray(array.data), array.shape).astype(np.float64)
    found = np.asarray(jax.jit(lambda x, w: matmul(x, w, backend=backend))(x, array))
    step = np.repeat(np.abs(x.reshape(3, -1, 32)).max(-1) / 127, 32, axis=1)
    bound = 0.5 * step @ np.abs(w).T + 1e-4
    assert (np.abs(found - x @ w.T) <= bound).all()
    assert np.abs(found).max() > 20 * np.abs(found - x @ w.T).max()


def test_a_large_product_in_parts():
    array = make(FORMS["q4_1"], 3000)
    x = np.random.default_rng(1).standard_normal((2, 512)).astype(np.float32)
    w = unpack(array.form, np.asarray(array.data), array.shape)
    found = np.asarray(matmul(jnp.asarray(x), array))
    assert found.shape == (2, 3000)
    assert np.abs(found - x @ w.T).max() < 0.02 * np.abs(found).max()


@pytest.mark.parametrize("backend", ["xla", "numba"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_looked_up(backend, dtype):
    array = make(FORMS["q6_k"], 37, dtype=dtype)
    ids = jnp.array([0, 36, 15, 16, 5, 99], jnp.int32)  # the last one is beyond the end
    found = jax.jit(lambda ids, w: look_up(ids, w, backend=backend))(ids, array)
    values = unpack(array.form, np.asarray(array.data), array.shape)[[0, 36, 15, 16, 5, 36]]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, jnp.asarray(values).astype(dtype))


@pytest.mark.parametrize(
    ("rows", "turns"), [((48, 16), ((0, 24), (1, 8))), ((30, 10, 10), ((0, 10), (1, 10), (0, 20), (2, 10)))]
)
def test_rows_in_turn(rows, turns):
    forms = (FORMS["q4_k"], FORMS["q6_k"])
    pieces = [make(forms[i], count) if i < 2 else jnp.ones((count, 512)) for i, count in enumerate(rows)]
    array = JoinedArray(tuple(pieces), turns, (sum(rows), 512))
    each = [np.asarray(to_float(piece, jnp.dtype("float32"))) for piece in pieces]
    wanted, at = [], [0] * len(rows)
    while len(wanted) < sum(rows):
        for piece, count in turns:
            wanted += list(each[piece][at[piece] : at[piece] + count])
            at[piece] += count
    np.testing.assert_array_equal(to_float(array, jnp.dtype("float32")), wanted)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 512)).astype(np.float32))
    found, exact = np.asarray(matmul(x, array)), np.asarray(x) @ np.asarray(wanted).T
    assert np.abs(found - exact).max() < 0.02 * np.abs(exact).max()
    assert array.nbytes == sum(piece.nbytes for piece in pieces)


def test_trees_take_them_as_leaves_and_programs_as_static():
    array = make(FORMS["q8_0"], 16)
    joined = JoinedArray((array, array), ((0, 16), (1, 16)), (32, 512))
    tree = {"a": array, "b": joined, "c": jnp.ones(3)}
    assert [is_quantized(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_quantized)] == [True, True, False]
    assert "q8_0" in str(jax.tree.structure(array))  # saved programs are told apart by it
    assert jax.tree.structure(array) == jax.tree.structure(make(FORMS["q8_0"], 16))
    assert jax.tree.structure(array) != jax.tree.structure(make(FORMS["q8_0"], 15))
    assert working_bytes([array, joined]) == 0


def test_placed_whole():
    array = make(FORMS["q8_0"], 16)
    device = SingleDeviceSharding(jax.devices()[0])
    assert spread(array, device).data == device
    mesh = make_mesh(jax.devices()[:2])
    placed = spread(array, NamedSharding(mesh, PartitionSpec("tensor")))
    assert placed.data == NamedSharding(mesh, PartitionSpec())
    with pytest.raises(AssertionError, match="one device"):
        matmul(jnp.ones((1, 512)), array, mesh=mesh)
