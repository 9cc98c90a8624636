"""The waiting line: in which order sequences may start, and what samples of a request share.

First in, first out within a priority. One that does not fit lets smaller ones pass, but only
`_MAX_BYPASSED` times; then the line waits for it. Samples 1.. of a request wait until sample 0
has its prompt in pages, then start from those pages.
"""

import bisect
from collections.abc import Iterator

from xjax.request import Request
from xjax.scheduler.memory import PageBook
from xjax.scheduler.sequence import Sequence, Status

_MAX_BYPASSED = 16
_MAX_LOOKED_AT = 64  # so that a long line costs a step nothing


class SampleGroup:
    """The samples of one request and the prompt pages they share while some still wait.

    num_shared   tokens of full prompt pages, short of the last token
    shared       page ids by group, held by this object; None while there are none
    is_pending   sample 0 has not computed its prompt yet
    """

    def __init__(self, request: Request, sequences: list[Sequence], *, page_size: int, can_share: bool) -> None:
        self.request = request
        self.sequences = sequences
        self.num_shared = (len(request.prompt_ids) - 1) // page_size * page_size
        self.shared: tuple[list[int], ...] | None = None
        self.is_pending = can_share and len(sequences) > 1 and self.num_shared > 0

    def publish(self, book: PageBook) -> None:
        """Hold the prompt pages of sample 0 for the samples that still wait."""
        if not self.is_pending:
            return
        self.is_pending = False
        num_pages = self.num_shared // book.page_size
        shared = tuple(pages[:num_pages] for pages in self.sequences[0].pages)
        for pool, pages in zip(book.pools, shared, strict=True):
            pool.retain(page for page in pages if page)
        self.shared = shared

    def adopt(self, sequence: Sequence, book: PageBook) -> None:
        """Start a waiting sample from the shared pages, where there are any."""
        if self.shared is None or sequence.num_computed or any(sequence.pages):
            return
        for group, pages in enumerate(self.shared):
            book.pools[group].retain(page for page in pages if page)
            sequence.pages[group].extend(pages)
            sequence.num_passed[group] = next((i for i, page in enumerate(pages) if page), len(pages))
        sequence.num_computed = self.num_shared

    def drop(self, book: PageBook) -> bool:
        """Let go of the shared pages; samples that still wait compute them anew."""
        if self.shared is None:
            return False
        for pool, pages in zip(book.pools, self.shared, strict=True):
            pool.release(page for page in pages if page)
        self.shared = None
        return True

    def settle(self, book: PageBook) -> None:
        """Stop waiting for a sample 0 that has ended, and drop pages that nobody waits for."""
        if self.sequences[0].status is Status.FINISHED:
            self.is_pending = False
        if not any(s.status is Status.WAITING and not s.num_computed for s in self.sequences[1:]):
            self.drop(book)


class WaitingLine:
    """Sequences that want to run, oldest of the highest priority first."""

    def __init__(self) -> None:
        self._line: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._line))

    def front(self) -> tuple[Sequence, ...]:
        """The sequences that admission looks at."""
        return tuple(self._line[:_MAX_LOOKED_AT])

    def add(self, sequence: Sequence) -> None:
        """Put a sequence where its order belongs."""
        bisect.insort(self._line, sequence, key=lambda item: item.order)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        self._line.remove(sequence)

    def note_bypass(self, sequence: Sequence) -> None:
        """Count for everyone in front of an admitted sequence that it was passed."""
        for item in self._line:
            if item.order >= sequence.order:
                break
            item.num_bypassed += 1

    @staticmethod
    def is_starved(sequence: Sequence) -> bool:
        """Whether the line must now wait for this sequence."""
        return sequence.num_bypassed >= _MAX_BYPASSED
