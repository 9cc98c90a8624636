"""The donation audit: passes for real families, refuses each way of copying the state, by name."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tests.engine.tiny import make_kit, tiny_llama
from xjax.engine import warmup
from xjax.engine.audit import audit_donation
from xjax.engine.pack import shapes_of
from xjax.engine.step import StepSpec
from xjax.errors import LoadError
from xjax.state.kv import LayerKV

pytestmark = pytest.mark.device


def test_real_families_update_in_place(llama_kit, gemma_kit):
    for kit in (llama_kit, gemma_kit):
        assert set(shapes_of(kit.plan.scheduler)) <= set(kit.table.ready)


@pytest.fixture(scope="module")
def kit():
    """Pages large enough for the audit to care about."""
    return make_kit(tiny_llama(), num_pages=400)


def audited(kit, spoil):
    """Compile the small decode step of a family whose forward does something to the state."""
    family = kit.model.family

    def forward(params, config, state, batch, **kwargs):
        return spoil(*family.forward(params, config, state, batch), old=state)

    spoiled = SimpleNamespace(forward=forward, logits=family.logits, name="spoiled")
    spec = StepSpec(spoiled, kit.model.config)
    table = warmup.ProgramTable(spec, kit.model.params, kit.table._state)
    shape = next(shape for shape in shapes_of(kit.plan.scheduler) if not shape.num_prefill)
    return table.get(shape)


def with_first(state, k, v):
    return state.replace(kv=(LayerKV(k, v), *state.kv[1:]))


def test_an_honest_family_passes(kit):
    audited(kit, lambda hidden, state, old: (hidden, state))


def test_a_leaf_of_another_dtype_is_named(kit):
    def spoil(hidden, state, old):
        return hidden, with_first(state, state.kv[0].k.astype(jnp.bfloat16), state.kv[0].v)

    with pytest.raises(LoadError, match=r"state leaf \.kv\[0\]\.k|state leaf .*copied|like state leaf"):
        audited(kit, spoil)


def test_a_leaf_read_after_its_write_is_named(kit):
    def spoil(hidden, state, old):
        # Sums the old pages in an order that the write cannot wait for.
        extra = jnp.sum(old.kv[0].k * state.kv[0].k[::-1])
        return hidden + 0 * extra, state

    with pytest.raises(LoadError, match=r"\.kv\[\d\]\.[kv]"):
        audited(kit, spoil)


def test_two_swapped_leaves_are_named(kit):
    def spoil(hidden, state, old):
        return hidden, with_first(state, state.kv[0].v, state.kv[0].k)

    with pytest.raises(LoadError, match=r"\.kv\[\d\]\.[kv]"):
        audited(kit, spoil)


def test_temporaries_are_bounded():
    state = jax.ShapeDtypeStruct((300, 300), jnp.float32)
    compiled = (
        jax.jit(lambda s: s.at[0].add(jnp.sum(jnp.sort(s @ s @ s))), donate_argnums=0).trace(state).lower()
    )
    compiled = compiled.compile()
    audit_donation(compiled, donated=state, first_argument=0, name="x", max_temporary=1 << 30)
    with pytest.raises(LoadError, match="temporaries"):
        audit_donation(compiled, donated=state, first_argument=0, name="x", max_temporary=100)


def test_no_donation_at_all_is_named():
    state = {"pages": jax.ShapeDtypeStruct((300, 300), jnp.float32)}
    compiled = jax.jit(lambda s: {"pages": s["pages"] + 1}).trace(state).lower().compile()
    with pytest.raises(LoadError, match=r"\['pages'\] is copied"):
        audit_donation(compiled, donated=state, first_argument=0, name="x", max_temporary=1 << 30)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint16", "int8", "float8_e4m3fn"])
def test_a_copy_is_seen_in_every_dtype_of_pages(dtype):
    """Compiled text says u16 where numpy says uint16: a dtype that is not translated is never found."""
    state = jax.ShapeDtypeStruct((300, 300), jnp.dtype(dtype))

    def read_late(state):
        new = state.at[1].set(jnp.ones((), state.dtype))
        return new, new.astype(jnp.float32).T @ state.astype(jnp.float32)

    compiled = jax.jit(read_late, donate_argnums=0).trace(state).lower().compile()
    with pytest.raises(LoadError, match="copies a buffer like state leaf"):
        audit_donation(compiled, donated=state, first_argument=0, name="x", max_temporary=1 << 30)
