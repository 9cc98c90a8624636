"""Sparse pairs of a sequence against a plain recount of its token list."""

import numpy as np
import pytest

from xjax.request import Request, SamplingParams
from xjax.scheduler.sequence.penalties import Penalties


def make(prompt, **sampling) -> Penalties | None:
    request = Request(
        request_id="a",
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(**sampling),
        eos_ids=frozenset({1, 2}),
    )
    return Penalties.of(request, np.array(prompt, np.int32))


def test_most_sequences_have_none():
    assert make([5, 6]) is None
    assert make([5, 6], min_tokens=3, ignore_eos=True) is None


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_counts_are_those_of_the_output_over_all_tokens(name):
    rng = np.random.default_rng(1)
    prompt, output = rng.integers(0, 300, 40).tolist(), rng.integers(0, 300, 500).tolist()
    penalties = make(prompt, **{name: 1.5})
    assert penalties is not None
    for place, token in enumerate(output):
        penalties.add(token)
        if place % 50 == 0:
            pairs = penalties.pairs(3, place + 1)
            assert pairs is not None and pairs.row == 3
            seen = output[: place + 1]
            expected = {i: seen.count(i) for i in {*prompt, *seen}}
            assert len(pairs.ids) == len(expected) == penalties.size(place + 1)
            assert dict(zip(pairs.ids.tolist(), pairs.counts.tolist(), strict=True)) == expected
            assert not pairs.biases.any()


def test_bans_are_lifted_at_min_tokens_and_give_back_the_bias():
    penalties = make([5], min_tokens=3, stop_token_ids=[9], logit_bias={2: 4.0, 7: -1.0})
    assert penalties is not None
    for num_output in range(3):
        pairs = penalties.pairs(0, num_output)
        assert pairs is not None and penalties.size(num_output) == 4
        biases = dict(zip(pairs.ids.tolist(), pairs.biases.tolist(), strict=True))
        assert biases == {1: -np.inf, 2: -np.inf, 9: -np.inf, 7: -1.0}
        assert (pairs.counts == -1).all()
    pairs = penalties.pairs(0, 3)
    assert pairs is not None and penalties.size(3) == 2
    assert dict(zip(pairs.ids.tolist(), pairs.biases.tolist(), strict=True)) == {2: 4.0, 7: -1.0}


def test_bans_alone_leave_nothing():
    penalties = make([5], min_tokens=1)
    assert penalties is not None
    assert penalties.size(0) == 2
    assert penalties.size(1) == 0 and penalties.pairs(0, 1) is None


def test_pairs_are_copies():
    penalties = make([5], presence_penalty=1.0)
    assert penalties is not None
    before = penalties.pairs(0, 0)
    penalties.add(5)
    assert before is not None and before.counts.tolist() == [0]
