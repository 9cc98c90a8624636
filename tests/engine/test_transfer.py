"""The mover alone: which programs it takes, and which it makes ahead."""

import numpy as np
import pytest

from tests.engine.tiny import Client
from xjax.engine.transfer import RUNS, Mover, _runs
from xjax.request import SamplingParams

pytestmark = pytest.mark.device


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
    assert sorted(made, reverse=True) == list(RUNS)
    assert engine._mover._sizes("copy", 0) == list(RUNS)
    engine.close()


def test_nothing_is_made_once_it_is_closed(llama_kit, made):
    engine = llama_kit.engine()
    engine.close()
    engine.prepare_moves()
    assert made == []
