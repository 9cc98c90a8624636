"""Shared prefixes and swapped pages give each request what it gets alone and cold.

Builds that are broken on purpose must breach the law, or it would prove nothing.
"""

import sys
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.engine.schedules import Job, alone, make_jobs, run_schedule
from tests.engine.tiny import VOCAB, Client
from xjax.cache.keys import KeyChain
from xjax.engine.transfer import Mover
from xjax.request import FinishReason, SamplingParams
from xjax.scheduler.pages.prefix import PrefixCache
from xjax.storage.host import HostPages

pytestmark = pytest.mark.device

NUM_SCHEDULES = 5
# Each must happen at least this often over all schedules of a model.
MINIMA = {
    "prefix_hits": 20,
    "prefix_hit_tokens": 400,
    "swap_out_sequences": 8,
    "swap_out_pages": 60,
    "swap_in_pages": 60,
    "retained_pages": 5,
    "page_copies": 4,
    "aborts": 3,
    "tokens": 1500,
    "scores": 60,
}


def conversations(seed: int) -> list[Job]:
    """The jobs of a seed, of which most begin alike."""
    rng = np.random.default_rng([seed, 7])
    stems = [rng.integers(0, VOCAB, 90).tolist() for _ in range(2)]
    jobs = []
    for job in make_jobs(seed, count=24, longest=156):
        prompt = list(job.prompt)
        if rng.random() < 0.75:
            same = int(rng.choice([len(prompt), len(prompt) - 1, rng.integers(0, len(prompt) + 1)]))
            prompt[:same] = stems[rng.integers(2)][:same]
        jobs.append(replace(job, prompt=tuple(prompt)))
    return jobs


def with_cache(kit, **changes):
    """A kit with the same programs, the cache on and pages on the host."""
    given = {
        "prefix_cache": True, "preemption_mode": "swap", "least_awaited": 4,
        "host_pages": tuple(2 * count for count in kit.plan.scheduler.num_pages),
    }  # fmt: skip
    scheduler = replace(kit.plan.scheduler, **(given | changes))
    return replace(kit, plan=replace(kit.plan, scheduler=scheduler))


@pytest.fixture(scope="module")
def jobs():
    return [conversations(seed) for seed in range(NUM_SCHEDULES)]


@pytest.fixture(scope="module")
def references(jobs, llama_kit, gemma_kit):
    found = {}
    for name, kit in (("llama", llama_kit), ("gemma", gemma_kit)):
        engine = with_cache(kit, prefix_cache=False, host_pages=None).engine()
        found[name] = [alone(engine, part) for part in jobs]
        assert engine.stats()["prefix_hits"] == 0
        engine.close()
    return found


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_hits_and_swaps_change_nothing(name, jobs, references, request):
    engine = with_cache(request.getfixturevalue(f"{name}_kit")).engine()
    counts, excused = Counter(), []
    for part, reference in zip(jobs, references[name], strict=True):
        report = run_schedule(engine, part, reference)
        assert report.wrong == []
        counts.update(report.counts)
        excused += report.excused
    stats = engine.stats()
    engine.close()
    engine._scheduler.check()
    counts.update({key: int(stats[key]) for key in MINIMA if key in stats})
    sys.stdout.write(f"{name}: {dict(counts)}, excused: {excused}\n")
    assert len(excused) <= counts["tokens"] / 1000
    assert {key: counts[key] for key, least in MINIMA.items() if counts[key] < least} == {}
    assert stats["failed_steps"] == stats["swap_failures"] == 0
    assert not any(value for key, value in stats.items() if key.startswith("pages_used"))
    page_bytes = engine._mover.hosts[0].page_bytes
    if name == "llama":  # one group: what was copied is what was private, and no more
        assert stats["swap_out_bytes"] == stats["swap_out_pages"] * page_bytes


def test_computing_again_changes_nothing(jobs, references, llama_kit):
    engine = with_cache(llama_kit, preemption_mode="recompute", host_pages=None).engine()
    for part, reference in zip(jobs[:2], references["llama"][:2], strict=True):
        assert run_schedule(engine, part, reference).wrong == []
    stats = engine.stats()
    engine.close()
    assert stats["recomputed_tokens"] > 100 and stats["prefix_hits"] >= 5 and not stats["swap_out_pages"]


# ---- builds that are broken on purpose ---------------------------------------------------


def break_no_copy_back(patch):
    patch.setattr(Mover, "load", lambda self, state, transfer: state)


def break_no_copy_out(patch):
    patch.setattr(HostPages, "write", lambda self, slots, pages: None)


def break_no_copy_on_the_device(patch):
    patch.setattr(Mover, "copy", lambda self, state, moves: state)


def break_layers_swapped(patch):
    whole = HostPages.read
    patch.setattr(HostPages, "read", lambda self, *given: whole(self, *given)[::-1])


def break_one_page_too_many(patch):
    whole = PrefixCache.adopt

    def adopt(self, sequence, match, step_id):
        away = whole(self, sequence, match, step_id)
        sequence.num_computed += self._book.page_size * bool(match.records)
        return away

    patch.setattr(PrefixCache, "adopt", adopt)


BREAKS = [value for name, value in sorted(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("spoil", BREAKS)
def test_a_broken_build_breaches_the_law(spoil, jobs, references, llama_kit, monkeypatch):
    spoil(monkeypatch)
    engine = with_cache(llama_kit).engine()
    found = any(
        run_schedule(engine, part, reference).wrong
        for part, reference in zip(jobs, references["llama"], strict=True)
    )
    engine.close()
    assert found


# ---- what is counted ---------------------------------------------------------------------


def test_cached_tokens_are_what_is_not_computed(llama_kit):
    prompt = np.random.default_rng(3).integers(0, VOCAB, 90).tolist()
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    engine = with_cache(llama_kit).engine()
    client = Client(engine)

    def forward() -> float:
        stats = engine.stats()
        return stats["prefill_tokens"] + stats["decode_tokens"]

    seen = []
    for length in (90, 90, 88, 61, 4):
        before = forward()
        sample = client.run(prompt[:length], params)
        (cached,) = [e.num_cached_tokens for e in sample.events if e.num_cached_tokens is not None]
        # The last token is sampled and never computed; one more row may run ahead of the end.
        assert 0 <= forward() - before - (length + 9 - cached) <= 1
        seen.append(cached)
    assert seen == [0, 88, 84, 60, 0]
    engine.close()


def test_the_next_turn_finds_prompt_and_answer(gemma_kit):
    prompt = np.random.default_rng(4).integers(0, VOCAB, 50).tolist()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine = with_cache(gemma_kit).engine()
    answer = Client(engine).run(prompt, params).token_ids
    sample = Client(engine).start([*prompt, *answer, 5, 6, 7], params, priority=1).wait()[0]
    assert sample.reason is FinishReason.LENGTH
    # All that was computed: the last token of the answer was only sampled.
    assert sample.events[0].num_cached_tokens == (len(prompt) + len(answer) - 1) // 4 * 4
    engine.close()


def test_salts_and_clearing(llama_kit):
    prompt = np.random.default_rng(5).integers(0, VOCAB, 60).tolist()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine = with_cache(llama_kit).engine()
    client = Client(engine)

    def cached(salt: bytes = b"") -> int | None:
        return client.run(prompt, params, cache_salt=salt).events[0].num_cached_tokens

    assert [cached(), cached(), cached(b"a"), cached(b"b"), cached(b"a")] == [0, 56, 0, 0, 56]
    engine.clear_cache()
    assert [cached(b"a"), cached()] == [0, 0]
    engine.close()


def test_fifty_equal_prompts_compute_what_they_share_once(llama_kit):
    prompt = np.random.default_rng(6).integers(0, VOCAB, 60).tolist()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    engine = with_cache(llama_kit).engine()
    client = Client(engine)
    samples = [answer.wait()[0] for answer in [client.start(prompt, params) for _ in range(50)]]
    stats = engine.stats()
    engine.close()
    assert all(sample.token_ids == samples[0].token_ids for sample in samples)
    assert sorted(sample.events[0].num_cached_tokens for sample in samples) == [0] + [56] * 49
    assert stats["prefill_tokens"] + stats["decode_tokens"] == 60 + 49 * 4 + 50 * 4
    assert stats["prefix_hit_tokens"] == 49 * 56 and stats["recomputed_tokens"] == 0


def test_users_who_take_turns_get_what_they_get_cold(llama_kit):
    """8 users, 10 turns; a whole conversation takes 13 pages, of 39."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engines = [with_cache(llama_kit, **changes).engine() for changes in ({}, {"prefix_cache": False})]
    warm, cold = map(Client, engines)
    rng = np.random.default_rng(7)
    talks = [rng.integers(0, VOCAB, 3).tolist() for _ in range(8)]
    cached = 0
    for _ in range(10):
        users = rng.permutation(8).tolist()
        answers = {user: warm.start(talks[user], params) for user in users}
        for user in users:
            (sample,) = answers[user].wait()
            assert sample.token_ids == cold.run(talks[user], params).token_ids
            cached += sample.events[0].num_cached_tokens
            talks[user] += [*sample.token_ids, *rng.integers(0, VOCAB, 2).tolist()]
    stats = [engine.stats() for engine in engines]
    for engine in engines:
        engine.close()
        engine._scheduler.check()
    forward = [item["prefill_tokens"] + item["decode_tokens"] for item in stats]
    # Nobody is preempted at these lengths, so what was found is what was not computed.
    assert stats[0]["preemptions"] == 0 and forward[1] - forward[0] == cached > 500
    assert stats[1]["prefix_hits"] == 0


@pytest.mark.parametrize("length", [4, 8, 60, 64])
def test_prompts_of_exactly_full_pages(length, llama_kit):
    prompt = np.random.default_rng(8).integers(0, VOCAB, length).tolist()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine = with_cache(llama_kit).engine()
    first, second = (Client(engine).start(prompt, params, priority=i).wait()[0] for i in range(2))
    engine.close()
    assert second.token_ids == first.token_ids
    assert second.events[0].num_cached_tokens == length - 4


def test_prefixes_that_differ_in_the_last_token_of_a_page(llama_kit):
    prompt = np.random.default_rng(9).integers(0, VOCAB, 40).tolist()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engines = [with_cache(llama_kit, prefix_cache=on).engine() for on in (True, False)]
    warm, cold = map(Client, engines)
    warm.run(prompt, params)
    for place in (3, 4, 19, 35, 36):
        other = list(prompt)
        other[place] = (other[place] + 1) % VOCAB
        sample = warm.run(other, params)
        assert sample.token_ids == cold.run(other, params).token_ids
        assert sample.events[0].num_cached_tokens == place // 4 * 4
    for engine in engines:
        engine.close()


def test_prompts_are_hashed_by_who_asks_and_answers_a_page_at_a_time(llama_kit, monkeypatch):
    hashed, whole = [], KeyChain.next

    def note(self, *given):
        hashed.append(threading.current_thread().name)
        return whole(self, *given)

    monkeypatch.setattr(KeyChain, "next", note)
    engine = with_cache(llama_kit).engine()
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    Client(engine).run(np.random.default_rng(10).integers(0, VOCAB, 62).tolist(), params)
    engine.close()
    counts = Counter(hashed)
    assert counts == {threading.current_thread().name: 62 // 4, "xjax-engine": (62 + 9) // 4 - 62 // 4}
