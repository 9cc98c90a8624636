"""Recurrent state on a device: bits arrive in the right slot; swapped sequences get what they get alone."""

import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.null_family import by_hand, recurrent_model
from tests.engine.test_transfer import EVERY, NONE, check_nothing_is_left, fail_on
from tests.engine.tiny import VOCAB, Client, make_kit
from xjax.config import PagedLayer, RecurrentLayer
from xjax.engine.audit import pointers
from xjax.engine.loop import Engine
from xjax.engine.pack import shapes_of
from xjax.engine.transfer import Mover
from xjax.request import FinishReason, SamplingParams
from xjax.scheduler import Transfer
from xjax.state.kv import abstract_state, allocate
from xjax.state.recurrent import slot_bytes, zero_slot

pytestmark = pytest.mark.device

SPEC = (RecurrentLayer(2, 3, 4, conv_channels=5, conv_width=4), PagedLayer(1, 8), RecurrentLayer(1, 2, 2))
ROWS = 4
PARAMS = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)


# ---- bits --------------------------------------------------------------------------------


def bits(state, seed):
    """The state with random numbers everywhere."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape).astype(np.float32)).astype(leaf.dtype), state
    )


def test_a_state_and_its_pages_arrive_in_another_row_and_nothing_else_moves():
    abstract = abstract_state(SPEC, num_pages=(9,), page_size=4, num_rows=ROWS, num_snapshots=2)
    state, landed, reports = bits(allocate(abstract), 0), threading.Event(), []
    mover = Mover(SPEC, state, (6,), lambda *report: (reports.append(report), landed.set()), num_states=3)
    expected = jax.tree.map(np.array, state)
    pages, slots = np.array([2, 5, 7], np.int32), np.array([1, 6, 3], np.int32)
    out = Transfer(1, (pages,), (slots,), np.array([1], np.int32), np.array([2], np.int32))
    addresses = pointers(state)
    mover.save(state, out)
    assert landed.wait(60)
    size = 3 * 2 * 4 * 8 * 4 + 4 * (2 * 3 * 4 + 5 * 3 + 2 * 2)
    assert reports[0][:3] == (1, True, size) and mover.size(out) == size
    assert slot_bytes(state.recurrent) == 4 * (2 * 3 * 4 + 5 * 3 + 2 * 2)
    targets, row = np.array([8, 2, 1], np.int32), np.array([3], np.int32)
    state = mover.load(state, Transfer(2, (targets,), (slots,), row, out.states))
    for leaf in jax.tree.leaves(expected.recurrent):
        leaf[3] = leaf[1]
    for leaf in jax.tree.leaves(expected.kv):
        leaf[targets] = leaf[pages]
    assert pointers(state) == addresses
    for leaf, right in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert np.array(leaf).tobytes() == right.tobytes()
    mover.close()


def test_a_state_moves_without_a_page_and_pages_without_a_state():
    abstract = abstract_state(SPEC, num_pages=(9,), page_size=4, num_rows=ROWS)
    state, landed = bits(allocate(abstract), 1), threading.Semaphore(0)
    mover = Mover(SPEC, state, (6,), lambda *report: landed.release(), num_states=3)
    mover.prepare()
    kinds = {(kind, part, count) for kind, part, count in mover._programs if part == 1}
    assert kinds == {("gather", 1, 1), ("scatter", 1, 1)}
    expected = jax.tree.map(np.array, state)
    one, two = np.array([1], np.int32), np.array([2], np.int32)
    mover.save(state, Transfer(1, (NONE,), (NONE,), one, one))
    mover.save(state, Transfer(2, (one,), (one,)))
    assert landed.acquire(timeout=60) and landed.acquire(timeout=60)
    state = mover.load(state, Transfer(3, (NONE,), (NONE,), two, one))
    state = mover.load(state, Transfer(4, (two,), (one,)))
    for leaf in (*jax.tree.leaves(expected.recurrent), *jax.tree.leaves(expected.kv)):
        leaf[2] = leaf[1]
    for leaf, right in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert np.array(leaf).tobytes() == right.tobytes()
    mover.close()


# ---- in an engine ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kit():
    """Forty pages for four sequences, and room on the host."""
    kit = make_kit(recurrent_model(), rows=(4,), preemption_mode="swap", cpu_mem_fold=2.0)
    assert kit.plan.scheduler.host_states == 2 * 4 and kit.plan.memory.host_pages == (2 * 39,)
    kit.table.wait(shapes_of(kit.plan.scheduler))
    return kit


def start(kit, **changes):
    """An engine in whose state every slot but the zero one is poisoned."""

    def poisoned():
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        state = allocate(kit.plan.state, sharding)
        slots = jnp.arange(4 + 2) != zero_slot(4)

        def spoil(leaf):
            return jnp.where(slots.reshape(-1, *[1] * (leaf.ndim - 1)), jnp.nan, leaf)

        return jax.device_put(replace(state, recurrent=jax.tree.map(spoil, state.recurrent)), sharding)

    config = replace(kit.plan.scheduler, **changes)
    spec = kit.model.spec
    return Engine(kit.model.params, poisoned, kit.table, config, spec=spec, vocab_size=VOCAB)


def prompts(count=10):
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, int(size)).tolist() for size in rng.integers(1, 90, count)]


def crowd(engine):
    """Requests that cannot all stay on the device; those that were answered wrong."""
    client, given = Client(engine), prompts()
    answers = [client.start(prompt, PARAMS) for prompt in given]
    samples = [answer.wait()[0] for answer in answers]
    return [
        (i, sample.error, sample.token_ids)
        for i, (prompt, sample) in enumerate(zip(given, samples, strict=True))
        if sample.error is not None or sample.token_ids != by_hand(prompt, PARAMS.max_tokens)
    ]


def test_swapped_sequences_get_what_they_get_alone(kit):
    assert len({tuple(by_hand(prompt, 50)) for prompt in prompts()}) == 10
    engine = start(kit)
    for _ in range(2):
        assert crowd(engine) == []
    stats = engine.stats()
    check_nothing_is_left(engine)
    assert stats["swap_out_states"] == stats["swap_out_sequences"] == stats["swap_in_states"] >= 4
    assert stats["recomputed_tokens"] == stats["swap_failures"] == stats["host_states_used"] == 0
    page, state = engine._mover.hosts[0].page_bytes, kit.plan.scheduler.state_bytes
    assert page == kit.plan.scheduler.page_bytes[0] and state == 4 * (1 + 1 + 2)
    moved = stats["swap_out_pages"] * page + stats["swap_out_states"] * state
    assert stats["swap_out_bytes"] == stats["swap_in_bytes"] == moved


def test_aborts_under_swap_leave_no_state_and_spoil_nobody(kit):
    engine, rng = start(kit), np.random.default_rng(5)
    client = Client(engine)
    given = prompts(24)
    answers = [client.start(prompt, PARAMS) for prompt in given]
    aborted = set(rng.permutation(24)[:9].tolist())
    for i in sorted(aborted):
        if i and i - 1 not in aborted:
            assert answers[i - 1].first.wait(60)
        engine.abort(answers[i].request_id)
    for i, (prompt, answer) in enumerate(zip(given, answers, strict=True)):
        (sample,) = answer.wait()
        assert sample.error is None
        assert sample.reason is FinishReason.LENGTH or i in aborted
        assert sample.token_ids == by_hand(prompt, 50)[: len(sample.token_ids)]
    stats = engine.stats()
    check_nothing_is_left(engine)
    assert stats["swap_out_states"] > 0 and stats["host_states_used"] == 0


@pytest.mark.parametrize("states", [0, 1])
def test_too_little_room_for_states_means_to_compute_again(states, kit):
    engine = start(kit, host_states=states)
    assert crowd(engine) == []
    stats = engine.stats()
    check_nothing_is_left(engine)
    assert (stats["swap_out_states"] > 0) == (states > 0)
    assert stats["recomputed_tokens"] > 0 or states


@pytest.mark.parametrize("calls", [{1}, {1, 2, 3, 4}, EVERY], ids=["first", "some", "all"])
@pytest.mark.parametrize("name", ["save", "load"])
def test_an_exception_while_moving_costs_nobody_an_answer(name, calls, kit, monkeypatch):
    fail_on(monkeypatch, name, calls)
    engine = start(kit)
    assert crowd(engine) == []
    assert engine.stats()["swap_failures"] >= 1
    check_nothing_is_left(engine)


def test_a_device_state_lost_while_loading_costs_one_step(kit, monkeypatch):
    fail_on(monkeypatch, "load", {1}, losing=True)
    engine = start(kit)
    assert all("could not be moved" in (error or "") for _, error, _ in crowd(engine))
    assert engine.stats()["swap_failures"] >= 1
    check_nothing_is_left(engine)


# ---- builds that are broken on purpose ---------------------------------------------------


def break_no_copy_back(patch):
    whole = Mover.load
    none = np.empty(0, np.int32)
    patch.setattr(
        Mover, "load", lambda self, state, t: whole(self, state, replace(t, rows=none, states=none))
    )


def break_the_wrong_row(patch):
    whole = Mover.load
    patch.setattr(
        Mover, "load", lambda self, state, t: whole(self, state, replace(t, rows=(t.rows + 1) % ROWS))
    )


def break_one_layer_is_left_out(patch):
    whole = Mover._replace

    def put(self, state, part, pages):
        pages = pages if part == 0 else (pages[0], state.recurrent[self._layer_ids[part][1]])
        return whole(self, state, part, pages)

    patch.setattr(Mover, "_replace", put)


def break_no_copy_out(patch):
    whole = Mover._land
    patch.setattr(
        Mover, "_land", lambda self, serial, values: whole(self, serial, [v for v in values if v[0] == 0])
    )


def break_pages_stay_behind(patch):
    whole = Mover._parts
    patch.setattr(Mover, "_parts", lambda self, t: [(NONE, NONE), whole(self, t)[-1]])


BREAKS = [value for name, value in sorted(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("spoil", BREAKS, ids=lambda item: item.__name__)
def test_a_broken_build_breaches_the_law(spoil, kit, monkeypatch):
    spoil(monkeypatch)
    engine = start(kit)
    wrong = crowd(engine)
    engine.close()
    assert wrong
