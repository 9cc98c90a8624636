"""The waiting line, and what the samples of one request share.

First in, first out within a priority. One that does not fit lets smaller ones pass, but only
`_MAX_BYPASSED` times; then the line waits for it. Samples 1.. of a request stay out of the line
until sample 0 has its prompt in pages, then start from those pages:

    pending  --prompt computed: publish-->  shared  --nobody waits, or pages run out: drop-->  apart
       +------------------------------ sample 0 ended ------------------------------------------^
"""

import bisect
from collections.abc import Iterator

from xjax.request import Request
from xjax.scheduler.pages.book import PageBook
from xjax.scheduler.sequence import Sequence, Status

_MAX_BYPASSED = 16
_MAX_LOOKED_AT = 64  # so that a long line costs a step nothing


class SampleGroup:
    """The samples of one request and the prompt pages they share while some still wait.

    num_shared    tokens of full prompt pages, short of the last token
    shared        page ids by group, held by this object; None while there are none
    partial       the page behind them by group, held too, where it has prompt tokens short of the last:
                  samples copy it, since each writes on in it
    is_pending    sample 0 has not computed its prompt yet and the others stay out of the line
    has_started   some sample was admitted once
    """

    def __init__(
        self, request: Request, sequences: list[Sequence], *, page_size: int, can_share: bool
    ) -> None:
        self.request = request
        self.sequences = sequences
        self.num_shared = (len(request.prompt_ids) - 1) // page_size * page_size
        self.shared: tuple[list[int], ...] | None = None
        self.partial: tuple[int, ...] | None = None
        self.is_pending = can_share and len(sequences) > 1 and len(request.prompt_ids) > 1
        self.has_started = False

    @property
    def live(self) -> list[Sequence]:
        """Samples that have not ended."""
        return [item for item in self.sequences if item.status is not Status.FINISHED]

    def is_held_back(self, sequence: Sequence) -> bool:
        """Whether a sample waits for sample 0 instead of standing in the line."""
        return self.is_pending and sequence.sample_id > 0

    def publish(self, book: PageBook) -> None:
        """Hold the prompt pages of sample 0 for the samples that still wait."""
        assert self.is_pending
        self.is_pending = False
        num_pages = self.num_shared // book.page_size
        shared = tuple(pages[:num_pages] for pages in self.sequences[0].pages)
        for pool, pages in zip(book.pools, shared, strict=True):
            pool.retain(page for page in pages if page)
        self.shared = shared
        if len(self.request.prompt_ids) - 1 > self.num_shared:
            self.partial = tuple(pages[num_pages] for pages in self.sequences[0].pages)
            for pool, page in zip(book.pools, self.partial, strict=True):
                pool.retain((page,))

    def adopt(self, sequence: Sequence, book: PageBook) -> bool:
        """Start a waiting sample from the shared pages; False where there are none for it.

        The copy of the partial page is the caller's to make.
        """
        if self.shared is None or sequence.prompt_logprobs is not None:
            return False
        if self.partial is not None and any(not pool.num_available for pool in book.pools):
            return False
        assert not sequence.num_computed and not any(sequence.pages)
        for group, pages in enumerate(self.shared):
            book.pools[group].retain(page for page in pages if page)
            sequence.pages[group].extend(pages)
            sequence.num_passed[group] = next((i for i, page in enumerate(pages) if page), len(pages))
        sequence.num_computed = self.num_shared
        return True

    def drop(self, book: PageBook) -> None:
        """Let go of the shared pages; samples that still wait compute them anew."""
        assert self.shared is not None
        for pool, pages in zip(book.pools, self.shared, strict=True):
            pool.release(page for page in reversed(pages) if page)
        for pool, page in zip(book.pools, self.partial or (), strict=False):
            pool.release((page,))
        self.shared = self.partial = None

    def num_held(self, page_group: int) -> int:
        """Shared pages in a page group that a sample can go on from without a copy."""
        return sum(page != 0 for page in self.shared[page_group]) if self.shared is not None else 0

    def held_in(self, page_group: int) -> list[int]:
        """Every page that this object holds in a page group; for `check`."""
        partial = [] if self.partial is None else [self.partial[page_group]]
        return [] if self.shared is None else [*self.shared[page_group], *partial]


class WaitingLine:
    """Sequences that want to run, oldest of the highest priority first."""

    def __init__(self) -> None:
        self._line: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def __reversed__(self) -> Iterator[Sequence]:
        return iter(self._line[::-1])

    def front(self) -> tuple[Sequence, ...]:
        """The sequences that admission looks at."""
        return tuple(self._line[:_MAX_LOOKED_AT])

    def add(self, sequence: Sequence) -> None:
        """Put a sequence where its order belongs."""
        insert_by_order(self._line, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        remove_by_order(self._line, sequence)

    @staticmethod
    def is_starved(sequence: Sequence) -> bool:
        """Whether the line must now wait for this sequence."""
        return sequence.num_bypassed >= _MAX_BYPASSED


def insert_by_order(line: list[Sequence], sequence: Sequence) -> None:
    """Insert into a list that is sorted by `order`."""
    bisect.insort(line, sequence, key=_order)


def remove_by_order(line: list[Sequence], sequence: Sequence) -> None:
    """Remove from a list that is sorted by `order`."""
    place = bisect.bisect_left(line, sequence.order, key=_order)
    assert line[place] is sequence, "a sequence is not where its order says"
    del line[place]


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.order
