"""Chunks beside decodes: as large as the time for a step allows, whatever the machine's pace."""

from types import SimpleNamespace

import pytest

from xjax.scheduler.pace import Pace

SHAPES = (32, 128, 512)


def step(prefill, num_decode):
    return SimpleNamespace(prefill=None if prefill is None else (prefill, 32), num_decode=num_decode)


def run(pace, *, decode, token, times=40):
    """A machine of this pace: each round a step of decodes alone and one with the chunk that is allowed."""
    chosen = SHAPES[0]
    for _ in range(times):
        pace.observe(step(None, 8), decode)
        most = pace.most_tokens(0.25, SHAPES[-1])
        chosen = max((size for size in SHAPES if size <= most), default=SHAPES[0])
        pace.observe(step(chosen, 8), decode + chosen * token)
    return chosen


@pytest.mark.parametrize(
    ("decode", "token", "chosen"),
    [(0.04, 0.0014, 128), (0.04, 0.0004, 512), (0.05, 0.01, 32), (0.6, 0.001, 512), (1.0, 0.005, 128)],
)
def test_a_chunk_takes_what_the_target_leaves_or_as_long_as_the_decodes(decode, token, chosen):
    assert run(Pace(), decode=decode, token=token) == chosen


def test_small_chunks_are_left_again_when_the_machine_is_fast_again():
    pace = Pace()
    assert run(pace, decode=0.04, token=0.02) == 32
    assert run(pace, decode=0.04, token=0.0014) == 128


def test_one_slow_step_changes_little():
    pace = Pace()
    run(pace, decode=0.04, token=0.001)
    before = pace.most_tokens(0.25, 512)
    pace.observe(step(128, 8), 30.0)
    assert pace.most_tokens(0.25, 512) >= before / 1.5


def test_nothing_is_held_back_before_anything_is_known():
    assert Pace().most_tokens(0.25, 512) == 512
