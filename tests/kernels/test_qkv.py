"""Queries and pages of a fused product: against float64, the same bits wherever a token is, in place."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xjax.engine.audit import audit_donation
from xjax.errors import LoadError
from xjax.kernels.pages.xla import gather
from xjax.kernels.qkv import place

pytestmark = pytest.mark.device

HAS_NUMBA = importlib.util.find_spec("numba") is not None
BACKENDS = ["xla", *(["numba"] if HAS_NUMBA else [])]
EPS = 1e-5

# heads, kv heads, head size, rotated dimensions, norm, bias
SHAPES = [
    (9, 3, 64, 64, None, False),  # SmolLM2
    (4, 1, 256, 256, "head", False),  # Gemma 3
    (16, 8, 128, 128, "head", True),
    (6, 2, 8, 8, "whole", False),
    (4, 4, 40, 20, None, True),  # rotated in part
    (3, 1, 6, 2, "head", True),  # parts of vectors
    (2, 1, 80, 24, "whole", True),
    (5, 5, 33, 0, "head", False),  # nothing rotated
]


def draw(shape, num_tokens, *, pages=7, size=4, dtype="float32", seed=0):
    heads, kv_heads, dim, turned, norm, has_bias = shape
    rng = np.random.default_rng(seed)

    def normal(*dims):
        return rng.standard_normal(dims).astype(np.float32)

    width = (heads + 2 * kv_heads) * dim
    sizes = {"head": (dim, dim), "whole": (heads * dim, kv_heads * dim)}
    bias = normal(width) if has_bias else None
    norms = tuple(1 + 0.3 * normal(n) for n in sizes[norm]) if norm else (None, None)
    places = rng.permutation((pages - 1) * size)[:num_tokens] + size
    target = np.zeros(num_tokens, np.int32)
    target[: len(places)] = places
    qkv = normal(num_tokens, width) * np.exp2(rng.integers(-3, 4, (num_tokens, 1))).astype(np.float32)
    angle = rng.uniform(-9, 9, (num_tokens, turned // 2))
    rope = (np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    both = rng.standard_normal((2, pages, kv_heads, size, dim)).astype(np.float32)
    if dtype == "uint16":
        both = np.asarray(jnp.asarray(both).astype(jnp.bfloat16)).view(np.uint16)
    return qkv, bias, norms, rope, tuple(jnp.asarray(part) for part in both), target


def reference(qkv, bias, norms, rope, pages, target):
    """Queries, keys and values in float64."""
    kv_heads, dim = pages[0].shape[1], pages[0].shape[3]
    wide = qkv.astype(np.float64) + (0 if bias is None else bias)
    parts = wide.reshape(len(wide), kv_heads, -1, dim)
    q, k, v = parts[:, :, :-2].reshape(len(wide), -1, dim), parts[:, :, -2], parts[:, :, -1]
    cos, sin = (part.astype(np.float64)[:, None] for part in rope)

    def finish(x, weight):
        if weight is not None:
            is_whole = len(weight) != dim
            square = (x * x).mean((1, 2) if is_whole else 2, keepdims=True)
            x = x / np.sqrt(square + EPS) * weight.reshape((-1, dim) if is_whole else dim)
        half = cos.shape[2]
        first, second, rest = np.split(x, (half, 2 * half), axis=2)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=2)

    return finish(q, norms[0]), finish(k, norms[1]), v


def numbers(pages):
    bits = np.asarray(pages)
    return bits if bits.dtype == np.float32 else (bits.astype(np.uint32) << 16).view(np.float32)


@functools.cache
def compiled(backend):
    return jax.jit(functools.partial(place, eps=EPS, backend=backend), donate_argnums=4)


def run(backend, problem):
    qkv, bias, norms, rope, pages, target = problem
    return compiled(backend)(qkv, bias, norms, rope, tuple(page.copy() for page in pages), target)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(shape, dtype, backend):
    for num_tokens in (1, 7):
        problem = draw(shape, num_tokens, dtype=dtype)
        q, *pages = run(backend, problem)
        wanted = reference(*problem)
        np.testing.assert_allclose(q, wanted[0], rtol=1e-6, atol=2e-6 * np.abs(wanted[0]).max())
        page, offset = np.divmod(problem[5], 4)
        for side in range(2):
            assert pages[side].dtype == dtype
            every = numbers(pages[side]).copy()
            found = every[page, :, offset]
            near = 2e-6 if dtype == "float32" else 0.004
            np.testing.assert_allclose(found, wanted[1 + side], rtol=near, atol=near / 2)
            before = numbers(problem[4][side])
            every[page, :, offset] = before[page, :, offset]
            np.testing.assert_array_equal(every, before)  # nothing else was touched


if HAS_NUMBA:

    @pytest.mark.parametrize("shape", SHAPES[:6], ids=str)
    def test_bits_depend_on_the_token_alone(shape):
        """Alone, in the middle, in a step that threads share."""
        problem = draw(shape, 513, pages=260)
        q, *pages = run("numba", problem)
        qkv, bias, norms, rope, empty, target = problem
        for rows in (slice(0, 1), slice(512, 513), slice(100, 107), slice(37, 300)):
            part = (qkv[rows], bias, norms, tuple(r[rows] for r in rope), empty, target[rows])
            found, *written = run("numba", part)
            np.testing.assert_array_equal(found, q[rows])
            page, offset = np.divmod(target[rows], 4)
            for side in range(2):
                np.testing.assert_array_equal(
                    np.asarray(written[side])[page, :, offset], np.asarray(pages[side])[page, :, offset]
                )

    def test_bfloat16_is_rounded_as_xla_does():
        shape = (2, 1, 16, 0, None, False)
        qkv, bias, norms, rope, pages, target = draw(shape, 4, dtype="uint16")
        qkv[0, :8] = [np.nan, np.inf, -np.inf, 1e-30, 3e38, -0.0, 1 + 2**-8, 1 + 3 * 2**-8]
        qkv[0, 32:40], qkv[1, 48:] = qkv[0, :8], qkv[0, :16]
        found = [run(backend, (qkv, bias, norms, rope, pages, target)) for backend in BACKENDS]
        np.testing.assert_array_equal(found[0][0], found[1][0])
        for side in (1, 2):
            np.testing.assert_array_equal(numbers(found[0][side]), numbers(found[1][side]))

    def test_a_target_outside_is_not_written():
        *problem, before, _ = draw(SHAPES[0], 3)
        _, *pages = run("numba", (*problem, before, np.array([28, -1, 9], np.int32)))
        for side in range(2):
            changed = (np.asarray(pages[side]) != np.asarray(before[side])).any((1, 3))
            assert np.argwhere(changed).tolist() == [[2, 1]]

    def test_activations_of_another_dtype():
        qkv, bias, norms, rope, pages, target = draw(SHAPES[1], 5)
        narrow = jnp.asarray(qkv).astype(jnp.bfloat16)
        q, *_ = run("numba", (narrow, bias, norms, rope, pages, target))
        wanted, *_ = run("numba", (np.asarray(narrow.astype(jnp.float32)), bias, norms, rope, pages, target))
        assert q.dtype == jnp.bfloat16
        np.testing.assert_array_equal(q, wanted.astype(jnp.bfloat16))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_donated_pages_are_written_in_place(dtype, backend):
    """Several layers in one program, whose pages are read behind the write."""
    problem = draw(SHAPES[0], 4, pages=400, size=16, dtype=dtype)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), problem[4])

    def step(state, qkv, rope, target):
        out, states = 0.0, []
        for pages in state:
            q, *pages = place(qkv, None, (None, None), rope, tuple(pages), target, eps=EPS, backend=backend)
            read = gather(pages[0], target // 16) + gather(pages[1], target // 16)
            qkv = qkv + jnp.sum(read) * jnp.sum(q)
            states.append(tuple(pages))
        return tuple(states), out + qkv

    def audit(function):
        lowered = jax.jit(function, donate_argnums=0).lower(
            (abstract,) * 2, problem[0], problem[3], problem[5]
        )
        return audit_donation(
            lowered.compile(), donated=(abstract,) * 2, first_argument=0, name="x", max_temporary=1 << 19
        )

    assert audit(step).aliased == sum(4 * part.size * part.dtype.itemsize for part in abstract[:1])

    def reads_before(state, *rest):
        states, out = step(state, *rest)
        return states, out + jnp.sum(state[0][0].astype(jnp.float32) * states[0][0].astype(jnp.float32)[::-1])

    with pytest.raises(LoadError):
        audit(reads_before)
