"""Shared prefixes from the side of sequences: who waits for whom, what is found, what is told of it."""

import numpy as np
import pytest

from tests.scheduler.pages.swapping import SIZE, Play, letters
from xjax.cache.keys import KeyChain, page_tokens
from xjax.request import Request, SamplingParams
from xjax.scheduler import Prompt
from xjax.scheduler.sequence import Status


@pytest.mark.parametrize("rows", [4, 50])
def test_of_fifty_equal_prompts_one_computes_what_they_share(rows):
    play = Play(300, rows=rows)
    names = [play.submit([*letters("abcdefgh"), 3, i + 4], 4) for i in range(50)]
    play.run()
    cached = [play.cached(name) for name in names]
    assert cached == [0] + [32] * 49
    # Each its own two tokens and three of its four answers; the shared part once.
    assert play.loop.num_forward == 32 + 50 * (2 + 3)
    assert play.counts["prefix_hits"] == 49 and play.counts["prefix_hit_tokens"] == 49 * 32


def test_prompts_of_exactly_full_pages_keep_a_page_to_compute():
    play = Play(100)
    lengths = [SIZE * count + more for count in (1, 2, 5) for more in (-1, 0, 1)]
    text = letters("abcdefg")
    play.submit(text, 2)
    play.run()
    for length in lengths:
        assert play.cached(play_one(play, text[:length])) == (length - 1) // SIZE * SIZE


def play_one(play: Play, prompt: list[int]) -> str:
    name = play.submit(prompt, 3)
    play.run()
    return name


@pytest.mark.parametrize("place", [0, 3, 4, 7, 8, 11])
def test_one_other_token_ends_the_shared_prefix_at_its_page(place):
    play = Play(100)
    text = letters("abcd")
    play_one(play, text)
    text[place] = 2 + (text[place] - 1) % 50
    assert play.cached(play_one(play, text)) == place // SIZE * SIZE


def test_the_next_turn_finds_prompt_and_answer():
    play = Play(100)
    name = play_one(play, letters("abc"))
    answer = [token for event in play.events[name] for token in event.token_ids]
    prompt = letters("abc")
    for _ in range(4):
        prompt = [*prompt, *answer, *letters("q")]
        name = play.submit(prompt, 9)
        play.run()
        # Of the last answer all but the last token was computed.
        assert play.cached(name) == (len(prompt) - SIZE - 1) // SIZE * SIZE
        answer = [token for event in play.events[name] for token in event.token_ids]


def test_salts_are_strangers():
    play = Play(100)
    found = []
    for salt in (b"", b"a", b"b", b"", b"a", b"b"):
        name = play.submit(letters("abc"), 2, cache_salt=salt)
        play.run()
        found.append(play.cached(name))
    assert found == [0, 0, 0, 8, 8, 8]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("num_prompt", "reason"), [(1, "short"), (4, "short"), (12, "unknown")])
def test_a_prompt_counts_once_whatever_n_is(n, num_prompt, reason):
    """Also where its samples have nothing to share, or lose it while they wait for a row."""
    play = Play(60, rows=1)
    play.submit(letters("abc")[:num_prompt], 6, n=n)
    play.until(lambda: play.roster._sharing or play.loop.is_idle)
    play.roster.drop_shared()
    play.run()
    counted = {name: play.counts[name] for name in play.roster.prefix.counts if play.counts[name]}
    assert counted == {f"prefix_misses_{reason}": 1}
    play.submit(letters("abc"), 6, n=n)
    play.run()
    found = min(num_prompt // SIZE * SIZE, 8)
    assert (play.counts["prefix_hits"], play.counts["prefix_hit_tokens"]) == (found > 0, found)


def test_keys_that_collide_never_give_a_hit_that_is_none(monkeypatch):
    monkeypatch.setattr(KeyChain, "next", lambda self, parent, tokens, salt=b"": b"k")
    rng, play = np.random.default_rng(0), Play(40)
    for i in range(40):
        text = "".join(rng.choice(list("abc"), rng.integers(1, 6)))
        play.submit([*letters(text), 5 + i], 6, cache_salt=bytes([rng.integers(2)]))
        play.steps(int(rng.integers(8)))
    play.run()
    assert play.counts["prefix_hits"] > 0


def test_one_byte_keys_never_give_a_hit_that_is_none(monkeypatch):
    whole = KeyChain.next
    monkeypatch.setattr(
        KeyChain,
        "next",
        lambda self, parent, tokens, salt=b"": bytes([whole(self, parent, tokens, salt)[0] % 5]),
    )
    for seed in range(4):
        rng, play = np.random.default_rng(seed), Play(30 + 10 * seed)
        for i in range(30):
            text = "".join(rng.choice(list("abc"), rng.integers(1, 6)))
            play.submit([*letters(text), 5 + i], 12, cache_salt=bytes([rng.integers(2)]))
            play.steps(int(rng.integers(8)))
        play.run()
        assert play.counts["prefix_hits"] > 3


def test_off_means_no_hit_and_no_record():
    play = Play(100, prefix_cache=False)
    for _ in range(3):
        assert play.cached(play_one(play, letters("abcd"))) == 0
    assert len(play.roster.book.index) == 0
    assert not any(value for name, value in play.counts.items() if name.startswith("prefix"))


def test_users_that_take_turns_over_a_pool_that_holds_three():
    # 8 users, 10 turns; a user's whole conversation takes up to 25 pages.
    play = Play(76, host=200, rows=8)
    prompts = {user: letters("sys") + [10 + user] for user in range(8)}
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(10):
        names = {user: play.submit(prompts[user], 5) for user in rng.permutation(8).tolist()}
        play.until(lambda: play.loop.is_idle)
        for user, name in names.items():
            hits += play.cached(name)
            prompts[user] += [token for event in play.events[name] for token in event.token_ids]
            prompts[user] += rng.integers(2, 60, 3).tolist()
    play.run()
    assert hits > 2000 and play.counts["pages_idle_0"] <= 75


def test_what_it_finds_of_its_own_is_no_hit():
    play = Play(preemption_mode="recompute")
    old, young = play.submit(letters("abcd"), 46), play.submit(letters("wxyz"), 44)
    play.run()
    assert play.counts["preemptions"] > 0
    assert play.counts["prefix_hits"] == play.cached(old) == play.cached(young) == 0


def test_hits_are_told_when_pages_are_there():
    play = Play(100)
    first = play.submit(letters("abcdef"), 3)
    second = play.submit(letters("abcdef"), 3)
    play.loop.step()
    assert play.live(second).cache.awaited is not None and play.live(second).cache.num_cached is None
    play.run()
    assert (play.cached(first), play.cached(second)) == (0, 20)


def test_who_waits_goes_on_when_the_older_one_ends_early():
    play = Play(100)
    long = letters("abcdefghijklmnop")  # two steps
    first, second = play.submit(long, 3), play.submit(long, 3)
    play.loop.step()
    assert play.live(second).status is Status.WAITING
    play.loop.abort(first)
    play.until(lambda: play.loop.is_idle)
    play.run()
    assert play.cached(second) in (0, 32)


def test_a_limit_of_tokens_holds():
    play = Play(100, prefix_cache_max_tokens=6 * SIZE + 3)
    for text in ("abcdefgh", "abxyzuvw", "abcdefgh", "mnopqrst"):
        play_one(play, letters(text))
        assert play.counts["pages_cached_0"] <= 6
    assert play.counts["pages_cached_0"] == 6
    assert play.cached(play_one(play, letters("mnopqrst"))) == 6 * SIZE


def test_clearing_while_others_run_lets_them_be_found_again():
    play = Play(100)
    first = play.submit(letters("abcd"), 30)
    play.steps(6)
    assert play.loop.scheduler.prefix.clear() > 3 and len(play.roster.book.index) == 0
    play.run()
    answer = [token for event in play.events[first] for token in event.token_ids]
    name = play_one(play, [*letters("abcd"), *answer, 5])
    assert play.cached(name) == (16 + 29) // SIZE * SIZE


def test_numbers_that_are_none_take_all_their_pages_along():
    play = Play(100)
    play_one(play, letters("ab"))
    sequence_name = play.submit(letters("abcd"), 9)
    play.until(lambda: play.live(sequence_name).num_tokens > 17)
    play.loop.scheduler.prefix.forget_own(play.live(sequence_name))
    assert play.roster.book.index.match(*keys_of(play, "abcd"), 4).records == ()
    play.run()


def keys_of(play: Play, text: str) -> tuple[list[bytes], list[bytes]]:
    pages = [np.array(letters(letter), "<u4").tobytes() for letter in text]
    keys: list[bytes] = []
    KeyChain(play.config.namespace, SIZE).extend(keys, pages)
    return keys, pages


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 70])
def test_keys_made_ahead_are_those_made_while_planning(size):
    """Of all full pages; and the samples' lists are their own."""
    play = Play()
    tokens = np.random.default_rng(size).integers(2, 60, size)
    sampling = SamplingParams(max_tokens=3, n=2)
    request = Request(
        request_id="a", prompt_ids=tuple(tokens.tolist()), sampling=sampling, cache_salt=b"someone"
    )
    prompt = Prompt.of(request, play.config)
    pages, keys = page_tokens(tokens.astype(np.int32), SIZE), []
    KeyChain(play.config.namespace, SIZE).extend(keys, pages, b"someone")
    assert (list(prompt.pages), list(prompt.keys)) == (pages, keys) and len(keys) == size // SIZE
    assert prompt.ids.dtype == np.int32 and prompt.ids.tolist() == tokens.tolist()
    play.loop.scheduler.submit(request, prompt)
    first, second = (item.cache for item in play.roster.groups["a"].sequences)
    assert first.keys == second.keys == keys and first.keys is not second.keys
    off = Prompt.of(request, Play(prefix_cache=False).config)
    assert (off.pages, off.keys) == ((), ()) and off.ids.tolist() == tokens.tolist()


def test_a_prompt_with_keys_is_not_hashed_again(monkeypatch):
    play, made = Play(), []
    whole = KeyChain.next
    monkeypatch.setattr(KeyChain, "next", lambda self, *given: made.append(given[1]) or whole(self, *given))
    request = Request(
        request_id="a", prompt_ids=tuple(letters("abcdefgh")),
        sampling=SamplingParams(max_tokens=9, temperature=0, ignore_eos=True),
    )  # fmt: skip
    prompt = Prompt.of(request, play.config)
    assert len(made) == 8
    play.loop.scheduler.submit(request, prompt)
    while not play.loop.is_idle:
        play.loop.step()
    assert len(made) == 8 + 2  # 32 tokens of prompt, and 8 of the answer that were computed
