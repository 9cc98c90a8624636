"""Any batching, chunking, preemption and sharing gives each request what it gets alone.

Builds that are broken on purpose must breach the law, or it would prove nothing.
"""

import sys
from collections import Counter

import numpy as np
import pytest

from tests.engine.schedules import alone, make_jobs, run_schedule
from tests.engine.tiny import VOCAB, Client
from xjax.engine import loop
from xjax.request import SamplingParams
from xjax.scheduler.pages.rows import RowTable
from xjax.state.batch import Packed

pytestmark = pytest.mark.device

NUM_SCHEDULES = 6
# Each must happen at least this often over all schedules of a model.
MINIMA = {
    "preemptions": 5,
    "chunk_splits": 12,
    "aborts": 3,
    "shared_tokens": 40,
    "tokens": 1200,
    "scores": 60,
}


@pytest.fixture(scope="module")
def jobs():
    return [make_jobs(seed, count=28, longest=156) for seed in range(NUM_SCHEDULES)]


@pytest.fixture(scope="module")
def references(jobs, llama_kit, gemma_kit):
    found = {}
    for name, kit in (("llama", llama_kit), ("gemma", gemma_kit)):
        engine = kit.engine()
        found[name] = [alone(engine, part) for part in jobs]
        engine.close()
    return found


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_batching_changes_nothing(name, jobs, references, request):
    engine = request.getfixturevalue(f"{name}_engine")
    counts, excused = Counter(), []
    for part, reference in zip(jobs, references[name], strict=True):
        report = run_schedule(engine, part, reference)
        assert report.wrong == []
        counts.update(report.counts)
        excused += report.excused
    sys.stdout.write(f"{name}: {dict(counts)}, excused: {excused}\n")
    assert len(excused) <= counts["tokens"] / 1000
    assert {key: counts[key] for key, least in MINIMA.items() if counts[key] < least} == {}
    stats = engine.stats()
    assert stats["failed_steps"] == 0
    assert not any(value for key, value in stats.items() if key.startswith("pages_used"))


# ---- builds that are broken on purpose ---------------------------------------------------


def _view(vector, shape):
    view = Packed(shape)
    view.vector = vector
    return view


def _spoil(patch, change):
    """Change packed vectors: `change(view, plan, page_size)`."""
    whole = loop.Packer.__call__

    def pack(self, plan, shape):
        vector = whole(self, plan, shape).copy()
        change(_view(vector, shape), plan, self._config.page_size)
        return vector

    patch.setattr(loop.Packer, "__call__", pack)


def break_one_page_wrong(patch):
    def change(view, plan, page_size):
        if plan.num_decode:
            view.table[:, 0, 0] = view.table[:, plan.num_decode - 1, 0]

    _spoil(patch, change)


def break_write_in_the_neighbour_slot(patch):
    def change(view, plan, page_size):
        if plan.num_decode > 1:
            view.write[0, 0] = view.write[0, 1]

    _spoil(patch, change)


def break_no_pending(patch):
    def change(view, plan, page_size):
        if view.shape.full:
            view.pending[:] = 0

    _spoil(patch, change)


def break_position_after_recompute(patch):
    def change(view, plan, page_size):
        for chunk in plan.chunks:
            if chunk.start + chunk.length > plan.sequences[chunk.row].num_prompt:
                first = view.query_start[chunk.row]
                view.position[first : first + chunk.length] += 1

    _spoil(patch, change)


def break_sample_position_in_later_chunks(patch):
    def change(view, plan, page_size):
        for chunk in plan.chunks:
            view.sample_position[chunk.row] = chunk.length

    _spoil(patch, change)


def break_feedback_by_row(patch):
    def change(view, plan, page_size):
        rows = len(plan.sequences)
        view.sample_slot[:rows] = np.where(plan.samples, np.arange(rows), view.shape.trash_row)

    _spoil(patch, change)


def break_seed_of_the_row(patch):
    whole = RowTable.take

    def take(self, sequence):
        whole(self, sequence)
        self.columns["seed"][sequence.slot] = (sequence.slot, 0)

    patch.setattr(RowTable, "take", take)


def break_padding_writes_a_page(patch):
    def change(view, plan, page_size):
        used = plan.num_decode
        if plan.chunks and used < view.shape.num_decode:
            view.write[:, used] = plan.tables[:, plan.chunks[0].row, 0] * page_size

    _spoil(patch, change)


def break_scored_positions(patch):
    def change(view, plan, page_size):
        if len(plan.scored_targets):
            view.sample_token[view.shape.num_rows :] += 1

    _spoil(patch, change)


BREAKS = [value for name, value in sorted(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("spoil", BREAKS)
def test_a_broken_build_breaches_the_law(spoil, jobs, references, gemma_kit, monkeypatch):
    spoil(monkeypatch)
    engine = gemma_kit.engine()
    found = any(
        run_schedule(engine, part, reference).wrong
        for part, reference in zip(jobs, references["gemma"], strict=True)
    )
    engine.close()
    assert found


# ---- same seed, same text ----------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [True, False])
def test_same_seed_same_text(lookahead, gemma_kit):
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, VOCAB, 30).tolist()
    sampled = SamplingParams(temperature=1.2, max_tokens=80, seed=99, ignore_eos=True)
    shaped = sampled.replace(frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.2)
    engine = gemma_kit.engine()
    expected = [Client(engine).run(prompt, params).token_ids for params in (sampled, shaped)]
    engine.close()
    assert expected[0] != expected[1] and len(expected[0]) == 80
    engine = gemma_kit.engine(lookahead=lookahead)
    client = Client(engine)
    others = [sampled.replace(seed=i) for i in range(6)]
    answers = [client.start(prompt, params) for params in (*others[:3], sampled, *others[3:], shaped)]
    texts = [answer.wait()[0].token_ids for answer in answers]
    assert (texts[3], texts[7]) == tuple(expected)
    assert len({tuple(text) for text in texts}) == 8, "different seeds gave the same text"
    assert engine.stats()["preemptions"] > 0
    engine.close()


def test_samples_of_a_request_differ_and_can_be_repeated(llama_engine):
    params = SamplingParams(temperature=1.5, max_tokens=12, seed=4, n=4)
    texts = [
        [tuple(sample.token_ids) for sample in Client(llama_engine).start([1, 2, 3], params).wait()]
        for _ in range(2)
    ]
    assert texts[0] == texts[1] and len(set(texts[0])) == 4
