"""Between sequences and the prefix index: what a sequence finds there, and what it adds.

    prompt    tokens and keys of a request, made before it is queued, on whatever thread
    match     how much of a waiting sequence is in pages already
    await     or is being computed by an older one: then it waits for that
    adopt     it starts from those pages
    publish   full pages it has computed are there for others

A step that failed takes back what it published. Hits are counted when a sequence is first admitted and
its pages are on the device; what it finds of its own when it comes back is none, and so is what further
samples of a request find: a prompt counts once.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xjax.cache.index import Match, Record
from xjax.cache.keys import KeyChain, page_tokens
from xjax.config import SchedulerConfig
from xjax.request import Request
from xjax.scheduler.pages.book import PageBook
from xjax.scheduler.sequence import Sequence

NO_MATCH = Match((), "off")


@dataclass(frozen=True)
class Prompt:
    """A request's tokens as sequences have them.

    ids     [n] int32, never written
    pages   tokens of each full page
    keys    of these
    """

    ids: npt.NDArray[np.int32]
    pages: tuple[bytes, ...] = ()
    keys: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, request: Request, config: SchedulerConfig) -> "Prompt":
        """Turn a request's tokens into what its sequences begin with; without keys where nothing is kept."""
        tokens, keys = np.array(request.prompt_ids, np.int32), list[bytes]()
        if not is_kept(config):
            return cls(tokens)
        pages = page_tokens(tokens, config.page_size)
        KeyChain(config.namespace, config.page_size).extend(keys, pages, request.cache_salt)
        return cls(tokens, tuple(pages), tuple(keys))


def is_kept(config: SchedulerConfig) -> bool:
    """Whether the index is told of pages."""
    return config.prefix_cache and bool(config.num_pages)


class PrefixCache:
    """Sequences' side of the index; `counts` are events since the start."""

    def __init__(self, config: SchedulerConfig, book: PageBook) -> None:
        self._book, self._index = book, book.index
        self._least_awaited = config.least_awaited
        self._chain = KeyChain(config.namespace, config.page_size)
        self._is_on = is_kept(config)
        # Recurrent state at the matched boundary is not kept yet, so nothing could go on from there.
        self._can_match = self._is_on and not config.has_recurrent
        self._promised: dict[bytes, Sequence] = {}
        self._recent: dict[int, list[Record]] = {}
        self.counts: dict[str, int] = dict.fromkeys(
            ("prefix_hits", "prefix_hit_tokens", "prefix_host_hit_tokens", "prefix_waits",
             "prefix_misses_unknown", "prefix_misses_short", "prefix_misses_window", "prefix_misses_whole",
             "prefix_misses_state"), 0
        )  # fmt: skip

    # ---- before admission ----

    def match(self, sequence: Sequence) -> Match:
        """The usable prefix of a waiting sequence, short of its last token."""
        is_whole = sequence.prompt_logprobs is not None or sequence.request.pooling is not None
        if not self._can_match or is_whole:
            return NO_MATCH
        limit = (sequence.num_tokens - 1) // self._book.page_size
        self._extend(sequence, limit)
        state = sequence.cache
        return self._index.match(state.keys, state.tokens, limit, state.salt)

    def _extend(self, sequence: Sequence, count: int) -> None:
        """Make the keys of the first pages."""
        state, size = sequence.cache, self._book.page_size
        have = len(state.keys)
        if have < count:
            state.tokens += page_tokens(sequence.tokens(have * size, count * size), size)
            self._chain.extend(state.keys, state.tokens, state.salt)

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether an older sequence is still computing what was to be waited for."""
        key = sequence.cache.awaited
        if key is not None and key in self._promised:
            return True
        sequence.cache.awaited = None
        return False

    def await_older(self, sequence: Sequence, match: Match) -> bool:
        """Let a sequence wait where an older one computes more of its prefix than a step costs."""
        if match is NO_MATCH or not self._promised:
            return False
        keys, first = sequence.cache.keys, len(match.records)
        limit = (sequence.num_tokens - 1) // self._book.page_size
        leader = self._promised.get(keys[first]) if first < limit else None
        if leader is None or leader.order >= sequence.order:
            return False
        last = first
        while last + 1 < limit and self._promised.get(keys[last + 1]) is leader:
            last += 1
        if (last + 1 - first) * self._book.page_size < self._least_awaited:
            return False
        sequence.cache.awaited = keys[last]
        self.counts["prefix_waits"] += 1
        return True

    def num_shared(self, match: Match, group: int) -> int:
        """Pages of a match that somebody references, so that adopting them takes no page from others."""
        pool = self._book.pools[group]
        start = self._index.first_page(group, len(match.records))
        return sum(
            1 for record in match.records[start:] if record.pages[group] and pool.refs(record.pages[group])
        )

    def is_ready(self, match: Match) -> bool:
        """Whether the bytes of a match that are on the host have landed."""
        return all(
            host.is_ready(record.slots[group] for record in match.records if not record.pages[group])
            for group, host in enumerate(self._book.hosts)
        )

    def num_away(self, match: Match) -> list[int]:
        """Pages by group that a match takes from the pool: those on the host, and idle ones."""
        return [
            len(match.records)
            - self._index.first_page(group, len(match.records))
            - self.num_shared(match, group)
            for group in range(len(self._book.pools))
        ]

    # ---- admission ----

    def adopt(self, sequence: Sequence, match: Match, step_id: int) -> list[list[tuple[int, int]]]:
        """Start a waiting sequence from matched pages.

        returns   by group (page index, host slot) of pages that are on the host alone; the sequence has
                  no page there yet
        """
        assert not sequence.num_computed and not any(sequence.pages)
        num_pages, away = len(match.records), list[list[tuple[int, int]]]()
        for group, pages in enumerate(sequence.pages):
            start = self._index.first_page(group, num_pages) if num_pages else 0
            pages += [0] * start + [record.pages[group] for record in match.records[start:]]
            self._book.pools[group].retain(page for page in pages if page)
            sequence.num_passed[group] = start
            absent = [i for i in range(start, num_pages) if not pages[i]]
            away.append([(i, match.records[i].slots[group]) for i in absent])
        size, state = self._book.page_size, sequence.cache
        sequence.num_computed = num_pages * size
        state.records = list(match.records)
        state.num_matched = state.num_published = num_pages
        state.matched_step = step_id if num_pages else -1
        if not any(away):
            self._count(sequence, match)
        self._promise(sequence)
        return away

    def count_landed(self, sequence: Sequence, num_away: int) -> None:
        """Count a hit of which so many pages were on the host and are on the device now."""
        if sequence.cache.num_cached is None:
            self._count_hit(sequence, num_away)

    def _count_hit(self, sequence: Sequence, num_away: int) -> None:
        num_tokens = sequence.cache.num_matched * self._book.page_size
        sequence.cache.num_cached = num_tokens
        if sequence.sample_id:
            return
        self.counts["prefix_hits"] += 1
        self.counts["prefix_hit_tokens"] += num_tokens
        self.counts["prefix_host_hit_tokens"] += num_away * self._book.page_size

    def _count(self, sequence: Sequence, match: Match) -> None:
        if not self._is_on or sequence.cache.num_cached is not None:
            return
        if match.records:
            self._count_hit(sequence, 0)
            return
        sequence.cache.num_cached = 0
        if sequence.sample_id:
            return
        if sequence.num_tokens <= self._book.page_size:
            self.counts["prefix_misses_short"] += 1
        elif match is NO_MATCH:
            reason = "state" if not self._can_match else "whole"
            self.counts[f"prefix_misses_{reason}"] += 1
        else:
            self.counts[f"prefix_misses_{match.reason}"] += 1

    def _promise(self, sequence: Sequence) -> None:
        if not self._can_match:
            return
        count = sequence.num_tokens // self._book.page_size
        self._extend(sequence, count)
        for key in sequence.cache.keys[sequence.cache.num_matched : count]:
            self._promised.setdefault(key, sequence)

    # ---- while it runs ----

    def publish(self, sequence: Sequence, num_tokens: int, step_id: int | None = None) -> None:
        """Tell the index of the full pages among the first `num_tokens` tokens.

        step_id   of the step that computes them, where it has not run yet
        """
        state, count = sequence.cache, num_tokens // self._book.page_size
        if not self._is_on or count <= state.num_published:
            return
        self._extend(sequence, count)
        if self._promised:
            for key in state.keys[state.num_published : count]:
                if self._promised.get(key) is sequence:
                    del self._promised[key]
        state.num_published = count
        made = self._insert(sequence, count)
        if step_id is not None and made:
            self._recent.setdefault(step_id, []).extend(made)

    def _insert(self, sequence: Sequence, count: int) -> list[Record]:
        """Record the first pages as far as they can be; all again where one before has been forgotten.

        returns   those that name pages of this sequence
        """
        state, made = sequence.cache, list[Record]()
        records = state.records
        if records and not self._index.is_known(records[-1]):
            records.clear()
        parent = records[-1] if records else state.salt
        insert, keys, tokens = self._index.insert, state.keys, state.tokens
        for i in range(len(records), count):
            pages = tuple([pages[i] for pages in sequence.pages])
            record = insert(keys[i], parent, tokens[i], pages)
            if record is None:
                break
            records.append(record)
            parent = record
            if record.pages == pages or any(map(_is_same, record.pages, pages)):
                made.append(record)
        return made

    def end_step(self, step_id: int, *, ok: bool) -> None:
        """A step has run, or failed or never ran: then nobody may find what it published."""
        if ok:
            self._recent.pop(step_id, None)
            return
        for step in [step for step in self._recent if step >= step_id]:  # later ones went on from it
            for record in self._recent.pop(step):
                self._index.forget(record)

    def forget_own(self, sequence: Sequence) -> None:
        """Let go of all pages of a sequence whose numbers turned out to be none, found ones too.

        Whose fault it was is not known, and what is wrong must not be found for ever.
        """
        for record in sequence.cache.records:
            self._index.forget(record)

    def leave(self, sequence: Sequence) -> None:
        """A sequence stops running: nobody need wait for what it was to compute."""
        state = sequence.cache
        if self._promised:
            for key in state.keys[state.num_published :]:
                if self._promised.get(key) is sequence:
                    del self._promised[key]
        state.awaited = None

    def restart(self, sequence: Sequence) -> None:
        """A sequence has lost its pages and will begin anew."""
        state = sequence.cache
        state.records = []
        state.num_matched = state.num_published = 0
        state.matched_step = -1

    def clear(self) -> int:
        """Forget every page; returns how many records went."""
        self._recent.clear()
        return self._index.clear()

    def check(self, running: Iterable[Sequence]) -> None:
        """Verify that promises are those of running sequences and the index is sound; for tests."""
        self._index.check()
        alive = {id(sequence) for sequence in running}
        assert all(id(sequence) in alive for sequence in self._promised.values()), (
            "a promise outlived its maker"
        )


def _is_same(page: int, own: int) -> bool:
    return page == own != 0
