"""The prefix index and its pools: against a naive model, and rule by rule."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from tests.cache.prefixes import SIZE, Trace
from xjax.cache.host import HostPool
from xjax.cache.index import PrefixIndex, Record
from xjax.cache.keys import KeyChain
from xjax.cache.pool import PagePool

CASES = [(None,), (None, 5), (None, None), (6,), (3, 9), (None, 1, 16)]
LEAST = {
    "matched": 700, "kept": 400, "evicted": 40, "slots evicted": 12, "demoted": 80, "promoted": 20,
    "never landed": 60, "forgotten": 30, "refused": 100, "started anew": 10, "reason unknown": 600,
    "reason ": 300, "reason window": 15, "links": 100,
}  # fmt: skip


@pytest.mark.parametrize("short_keys", [False, True], ids=["keys", "colliding"])
def test_random_use_against_whole_prefixes(short_keys):
    counts: Counter[str] = Counter()
    for seed in range(48):
        cap = None if seed % 4 else int(np.random.default_rng(seed).integers(0, 9))
        trace = Trace(seed, CASES[seed % len(CASES)], cap=cap, short_keys=short_keys)
        for _ in range(200):
            trace.step()
        counts.update(trace.counts)
    assert {name: counts[name] for name, least in LEAST.items() if counts[name] < least} == {}


# ---- said one by one ---------------------------------------------------------------------


class Small:
    """One index over one pool, and prompts as text: a letter is a page."""

    def __init__(
        self, num_pages: int = 20, *, windows: tuple[int | None, ...] = (None,), cap: int | None = None
    ):
        self.pools = [PagePool(num_pages) for _ in windows]
        self.hosts = [HostPool(num_pages) for _ in windows]
        self.index = PrefixIndex(self.pools, self.hosts, windows, SIZE, max_pages=cap)
        self.chain = KeyChain(bytes(32), SIZE)

    def keys(self, text: str) -> tuple[list[bytes], list[bytes]]:
        pages = [letter.encode() * 16 for letter in text]
        keys: list[bytes] = []
        self.chain.extend(keys, pages)
        return keys, pages

    def match(self, text: str) -> list[Record]:
        return list(self.index.match(*self.keys(text), len(text)).records)

    def run(self, text: str, *, ends: bool = True) -> list[list[int]]:
        """Compute a prompt as a sequence does, and end it."""
        found = self.match(text)
        held = [[record.pages[group] for record in found] for group in range(len(self.pools))]
        for group, pool in enumerate(self.pools):
            pool.retain(held[group])
            while pool.num_free < len(text) - len(found):
                assert self.index.evict(group)
            held[group] += pool.allocate(len(text) - len(found))
        parent: Record | bytes = b""
        keys, pages = self.keys(text)
        for i in range(len(text)):
            record = self.index.insert(keys[i], parent, pages[i], [part[i] for part in held])
            if record is None:
                break
            parent = record
        if ends:
            self.end(held)
        return held

    def end(self, held: list[list[int]]) -> None:
        for pool, pages in zip(self.pools, held, strict=True):
            pool.release(reversed([page for page in pages if page]))

    def known(self) -> str:
        """Each record's last letter."""
        return "".join(sorted(chr(record.tokens[0]) for record in self.index._records.values()))


def test_the_least_recently_used_leaf_goes_first_and_tails_before_heads():
    small = Small()
    small.run("abc")
    small.run("axy")
    small.run("abc")
    gone = []
    while small.index.evict(0):
        before = small.known()
        gone.append(before)
    assert gone == ["abcx", "abc", "ab", "a", ""]


def test_a_referenced_page_never_goes():
    small = Small(8)
    held = small.run("abcd", ends=False)
    small.run("xy")
    assert [small.index.evict(0) for _ in range(3)] == [True, True, False]
    assert small.known() == "abcd" and small.pools[0].num_free == 3
    small.end(held)
    assert [small.index.evict(0) for _ in range(5)] == [True] * 4 + [False]


def test_the_cap_counts_device_pages_and_evicts_for_new_ones():
    small = Small(cap=3)
    held = small.run("abcde", ends=False)
    assert small.known() == "abc"  # what came first; the rest has no room and is nobody's
    small.run("xy")
    assert small.known() == "abc"
    small.end(held)
    small.run("xy")
    assert small.known() == "axy" and small.pools[0].num_kept == 3
    assert len(small.match("xyz")) == 2


@pytest.mark.parametrize("cap", [3, None])
def test_the_cap_holds_for_pages_that_come_back(cap):
    small = Small(cap=cap)
    held = small.run("abc", ends=False)
    (slots,) = [small.hosts[0].allocate(3)]
    for page, slot in zip(held[0], slots, strict=True):
        small.index.demote(0, page, slot)
    small.end(held)
    small.hosts[0].end_save(slots)
    other = small.run("xyz", ends=False)
    records = small.match("abc")
    assert [record.slots[0] for record in records] == slots
    pages = small.pools[0].allocate(3)
    for record, page in zip(records, pages, strict=True):
        small.index.promote(record, 0, page)
    assert small.pools[0].num_kept == (3 if cap else 6)
    small.index.check()
    assert len(small.match("abc")) == 3  # on the host or on the device
    small.pools[0].release(pages)
    small.end(other)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 9, 13, 100])
def test_a_window_needs_only_what_it_sees_at_the_end(window):
    for gone in range(6):
        small = Small(windows=(None, window))
        held = small.run("abcdef", ends=False)
        record = small.match("abcdef")[gone]
        page = record.pages[1]
        small.pools[1].release([page])
        assert small.pools[1].oldest_idle() == page and small.index.evict(1)
        # Positions that the last token before a boundary at `length` pages lets the next one see.
        usable = [
            length
            for length in range(7)
            if not any(p // SIZE == gone for p in range(max(length * SIZE - window + 1, 0), length * SIZE))
        ]
        assert len(small.match("abcdef")) == max(usable)
        held[1][gone] = 0
        small.end(held)


def test_a_model_of_windows_alone_finds_the_end_of_a_long_prompt():
    small = Small(40, windows=(6,))
    held = small.run("abcdefgh", ends=False)
    small.pools[0].release(held[0][:6])  # passed while it ran
    held[0][:6] = [0] * 6
    small.end(held)
    for _ in range(6):
        assert small.index.evict(0)
    small.index.check()
    assert len(small.match("abcdefgh")) == 8 and small.match("abcdefg") == []
    assert [small.index.evict(0) for _ in range(3)] == [True, True, False]
    assert not small.index._records  # links went with what followed them


def test_a_forgotten_page_in_the_middle_comes_back_with_those_after_it():
    small = Small()
    small.run("abcd")
    small.index.forget(small.match("ab")[1])
    assert len(small.match("abcd")) == 1
    small.run("ab")
    assert len(small.match("abcd")) == 4
    assert small.index.clear() == 4
    assert small.match("abcd") == [] and small.pools[0].num_free == 19
    small.index.check()


def test_what_makes_room_for_a_page_may_be_all_that_followed_its_link():
    small = Small(cap=2)
    small.run("ab")
    small.index.forget(small.match("a")[0])
    small.run("x")
    assert (len(small.index), small.known()) == (2, "abx")
    small.run("a")
    small.index.check()
    assert (len(small.index), small.known()) == (2, "ax") and len(small.match("a")) == 1


def test_other_tokens_salts_and_parents_with_the_same_key_never_match(monkeypatch):
    monkeypatch.setattr(
        KeyChain, "next", lambda self, parent, tokens, salt=b"": b"k" if parent is None else b"l"
    )
    small = Small()
    small.run("ab")
    for text in ("xb", "x", "ba", "ax"):
        assert len(small.match(text)) == (text[0] == "a")
    keys, pages = small.keys("ab")
    assert small.index.match(keys, pages, 2, b"other").records == ()
    small.run("xb")  # refused: nothing may follow a page that is not there
    assert len(small.match("ab")) == 2 and small.match("xb") == []
    small.index.clear()
    small.run("xb")
    small.index.forget(small.match("x")[0])
    small.run("ab")  # the page before it is another one now
    assert len(small.match("ab")) < 2 and small.match("xb") == []
    small.index.check()


def test_pages_are_counted_once_for_equal_prompts_computed_twice():
    small = Small()
    first = small.run("abc", ends=False)
    second = [small.pools[0].allocate(3)]
    keys, pages = small.keys("abc")
    parent: Record | bytes = b""
    for i in range(3):
        parent = small.index.insert(keys[i], parent, pages[i], [second[0][i]])
    assert [record.pages[0] for record in small.match("abc")] == first[0]
    small.end(second)
    assert small.pools[0].num_free == 16
    small.end(first)
    assert small.index.num_stored == 3


def test_first_page_by_positions():
    for window in range(1, 30):
        index = PrefixIndex([PagePool(4)], [HostPool(0)], (window,), SIZE)
        for num_pages in range(8):
            seen = [p // SIZE for p in range(max(num_pages * SIZE - window + 1, 0), num_pages * SIZE)]
            assert index.first_page(0, num_pages) == min(seen, default=num_pages)


def test_counts_of_a_long_life_stay_exact():
    rng, small = np.random.default_rng(0), Small(12)
    stored: dict[str, int] = defaultdict(int)
    for _ in range(200):
        text = "".join(rng.choice(list("ab"), rng.integers(1, 6)))
        before = len(small.match(text))
        small.run(text)
        stored[text] += len(text) - before
        small.index.check()
        small.pools[0].check([], small.index.kept_pages(0))
    assert small.index.num_stored == sum(stored.values())
    assert small.index.num_stored - small.index.num_evicted == len(small.index)
