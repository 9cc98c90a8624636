"""`LLM.embed` gives the pooled hidden states of transformers, in any schedule, beside other requests."""

import dataclasses
import functools
import threading
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tests.engine.tiny import Answer, Kit, make_kit
from tests.golden.checkpoints import write_folder
from tests.golden.recipe import CASES, HIDDEN, HIDDEN_CASES
from xjax import LLM, EngineError, FinishReason, Request, RequestError, SamplingParams
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.engine import step as step_module
from xjax.engine.build import load_model, make_table
from xjax.engine.pack import shapes_of
from xjax.scheduler import outcome
from xjax.scheduler.roster import Roster
from xjax.state.batch import BatchShape, Packed, unpack

pytestmark = pytest.mark.device

TOLERANCE = 1e-4  # to the reference
SAME = 1e-5  # to the same prompt in another schedule
OPTIONS = {
    "max_num_seqs": 2, "page_size": 4, "prefill_chunk_size": 32, "num_pages": 33, "max_model_len": 64,
    "skip_tokenizer_init": True,
}  # fmt: skip
SCHEDULED = "gemma_soft_cap"
LENGTHS = (1, 2, 15, 16, 17, 33, 44)


@functools.cache
def hidden(name):
    with np.load(HIDDEN) as file:
        return file[name].astype(np.float64)


def prompt(name, length):
    return [int(token) for token in CASES[name].ids[:length]]


def wanted(name, length, pooling, *, normalize=False):
    """What a prompt of the first `length` tokens comes to: attention looks back alone."""
    states = hidden(name)[:length]
    vector = states[-1] if pooling == "last" else states.mean(0)
    return vector / np.linalg.norm(vector) if normalize else vector


@pytest.fixture(scope="module", params=HIDDEN_CASES)
def named(request, tmp_path_factory):
    folder = write_folder(CASES[request.param], tmp_path_factory.mktemp("embed"))
    with LLM(folder, **OPTIONS) as llm:
        yield request.param, llm
        llm.engine.close()
        llm.engine._scheduler.check()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_are_those_of_the_reference(named, pooling, normalize):
    name, llm = named
    found = llm.embed([prompt(name, n) for n in LENGTHS], pooling=pooling, normalize=normalize)
    assert found.dtype == np.float32 and found.shape == (len(LENGTHS), 48)
    for length, vector in zip(LENGTHS, found, strict=True):
        expected = wanted(name, length, pooling, normalize=normalize)
        np.testing.assert_allclose(vector, expected, atol=TOLERANCE, err_msg=f"{length} tokens")
    assert np.abs(wanted(name, 44, "last") - wanted(name, 44, "mean")).max() > 100 * TOLERANCE


def test_fewer_dimensions(named):
    name, llm = named
    whole = llm.embed([prompt(name, 9)], normalize=False)
    part = llm.embed([prompt(name, 9)], normalize=False, dimensions=7)
    np.testing.assert_allclose(part, whole[:, :7], atol=SAME)
    short = llm.embed([prompt(name, 9)], dimensions=7)
    np.testing.assert_allclose(short, part / np.linalg.norm(part), atol=SAME)
    assert llm.embed([], dimensions=7).shape == (0, 7)


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """Small steps and few pages, so that prompts are split and preempted; window layers beside full ones."""
    checkpoint = open_checkpoint(write_folder(CASES[SCHEDULED], tmp_path_factory.mktemp("kit")))
    made = make_kit(
        load_model(checkpoint), rows=(6,), max_num_seqs=6, page_size=1, max_model_len=64, num_pages=76
    )
    shapes = dataclasses.replace(made.plan.scheduler.shapes, prefill=((8, 8),), num_scored=(8,))
    # Without shared prefixes, since prompts begin alike and fewer would be preempted.
    scheduler = dataclasses.replace(made.plan.scheduler, shapes=shapes, prefix_cache=False)
    plan = dataclasses.replace(made.plan, scheduler=scheduler)
    return Kit(made.model, plan, make_table(made.model, plan))


def make_request(rng, number):
    """A request for a vector, or one for tokens that goes before and takes many pages."""
    pooling = rng.choice(["last", "mean", "none"], p=[0.2, 0.5, 0.3])
    length = int(rng.integers(1, 12) if pooling == "none" else rng.integers(1, 45))
    params, more = SamplingParams(temperature=0, seed=1), {"pooling": str(pooling)}
    if pooling == "none":
        most, logprobs = int(rng.integers(20, 64 - length)), 1 if rng.random() < 0.3 else None
        params = dataclasses.replace(params, max_tokens=most, logprobs=logprobs, ignore_eos=True)
        more = {"priority": 1}
    ids = tuple(prompt(SCHEDULED, length))
    return Request(request_id=f"r{number}", prompt_ids=ids, sampling=params, **more)


def run_schedule(engine, seed):
    """Requests in bursts; returns the greatest distance of a vector from the reference."""
    rng, waiting, furthest = np.random.default_rng(seed), [], 0.0
    for number in range(24):
        request, answer = make_request(rng, number), Answer(1)
        engine.submit(request, answer)
        waiting.append((request, answer))
        if rng.random() < 0.5:
            waiting[int(rng.integers(len(waiting)))][1].first.wait(0.01)
    for request, answer in waiting:
        (sample,) = answer.wait()
        if request.pooling is None:
            assert sample.reason is FinishReason.LENGTH, sample.error
            continue
        (event,) = sample.events
        assert event.finish_reason is FinishReason.STOP and not event.token_ids, event
        assert event.num_cached_tokens == 0 and event.queue_seconds is not None
        expected = wanted(SCHEDULED, len(request.prompt_ids), request.pooling)
        furthest = max(furthest, float(np.abs(np.array(event.embedding) - expected).max()))
    return furthest


def test_any_schedule(kit, monkeypatch):
    counted, whole = [0], Roster.preempt

    def preempt(self, sequence, **how):
        counted[0] += sequence.request.pooling == "mean" and sequence.num_computed > 0
        whole(self, sequence, **how)

    monkeypatch.setattr(Roster, "preempt", preempt)
    engine = kit.engine()
    for seed in range(8):
        assert run_schedule(engine, seed) < TOLERANCE, seed
    stats = engine.stats()
    engine.close()
    engine._scheduler.check()
    assert counted[0] >= 3
    assert stats["chunk_splits"] > 100
    assert stats["pages_used_0"] == stats["pages_used_1"] == 0


def test_a_schedule_shows_a_sum_that_is_not_begun_anew(kit, monkeypatch):
    def take(self, plan, result):
        for chunk in plan.chunks:
            sequence = plan.sequences[chunk.row]
            if sequence.request.pooling == "mean":
                part = result.pooled[chunk.row].astype(np.float64)
                self._sums[sequence] = self._sums.get(sequence, 0.0) + part

    monkeypatch.setattr(outcome.HiddenSums, "take", take)
    engine = kit.engine()
    assert max(run_schedule(engine, seed) for seed in range(8)) > 100 * TOLERANCE
    engine.close()


def test_same_vector_beside_others(named):
    name, llm = named
    for pooling in ("last", "mean"):
        alone = np.concatenate([llm.embed([prompt(name, n)], pooling=pooling) for n in LENGTHS])
        together = llm.embed([prompt(name, n) for n in LENGTHS], pooling=pooling)
        np.testing.assert_allclose(together, alone, atol=SAME, rtol=0)


def test_only_programs_that_pool_are_added(named):
    name, llm = named
    table, answer = llm.engine.table, SamplingParams(temperature=0, max_tokens=4)
    llm.generate([prompt(name, 9)], answer)
    before = set(table.ready)
    llm.embed([prompt(name, 44), prompt(name, 9)], pooling="mean")
    assert all(shape.pooled_dim for shape in set(table.ready) - before)
    kept = set(table.ready)
    llm.generate([prompt(name, 9)], answer)
    llm.embed([prompt(name, 44), prompt(name, 9)])
    assert set(table.ready) == kept
    assert not any(shape.pooled_dim for shape in shapes_of(llm.plan.scheduler))


def test_what_is_refused(named):
    name, llm = named
    full = [1] * 64
    assert llm.embed([full]).shape == (1, 48)  # all of the context: no token has to follow
    for prompts, options, words in [
        ([[1] * 65], {}, "65 tokens; the context holds 64$"),
        ([[]], {}, "empty"),
        ([[61]], {}, "ids must lie in"),
        (["text"], {}, "tokenizer"),
        ([prompt(name, 4)], {"pooling": "max"}, "pooling: must be one of last, mean, not 'max'"),
        ([prompt(name, 4)], {"pooling": None}, "pooling"),
        ([prompt(name, 4)], {"dimensions": 49}, "from 1 to 48, not 49"),
        ([prompt(name, 4)], {"dimensions": 0}, "from 1 to 48, not 0"),
        ([prompt(name, 4)], {"dimensions": True}, "from 1 to 48, not True"),
    ]:
        with pytest.raises(RequestError, match=words):
            llm.embed(prompts, **options)
    with pytest.raises(RequestError):
        llm.embed([prompt(name, 44)] * 3 + [[]])
    assert llm.embed([prompt(name, 4)]).shape == (1, 48)


def test_not_from_the_output_thread(named):
    name, llm = named
    errors = []

    def on_result(i, result):
        with pytest.raises(RequestError, match="must not wait") as caught:
            llm.embed([prompt(name, 4)])
        errors.append(caught.value)

    llm.generate([prompt(name, 4)], SamplingParams(temperature=0, max_tokens=1), on_result=on_result)
    assert len(errors) == 1


def test_a_request_that_is_ended_ends_the_call(named):
    name, llm = named
    abort = llm.engine.abort
    real_submit = llm.engine.submit
    started = threading.Event()

    def submit(request, sink):
        real_submit(request, sink)
        abort(request.request_id)
        started.set()

    llm.engine.submit = submit
    try:
        with pytest.raises(EngineError, match="aborted"):
            llm.embed([prompt(name, 44)] * 6, pooling="mean")
    finally:
        llm.engine.submit = real_submit
    assert started.is_set()


def test_rows_that_are_not_finite_stay_apart():
    """Padding and other rows do not show in a row's vector, whatever is in them."""
    shape = BatchShape(
        num_rows=3, num_decode=3, num_prefill=8, tile=4, num_groups=1, max_pages=2, num_sampled=3,
        trash_row=3, pooled_dim=2,
    )  # fmt: skip
    packed = Packed(shape)
    packed.row_of[:] = [0, 1, 2, 1, 1, 1, 1, 2, 2, 2, 2]
    packed.position[:] = [5, -1, -1, 0, 1, 2, -1, 7, 8, -1, -1]
    packed.sample_token[:] = [0, 5, 8]
    packed.pool_mean[:] = [1, 1, 0]
    states = np.arange(22, dtype=np.float32).reshape(11, 2)
    states[0] = np.inf
    states[[1, 2, 6, 9, 10]] = np.nan

    @jax.jit
    def pool(vector, states):
        batch, sampled = unpack(vector, shape)
        return step_module._pool(states, batch, sampled.token)

    found = np.asarray(pool(packed.vector, states))
    np.testing.assert_array_equal(found, [[np.inf, np.inf], states[3:6].sum(0), states[8]])


def test_vectors_that_are_not_finite_are_an_error():
    request = Request(request_id="r", prompt_ids=(1,), sampling=SamplingParams(), pooling="last")
    sequence: Any = SimpleNamespace(request=request)
    assert outcome.HiddenSums().event(sequence, np.array([1.0, np.nan], np.float32)) is None


def test_what_goes_with_pooling():
    for params in (SamplingParams(n=2), SamplingParams(prompt_logprobs=1)):
        with pytest.raises(RequestError, match="pooling: goes with neither"):
            Request(request_id="r", prompt_ids=(1,), sampling=params, pooling="mean")
