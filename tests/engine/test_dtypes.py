"""Weights and pages of other dtypes through a whole engine: the audit passes and text comes out."""

import jax
import jax.numpy as jnp
import pytest

from tests.engine.tiny import Client, make_engine, make_kit, tiny_llama
from xjax.engine.build import Model, widened_bytes
from xjax.request import SamplingParams

pytestmark = pytest.mark.device

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]


def cast(model: Model, dtype: str) -> Model:
    kind = jnp.dtype(dtype)
    specs = model.family.abstract(model.config, kind)
    params = jax.tree.map(lambda leaf, spec: leaf.astype(spec.dtype), model.params, specs)
    return Model(model.family, model.config, params, kind)


@pytest.mark.parametrize(
    ("dtype", "pages"), [("bfloat16", "auto"), ("float16", "auto"), ("float32", "bfloat16")]
)
def test_rounded_numbers_stay_close_to_float32(dtype, pages):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)

    def first_logprobs(model, **options):
        engine = make_engine(model, max_num_seqs=1, **options)
        try:
            event = Client(engine).run(PROMPT, params).events[0]
        finally:
            engine.close()
        return dict(event.logprobs[0].top)

    exact = first_logprobs(tiny_llama())
    rounded = first_logprobs(cast(tiny_llama(), dtype), dtype=dtype, kvcache_dtype=pages)
    shared = exact.keys() & rounded.keys()
    assert len(shared) >= 15
    worst = max(abs(exact[token] - rounded[token]) for token in shared)
    # Eight bits of mantissa over two layers; 0 would mean that nothing was rounded.
    assert 0 < worst < 0.3


def test_the_compilers_copies_of_16_bit_weights_are_planned_for():
    model = cast(tiny_llama(), "float16")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params) if leaf.dtype == "float16")
    assert size
    assert widened_bytes(model, "cpu") == 2 * size
    assert widened_bytes(model, "gpu") == 0 == widened_bytes(tiny_llama(), "cpu")
    activations = make_kit(model, dtype="float16").plan.memory.activations
    assert activations == make_kit(tiny_llama()).plan.memory.activations + 2 * size
