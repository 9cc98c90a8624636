"""What later parts will stand on, with fakes: recurrent slots, embeddings from outside, three position
axes, codes as weights."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.null_family import by_hand, recurrent_model
from tests.engine.tiny import VOCAB, Client, make_kit
from xjax.engine.build import Model
from xjax.engine.loop import Engine
from xjax.engine.step import StepSpec, step
from xjax.models import llama
from xjax.request import SamplingParams
from xjax.state.batch import BatchShape, Packed
from xjax.state.kv import abstract_state, allocate
from xjax.state.quantized import quantize, to_float
from xjax.state.recurrent import zero_slot

pytestmark = pytest.mark.device

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


# ---- recurrent layers --------------------------------------------------------------------


@pytest.fixture(scope="module")
def recurrent():
    """A kit with snapshot slots, and an allocation whose every slot but the zero one is poisoned."""
    model, sharding = recurrent_model(), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    kit = make_kit(model, rows=(4,))
    shapes = abstract_state(model.spec, num_pages=(40,), page_size=4, num_rows=4, num_snapshots=3)
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )
    table = type(kit.table)(kit.table._spec, model.params, placed)

    def poisoned():
        state = allocate(shapes, sharding)
        slots = jnp.arange(4 + 2 + 3) != zero_slot(4)

        def spoil(leaf):
            return jnp.where(slots.reshape(-1, *[1] * (leaf.ndim - 1)), jnp.nan, leaf)

        return jax.device_put(replace(state, recurrent=jax.tree.map(spoil, state.recurrent)), sharding)

    return model, kit.plan, table, poisoned


def test_recurrent_state_follows_its_sequence(recurrent):
    model, plan, table, poisoned = recurrent
    engine = Engine(model.params, poisoned, table, plan.scheduler, spec=model.spec, vocab_size=VOCAB)
    client, rng = Client(engine), np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 70, 9, 33, 90, 4, 17, 64, 5, 100)]
    answers = [client.start(prompt, GREEDY.replace(n=2 if i == 3 else 1)) for i, prompt in enumerate(prompts)]
    engine.abort(answers[7].request_id)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        for sample in answer.wait(60):
            assert sample.error is None
            assert sample.token_ids == by_hand(prompt, 30 if i != 7 else len(sample.token_ids))
    stats = engine.stats()
    assert stats["preemptions"] > 0 and stats["chunk_splits"] > 0
    slots = engine._state.recurrent[0].s[:, 0, 0, 0]
    engine_state = np.array(slots)
    engine.close()
    assert engine_state[zero_slot(4)] == 0, "the zero slot was written"
    assert np.isnan(engine_state[zero_slot(4) + 1 :]).all(), "a snapshot slot was written"
    assert np.isfinite(engine_state[:4]).all(), "a running row was never used, so nothing was proven"


def test_reading_the_own_slot_at_the_start_shows(recurrent, monkeypatch):
    """The poison works: a fresh sequence that reads its row's slot fails."""
    monkeypatch.setattr("xjax.engine.pack.zero_slot", lambda num_rows: num_rows + 2)
    model, plan, table, poisoned = recurrent
    engine = Engine(model.params, poisoned, table, plan.scheduler, spec=model.spec, vocab_size=VOCAB)
    assert "not finite" in Client(engine).run([1, 2, 3], GREEDY).error
    engine.close()


# ---- embeddings from outside, three position axes ----------------------------------------


def pack_prompt(shape, tokens):
    """One prompt in tiles as row 0, its last token sampled."""
    packed, count = Packed(shape), len(tokens)
    packed.token_id[:count] = tokens
    packed.position[:count] = np.arange(count)
    packed.write[0, :count] = shape.num_rows * 4 + np.arange(count)  # pages of four from page 1 on
    packed.table[0, 0] = 1 + np.arange(shape.max_pages)
    packed.slot[0], packed.kv_length[0], packed.query_length[0] = 0, count, count
    packed.sample_token[0], packed.sample_slot[0] = count - 1, 0
    return packed


def run_step(model, packed, shape, **arrays):
    state = allocate(abstract_state(model.spec, num_pages=(6,), page_size=4, num_rows=1))
    function = partial(step, spec=StepSpec(model.family, model.config), shape=shape)
    _, output = jax.jit(function)(model.params, state, packed.vector, **arrays)
    return int(output[0])


def test_embeddings_from_outside_stand_for_tokens(llama_kit):
    """Positions 3 and 7 get another token's embedding: the answer is that of a prompt with that token."""
    model = llama_kit.model
    base = {
        "num_rows": 1, "num_decode": 0, "num_prefill": 16, "tile": 16, "num_groups": 1, "max_pages": 5,
        "num_sampled": 1, "trash_row": 1,
    }  # fmt: skip
    shape = BatchShape(**base, num_embeds=4)
    meant = np.random.default_rng(3).integers(0, VOCAB, 13)
    written = meant.copy()
    written[[3, 7]] = (meant[[3, 7]] + 5) % VOCAB
    embeds = jnp.asarray(np.asarray(model.params.embed)[[meant[3], meant[7], 0, 0]])
    packed = pack_prompt(shape, written)
    packed.embed_index[:2] = (3, 7)
    expected = run_step(model, pack_prompt(BatchShape(**base), meant), BatchShape(**base))
    assert run_step(model, packed, shape, embeds=embeds) == expected
    packed.embed_index[:2] = 16
    assert run_step(model, packed, shape, embeds=embeds) != expected


def test_three_position_axes_reach_the_model(llama_kit):
    shape = BatchShape(
        num_rows=1, num_decode=0, num_prefill=16, tile=16, num_groups=1, max_pages=5, num_sampled=1,
        trash_row=1, num_axes=3,
    )  # fmt: skip

    def forward(params, config, state, batch, *, wanted=None):
        assert batch.rope_position.shape == (3, 16) and batch.position.shape == (16,)
        hidden = (batch.rope_position * jnp.array([[1], [10], [40]])).sum(0)[:, None].astype(jnp.float32)
        return hidden if wanted is None else hidden[wanted], state

    def logits(params, config, hidden, *, backend="xla", mesh=None):
        return -jnp.square(jnp.arange(VOCAB, dtype=jnp.float32)[None, :] - hidden)

    family = SimpleNamespace(name="seams", forward=forward, logits=logits, cache_spec=llama.FAMILY.cache_spec)
    model = Model(family, llama_kit.model.config, llama_kit.model.params, jnp.dtype("float32"))
    packed = pack_prompt(shape, np.arange(5))
    packed.rope_position[:, 4] = (3, 2, 1)
    assert run_step(model, packed, shape) == 3 + 20 + 40


# ---- codes as weights --------------------------------------------------------------------


def test_weights_may_be_codes(llama_kit):
    """The whole step runs on codes, and says what it says with the numbers they stand for."""
    model = llama_kit.model
    prompt = np.random.default_rng(2).integers(0, VOCAB, 40).tolist()

    def coded(layer):
        half = layer.feed_forward
        return replace(
            layer, feed_forward=replace(half, gate_up=quantize(half.gate_up), down=quantize(half.down))
        )

    params = replace(
        model.params, layers=tuple(coded(x) for x in model.params.layers), head=quantize(model.params.head)
    )
    kit = make_kit(replace(model, params=jax.device_put(params, jax.devices()[0])), rows=(4,))
    params_of_request = GREEDY.replace(logprobs=0)
    engine = kit.engine()
    got = Client(engine).run(prompt, params_of_request)
    engine.close()

    def is_coded(leaf):
        return hasattr(leaf, "codes")

    plain = jax.tree.map(lambda x: to_float(x, jnp.float32) if is_coded(x) else x, params, is_leaf=is_coded)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    engine = Engine(
        jax.device_put(plain, sharding), partial(allocate, llama_kit.plan.state, sharding), llama_kit.table,
        llama_kit.plan.scheduler, spec=llama_kit.model.spec, vocab_size=VOCAB,
    )  # fmt: skip
    expected = Client(engine).run(prompt, params_of_request)
    engine.close()
    engine = llama_kit.engine()
    unrounded = Client(engine).run(prompt, params_of_request)
    engine.close()
    assert got.error is None and got.token_ids == expected.token_ids
    np.testing.assert_allclose(scores(got), scores(expected), atol=1e-4)
    assert np.abs(np.subtract(scores(unrounded), scores(expected))[:1]).max() > 1e-4, (
        "rounding changed nothing"
    )


def scores(sample):
    return [item.logprob for event in sample.events for item in event.logprobs]
