"""Text under hits, swap and recompute is what each request gets alone and cold: through the real text front.

Stop strings are found on text, over several tokens, where penalties, seeds and log-probabilities shape it.
"""

from collections import Counter

import numpy as np
import pytest

from tests.engine.test_llm import is_idle
from tests.engine.tiny_folder import write_folder
from xjax import LLM, SamplingParams
from xjax.engine.transfer import Mover

pytestmark = pytest.mark.device

OPTIONS = {"max_num_seqs": 4, "page_size": 4, "prefill_chunk_size": 64, "max_model_len": 160, "num_pages": 41}
MODES = {
    "swap": {"preemption_mode": "swap", "cpu_mem_fold": 2.0},
    "recompute": {"preemption_mode": "recompute"},
    "whole": {"preemption_mode": "swap", "cpu_mem_fold": 2.0, "disable_prefix_cache": True},
}
# Each must happen at least this often in a mode, or it proves less than it says.
MINIMA = {
    "swap": {"prefix_hits": 12, "swap_out_sequences": 4, "swap_in_pages": 40},
    "recompute": {"prefix_hits": 12, "preemptions": 4, "recomputed_tokens": 100},
    "whole": {"swap_out_sequences": 4, "swap_in_pages": 40},
}
NUM_REQUESTS = 28


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cold(folder):
    """One request at a time has pages for all of it, and nothing is kept."""
    with LLM(folder, **OPTIONS, disable_prefix_cache=True) as llm:
        yield llm


def make_prompts():
    """Texts, most of which begin as another."""
    rng = np.random.default_rng(0)
    letters = list("abcdefghijklmnopqrstuvwxyz ,.")
    stems = ["".join(rng.choice(letters, 70)) for _ in range(2)]
    own = ["".join(rng.choice(letters, int(rng.integers(4, 24)))) for _ in range(NUM_REQUESTS)]
    shared = rng.integers(20, 70, NUM_REQUESTS)
    return [stems[i % 2][: shared[i]] * (i % 4 > 0) + text for i, text in enumerate(own)]


KINDS = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1.1, "seed": 5, "logprobs": 2},
    {"temperature": 0.9, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.8, "logprobs": 0},
    {"temperature": 0, "logprobs": 3, "logit_bias": {7: 2.0, 9: -3.0}},
    {"temperature": 1.0, "seed": 7, "top_k": 9, "min_p": 0.02},
    {"temperature": 0, "prompt_logprobs": 1},
)


def make_params(i, text):
    """Of a request whose text, without a stop, is `text`: most stop inside it, over one to five tokens."""
    rng = np.random.default_rng([i, 1])
    params = SamplingParams(max_tokens=60, ignore_eos=True, **KINDS[i % len(KINDS)])
    if text is None or i % 5 == 4:
        return params
    start, size = int(rng.integers(8, 50)), int(rng.integers(1, 6))
    # The last is a beginning of one that is never completed, so that text is held back.
    stops = (text[start : start + size], text[start + 6 : start + 9] + "\x7f")
    return params.replace(stop=stops, include_stop_str_in_output=bool(i % 2))


def shown(result):
    """All that a client can see; numbers are rounded, since batches may add in another order."""
    output = result.outputs[0]
    entries = [*(output.logprobs or ()), *(item for item in result.prompt_logprobs or () if item)]
    scores = [(token, round(found.logprob, 3)) for entry in entries for token, found in sorted(entry.items())]
    return output.text, tuple(output.token_ids), output.finish_reason, output.stop_reason, tuple(scores)


def differences(one, other):
    """Which of what a client sees differs; log-probabilities by more than a little."""
    bad = [name for name, a, b in zip(("text", "ids", "reason", "stop"), one, other, strict=False) if a != b]
    close = len(one[4]) == len(other[4]) and all(
        a[0] == b[0] and abs(a[1] - b[1]) <= 2e-3 for a, b in zip(one[4], other[4], strict=True)
    )
    return bad + ([] if close else ["scores"])


@pytest.fixture(scope="module")
def jobs(cold):
    """Prompts, parameters and what each gets alone."""
    prompts, found = make_prompts(), []
    for i, prompt in enumerate(prompts):
        free = cold.generate(prompt, make_params(i, None))[0]
        params = make_params(i, free.outputs[0].text)
        found.append((prompt, params, shown(cold.generate(prompt, params)[0])))
    return found


def test_the_reference_stops_inside_texts_and_over_several_tokens(jobs):
    reasons = Counter(seen[2] for _, _, seen in jobs)
    assert reasons["stop"] >= 15 and reasons["length"] >= 4
    assert sum(len(seen[3] or "") > 1 for _, _, seen in jobs) >= 8
    assert len({seen[0] for _, _, seen in jobs}) == len(jobs)
    for _, params, (text, ids, reason, stop, _) in jobs:
        if reason == "stop":
            assert stop in params.stop and len(ids) < params.max_tokens
            assert text.endswith(stop) if params.include_stop_str_in_output else stop not in text


def run(llm, jobs):
    """All together, twice; which requests were shown something else than alone."""
    wrong = []
    for _ in range(2):
        results = llm.generate([prompt for prompt, _, _ in jobs], [params for _, params, _ in jobs])
        wrong += [
            (i, result.error, bad)
            for i, (result, (_, _, right)) in enumerate(zip(results, jobs, strict=True))
            if result.error is not None or (bad := differences(shown(result), right))
        ]
    return wrong


@pytest.mark.parametrize("mode", list(MODES))
def test_the_text_is_what_it_is_alone_and_cold(mode, folder, jobs):
    with LLM(folder, **OPTIONS, **MODES[mode]) as llm:
        assert run(llm, jobs) == []
        assert is_idle(llm)
        stats = llm.stats()
    assert {name: stats[name] for name, least in MINIMA[mode].items() if stats[name] < least} == {}
    assert stats["swap_failures"] == stats["failed_steps"] == 0
    if mode == "whole":
        assert stats["prefix_hits"] == stats["retained_pages"] == 0


def test_streams_say_the_same(folder, jobs):
    """Pieces put together, of prompts that are found whole, beside others that are swapped."""
    with LLM(folder, **OPTIONS, **MODES["swap"]) as llm:
        run(llm, jobs[:8])
        streams = [llm.stream(prompt, params) for prompt, params, _ in jobs[:8]]
        for stream, (_, _, right) in zip(streams, jobs, strict=False):
            chunks = list(stream)
            assert "".join(chunk.text for chunk in chunks) == right[0]
            assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == right[2:4]
        assert llm.stats()["prefix_hit_tokens"] > 200


def test_a_build_that_copies_nothing_back_breaches_the_law(folder, jobs, monkeypatch):
    monkeypatch.setattr(Mover, "load", lambda self, state, transfer: state)
    with LLM(folder, **OPTIONS, **MODES["swap"]) as llm:
        assert any("text" in bad for _, error, bad in run(llm, jobs) if error is None)
