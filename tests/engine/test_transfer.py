"""The mover of pages: every bit arrives, the state stays where it is, and failures cost no engine."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.test_cache_laws import with_cache
from tests.engine.tiny import VOCAB, Client, Sample
from xjax.config import PagedLayer
from xjax.engine import transfer
from xjax.engine.transfer import RUNS, Mover, _runs
from xjax.errors import LoadError
from xjax.request import SamplingParams
from xjax.scheduler import Moves, Transfer
from xjax.state.kv import LayerKV, abstract_state, allocate

pytestmark = pytest.mark.device

PAGES = (200, 170)
SPEC = (PagedLayer(2, 8), PagedLayer(2, 8, window=12), PagedLayer(2, 8, window=12))
NONE = np.empty(0, np.int32)


class Kit:
    """A state of random bits, its mover, and what both pages and slots should hold."""

    def __init__(self, dtype: str, *, slots: tuple[int, ...] | None = (180, 180)) -> None:
        self.rng = np.random.default_rng(0)
        abstract = abstract_state(SPEC, num_pages=PAGES, page_size=4, num_rows=2, dtype=jnp.dtype(dtype))
        state = allocate(abstract)
        self.expected = [
            [self.bits(leaf.shape, leaf.dtype) for leaf in (layer.k, layer.v)] for layer in state.kv
        ]
        kv = tuple(LayerKV(*(jnp.array(values) for values in layer)) for layer in self.expected)
        self.state = state.replace(kv=kv)
        self.reports: list[tuple[int, bool, int]] = []
        self.landed = threading.Condition()
        self.mover = Mover(SPEC, self.state, slots, self.report)
        self.layers = [[0], [1, 2]]

    def bits(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        raw = self.rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        return raw.view(dtype)[..., 0]

    def report(self, serial: int, is_there: bool, num_bytes: int, seconds: float) -> None:
        with self.landed:
            self.reports.append((serial, is_there, num_bytes))
            self.landed.notify()

    def save(self, transfer_: Transfer) -> tuple[bool, int]:
        """Save and wait for the landing."""
        self.mover.save(self.state, transfer_)
        with self.landed:
            assert self.landed.wait_for(lambda: self.reports and self.reports[-1][0] == transfer_.serial, 60)
            return self.reports[-1][1:]

    def pick(self, counts: tuple[int, ...], of: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        return tuple(
            self.rng.permutation(np.arange(1, most, dtype=np.int32))[:count]
            for count, most in zip(counts, of, strict=True)
        )

    def addresses(self) -> list[int]:
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(self.state.kv)]

    def check(self) -> None:
        for layer, values in zip(self.state.kv, self.expected, strict=True):
            for leaf, expected in zip((layer.k, layer.v), values, strict=True):
                # A copy, since a view of a leaf would keep the next program from writing in place.
                assert np.array(leaf).tobytes() == expected.tobytes()


@pytest.fixture(params=["float32", "uint16"])  # the latter is how bfloat16 is kept on CPU
def kit(request):
    kit = Kit(request.param)
    yield kit
    kit.mover.close()


COUNTS = [(1, 0), (0, 1), (2, 3), (4, 5), (15, 17), (63, 64), (65, 21), (150, 149)]


def test_every_bit_comes_back_and_the_state_stays_in_place(kit):
    page_bytes = [host.page_bytes for host in kit.mover.hosts]
    assert page_bytes[1] == 2 * page_bytes[0] == 4 * 2 * 4 * 8 * kit.expected[0][0].itemsize
    addresses = kit.addresses()
    for serial, counts in enumerate(COUNTS):
        pages, slots = kit.pick(counts, PAGES), kit.pick(counts, (181, 181))
        moved = kit.save(Transfer(serial, pages, slots))
        assert moved == (True, sum(n * size for n, size in zip(counts, page_bytes, strict=True)))
        kit.check()  # reading changes nothing
        targets = kit.pick(counts, PAGES)
        kit.state = kit.mover.load(kit.state, Transfer(serial, targets, slots))
        for group, layer_ids in enumerate(kit.layers):
            for layer_id in layer_ids:
                for values in kit.expected[layer_id]:
                    values[targets[group]] = values[pages[group]]
        kit.check()
        assert kit.addresses() == addresses


def test_copies_read_before_they_write(kit):
    addresses = kit.addresses()
    for counts in ((1, 2), (5, 0), (70, 84)):
        sources = kit.pick(counts, PAGES)
        targets = tuple(
            np.setdiff1d(np.arange(1, most, dtype=np.int32), part)[: len(part)]
            for part, most in zip(sources, PAGES, strict=True)
        )
        kit.state = kit.mover.copy(kit.state, Moves((), (), sources, targets))
        for group, layer_ids in enumerate(kit.layers):
            for layer_id in layer_ids:
                for values in kit.expected[layer_id]:
                    values[targets[group]] = values[sources[group]]
        kit.check()
        assert kit.addresses() == addresses


def test_slots_may_be_written_again_as_soon_as_load_returns():
    kit = Kit("float32")
    pages, slots = (np.array([3, 4, 5], np.int32), NONE), (np.array([1, 2, 3], np.int32), NONE)
    kit.save(Transfer(1, pages, slots))
    targets = (np.array([7, 8, 9], np.int32), NONE)
    kit.state = kit.mover.load(kit.state, Transfer(2, targets, slots))
    kit.mover.hosts[0].write(slots[0], [np.zeros((3, 2, 4, 8), np.float32)] * 2)
    for values in kit.expected[0]:
        values[targets[0]] = values[pages[0]]
    kit.check()
    kit.mover.close()


class NotYet:
    """Stands for bytes that the device has not read."""

    def is_ready(self):
        return False


def test_memory_on_the_way_back_is_used_again_once_it_was_read(kit):
    pages = (np.arange(1, 5, dtype=np.int32), NONE)
    kit.save(Transfer(1, pages, pages))

    def load():
        kit.state = kit.mover.load(kit.state, Transfer(2, pages, pages))
        kit.check()
        return [arrays[0].ctypes.data for arrays, _ in kit.mover._staged[0, 4]]

    (first,) = load()
    assert load() == [first]
    kit.mover._staged[0, 4] = [(arrays, NotYet()) for arrays, _ in kit.mover._staged[0, 4]]
    assert len(set(load())) == 2
    for _ in range(9):
        kit.mover._staged[0, 4] = [(arrays, NotYet()) for arrays, _ in kit.mover._staged[0, 4]]
        assert len(load()) <= 4


def test_a_save_reads_what_was_there_before_a_later_write():
    kit = Kit("float32")
    pages, slots = (np.arange(1, 65, dtype=np.int32), NONE), (np.arange(1, 65, dtype=np.int32), NONE)
    kit.mover.save(kit.state, Transfer(1, pages, slots))
    sources = (np.arange(65, 129, dtype=np.int32), NONE)
    kit.state = kit.mover.copy(kit.state, Moves((), (), sources, pages))
    with kit.landed:
        assert kit.landed.wait_for(lambda: kit.reports, 60)
    for part, values in zip(kit.mover.hosts[0].read(slots[0]), kit.expected[0], strict=True):
        assert part.tobytes() == values[pages[0]].tobytes()
    kit.mover.close()


def test_all_programs_pass_the_audit_and_one_that_copies_is_refused(monkeypatch):
    kit = Kit("float32")
    kit.mover.prepare()
    kinds = {(kind, group) for kind, group, _ in kit.mover._programs}
    assert kinds == {(kind, group) for kind in ("copy", "gather", "scatter") for group in (0, 1)}
    kit.mover.close()
    without = Kit("float32", slots=None)
    without.mover.prepare()
    assert {kind for kind, _, _ in without.mover._programs} == {"copy"}
    without.mover.close()

    def scatter(pages, ids, values):
        return jax.tree.map(
            lambda array, new: (array * 2).at[ids].set(new + array[0, 0, 0, 0]), pages, values
        )

    monkeypatch.setattr(
        transfer,
        "_scatter",
        lambda *a: (jax.tree.map(lambda x: x.astype("int8"), scatter(*a)), a[1].sum()),
    )
    spoiled = Kit("float32")
    transfer_ = Transfer(1, (np.array([1], np.int32), NONE), (np.array([1], np.int32), NONE))
    spoiled.save(transfer_)
    with pytest.raises(LoadError, match=r"scatter of 1 pages.*copied"):
        spoiled.mover.load(spoiled.state, transfer_)
    spoiled.mover.close()


def test_a_landing_that_fails_is_reported(monkeypatch):
    kit = Kit("float32")
    pages = (np.array([1], np.int32), NONE)

    def write(*args):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(kit.mover.hosts[0], "write", write)
        assert kit.save(Transfer(1, pages, pages)) == (False, 0)
    assert kit.save(Transfer(2, pages, pages))[0]
    kit.mover.close()


# ---- programs -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 4, 63, 64, 150])
@pytest.mark.parametrize("sizes", [RUNS, (16, 1), (1,)])
def test_runs_cover_everything_once_with_the_sizes_there_are(count, sizes):
    first, second = np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32) + 1000
    runs = list(_runs(first, second, sizes))
    assert {len(run) for run, _ in runs} <= set(sizes)
    assert [len(run) for run, _ in runs] == sorted((len(run) for run, _ in runs), reverse=True)
    assert np.concatenate([first[:0], *(run for run, _ in runs)]).tolist() == first.tolist()
    assert np.concatenate([second[:0], *(run for _, run in runs)]).tolist() == second.tolist()


@pytest.fixture
def made(monkeypatch):
    """Sizes of the programs that are made."""
    found, make = [], Mover._made
    monkeypatch.setattr(Mover, "_made", lambda self, *key: found.append(key[2]) or make(self, *key))
    return found


def copies(engine):
    """Answers of samples that share prompts whose last pages are partial."""
    client, params = Client(engine), SamplingParams(temperature=0, max_tokens=6, n=4, seed=1)
    answer = client.start(list(range(1, 31)), params)
    ids = [sample.token_ids for sample in answer.wait()]
    assert engine.stats()["page_copies"] == 3
    return ids


def test_without_preparation_a_program_is_made_when_it_is_needed(llama_engine, made):
    copies(llama_engine)
    assert made and max(made) <= 4


def test_a_move_waits_for_no_larger_program_while_they_are_made(llama_kit, made):
    engine = llama_kit.engine()
    engine.prepare_moves(singly=True)
    assert made == [1]  # there is no host memory to move to
    copies(engine)
    assert made == [1]
    engine.prepare_moves()
    assert sorted(made, reverse=True) == list(engine._mover.runs)
    assert engine._mover._sizes("copy", 0) == list(engine._mover.runs)
    engine.close()


def test_nothing_is_made_once_it_is_closed(llama_kit, made):
    engine = llama_kit.engine()
    engine.close()
    engine.prepare_moves()
    assert made == []


# ---- in an engine ------------------------------------------------------------------------


PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def prompts_of_a_crowd() -> list[list[int]]:
    """Four that cannot all stay on the device, half of which begin alike."""
    rng = np.random.default_rng(9)
    stem = rng.integers(0, VOCAB, 22).tolist()
    prompts = [stem + rng.integers(0, VOCAB, 9 + i).tolist() for i in range(2)]
    return prompts + [rng.integers(0, VOCAB, 29 + i).tolist() for i in range(2)]


def crowd(engine) -> list[Sample]:
    client = Client(engine)
    answers = [client.start(prompt, PARAMS) for prompt in prompts_of_a_crowd()]
    return [answer.wait()[0] for answer in answers]


@pytest.fixture(scope="module")
def expected(llama_kit):
    engine = with_cache(llama_kit, prefix_cache=False, host_pages=None).engine()
    client = Client(engine)
    found = [client.run(prompt, PARAMS).token_ids for prompt in prompts_of_a_crowd()]
    engine.close()
    return found


def fail_on(monkeypatch, name: str, calls: set[int], *, losing: bool = False) -> list[int]:
    """Let some calls of the mover raise, in its place or after the state was given away."""
    whole, seen = getattr(Mover, name), []

    def method(self, state, *args):
        seen.append(1)
        if len(seen) in calls:
            if losing:
                for leaf in jax.tree.leaves(state):
                    leaf.delete()
            raise RuntimeError("the device says no")
        return whole(self, state, *args)

    monkeypatch.setattr(Mover, name, method)
    return seen


EVERY = set(range(10**4))


@pytest.mark.parametrize("calls", [{1}, {2}, {1, 2, 3, 4}, EVERY], ids=["first", "second", "some", "all"])
@pytest.mark.parametrize("name", ["save", "load"])
def test_an_exception_while_moving_costs_nobody_an_answer(name, calls, expected, llama_kit, monkeypatch):
    fail_on(monkeypatch, name, calls)
    engine = with_cache(llama_kit).engine()
    for _ in range(2):
        samples = crowd(engine)
        assert [sample.error for sample in samples] == [None] * 4
        assert [sample.token_ids for sample in samples] == expected
    assert engine.stats()["swap_failures"] >= min(len(calls), 2)
    check_nothing_is_left(engine)


@pytest.mark.parametrize("calls", [{1}, {2}, {1, 2, 3}], ids=["first", "second", "some"])
def test_a_state_lost_while_loading_costs_one_step(calls, expected, llama_kit, monkeypatch):
    fail_on(monkeypatch, "load", calls, losing=True)
    engine = with_cache(llama_kit).engine()
    for _ in range(2):
        for sample, ids in zip(crowd(engine), expected, strict=True):
            is_right = sample.token_ids == ids
            assert is_right if sample.error is None else "could not be moved" in sample.error
    stats = engine.stats()
    assert stats["swap_failures"] >= min(len(calls), 2) and stats["failed_steps"] <= len(calls)
    check_nothing_is_left(engine)


def check_nothing_is_left(engine) -> None:
    engine.close()
    engine._scheduler.check()
    assert engine.stats()["pages_used_0"] == 0
    assert not engine._scheduler.swap._loads and not engine._scheduler.swap._saves


@pytest.mark.parametrize("losing", [False, True], ids=["kept", "lost"])
def test_a_copy_that_fails_spoils_no_sample(losing, llama_kit, monkeypatch):
    params = PARAMS.replace(n=3, max_tokens=12)
    prompt = np.random.default_rng(4).integers(0, VOCAB, 30).tolist()
    engine = with_cache(llama_kit).engine()
    right = Client(engine).start(prompt, params).wait()
    engine.close()
    seen = fail_on(monkeypatch, "copy", {1} if losing else EVERY, losing=losing)
    engine = with_cache(llama_kit).engine()
    samples = Client(engine).start(prompt, params).wait()
    assert seen
    for sample, other in zip(samples, right, strict=True):
        assert sample.token_ids == other.token_ids if sample.error is None else losing
    check_nothing_is_left(engine)
