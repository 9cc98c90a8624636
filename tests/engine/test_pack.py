"""Packing step after step gives the very vectors that packing each step alone gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.scheduler.traces import make_trace, run_trace
from xjax.config import SchedulerConfig, StepShapes
from xjax.engine.pack import Packer, pack, shape_of
from xjax.request import Request, SamplingParams
from xjax.scheduler import Scheduler, StepResult


class Checked(Packer):
    """Compares each vector with one packed from nothing; keeps the last two, as steps under way do."""

    def __init__(self, config):
        super().__init__(config)
        self.under_way = []
        self.num_reused = self.num_steps = 0
        self._seen = set()

    def step(self, plan):
        shape = self.shape_of(plan)
        vector = self(plan, shape)
        assert not any(vector is other for other in self.under_way)
        self.under_way = [*self.under_way[-1:], vector]
        expected = pack(plan, shape_of(plan, self._config), page_size=self._config.page_size)
        np.testing.assert_array_equal(vector, expected)
        self.num_steps += 1
        self.num_reused += id(vector) in self._seen
        self._seen.add(id(vector))


def test_vectors_are_those_of_each_step_alone(monkeypatch):
    whole, packers = Scheduler.plan, {}

    def plan(self, now=0.0):
        made = whole(self, now)
        if made is not None:
            packers.setdefault(self, Checked(self.config)).step(made)  # keeps the scheduler: ids come again
        return made

    monkeypatch.setattr(Scheduler, "plan", plan)
    for seed in range(24):
        run_trace(make_trace(seed))
    assert sum(packer.num_steps for packer in packers.values()) > 1000
    assert sum(packer.num_reused for packer in packers.values()) > 100


def steady_scheduler():
    shapes = StepShapes.plan(max_num_seqs=4, prefill_chunk_size=64, max_model_len=128)
    config = SchedulerConfig(
        max_num_seqs=4, max_model_len=128, page_size=8, num_pages=(65,), windows=(None,), shapes=shapes
    )
    scheduler = Scheduler(config)
    for row in range(4):
        params = SamplingParams(max_tokens=60, seed=row)
        scheduler.submit(Request(request_id=str(row), prompt_ids=(1, 2, 3, row), sampling=params))
    return config, scheduler


def go_on(scheduler):
    """Plan a step and commit the one before, as the engine does; yields plans of decoding rows."""
    before = None
    while (plan := scheduler.plan()) is not None:
        if before is not None:
            zeros = np.zeros(before.num_rows, np.int32)
            scheduler.commit(before, StepResult(zeros + 7, zeros))
        before = plan
        if not plan.chunks:
            yield plan


def test_vectors_in_use_are_never_written_again():
    config, scheduler = steady_scheduler()
    packer, kept = Packer(config), []
    for plan, _ in zip(go_on(scheduler), range(20), strict=False):
        vector = packer(plan, packer.shape_of(plan))
        assert not any(vector is other for other, _ in kept)
        kept.append((vector, vector.copy()))
    assert len(kept) == 20
    for vector, copy in kept:
        np.testing.assert_array_equal(vector, copy)


def test_vectors_that_nobody_uses_are_written_again():
    config, scheduler = steady_scheduler()
    packer, places = Packer(config), set()
    for plan, _ in zip(go_on(scheduler), range(20), strict=False):
        places.add(packer(plan, packer.shape_of(plan)).ctypes.data)
    assert len(places) == 1


def test_a_view_of_a_vector_keeps_it():
    """As JAX does: what it holds is a view of the memory, and no name for the vector."""
    config, scheduler = steady_scheduler()
    packer, views = Packer(config), []
    for plan, _ in zip(go_on(scheduler), range(3), strict=False):
        views.append(memoryview(packer(plan, packer.shape_of(plan))))  # type: ignore[arg-type]
    assert len({np.asarray(view).ctypes.data for view in views}) == 3


@pytest.mark.device
def test_steps_that_wait_read_what_they_were_given():
    """JAX aliases vectors that happen to be aligned: what a step has not read must not be written."""

    def late(vector, start):
        busy = jax.lax.fori_loop(0, 40, lambda _, x: jnp.sin(x @ x), jnp.ones((300, 300)) * start[0])
        return jnp.where(busy.sum() > 1e9, 0, vector)

    run, start = jax.jit(late), np.ones(1, np.float32)
    given, packers, is_aligned = [], [], False
    for _ in range(16):
        config, scheduler = steady_scheduler()
        packers.append(Packer(config))
        for plan, _ in zip(go_on(scheduler), range(5), strict=False):
            vector = packers[-1](plan, packers[-1].shape_of(plan))
            is_aligned |= vector.ctypes.data % 64 == 0
            given.append((vector.copy(), run(vector, start)))
            del vector
    assert is_aligned, "else nothing was aliased"
    for vector, found in given:
        np.testing.assert_array_equal(found, vector)
