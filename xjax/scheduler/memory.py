"""Pages of sequences, in every group: how many one needs, getting them, giving them back.

The one place that allocates pages for a sequence and the one `release`. Window groups give back
pages that no later token can see. Who has to yield when pages run out is decided elsewhere.
"""

from xjax.cache.pool import PagePool
from xjax.config import SchedulerConfig
from xjax.scheduler.rows import RowTable
from xjax.scheduler.sequence import Sequence


class PageBook:
    """The pools of all groups and the tables that name their pages."""

    def __init__(self, config: SchedulerConfig, rows: RowTable) -> None:
        self.page_size = config.page_size
        self.windows = config.windows
        self.pools = tuple(PagePool(count) for count in config.num_pages)
        self._rows = rows
        self._longest_chunk = config.shapes.prefill[-1][0]

    def pages_at_once(self, group: int, num_tokens: int) -> int:
        """Most pages of a group that a sequence of `num_tokens` holds at any one time."""
        pages = -(-num_tokens // self.page_size)
        window = self.windows[group]
        if window is None:
            return pages
        return min(pages, -(-(window + self._longest_chunk) // self.page_size) + 1)

    def capacity(self) -> int:
        """Tokens of the longest sequence that fits into the empty pools."""
        longest = 2**31 - 1
        for group, pool in enumerate(self.pools):
            if self.pages_at_once(group, longest) > pool.num_usable:
                longest = min(longest, pool.num_usable * self.page_size)
        return longest

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages beyond the free ones that the first `num_tokens` tokens need, over all groups; 0 when they fit."""
        lack = 0
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            need = -(-num_tokens // self.page_size) - len(pages)
            lack += max(need - pool.num_free, 0)
        return lack

    def fitting(self, sequence: Sequence) -> int:
        """Tokens of a sequence that its own pages and the free ones hold."""
        if not self.pools:
            return 2**31 - 1
        return min(
            (len(pages) + pool.num_free) * self.page_size
            for pool, pages in zip(self.pools, sequence.pages, strict=True)
        )

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a running sequence the pages of its first `num_tokens` tokens; they must be free."""
        assert sequence.slot is not None
        for group, (pool, pages) in enumerate(zip(self.pools, sequence.pages, strict=True)):
            need = -(-num_tokens // self.page_size) - len(pages)
            if need > 0:
                fresh = pool.allocate(need)
                self._rows.pages[group, sequence.slot, len(pages) : len(pages) + need] = fresh
                pages.extend(fresh)

    def pass_window(self, sequence: Sequence, position: int) -> None:
        """Give back pages that no token from `position` on can see."""
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            passed = min(max(position - window + 1, 0) // self.page_size, len(sequence.pages[group]))
            first = sequence.num_passed[group]
            if passed <= first:
                continue
            pages = sequence.pages[group]
            self.pools[group].release(page for page in pages[first:passed] if page)
            pages[first:passed] = [0] * (passed - first)
            sequence.num_passed[group] = passed
            if sequence.slot is not None:
                self._rows.pages[group, sequence.slot, first:passed] = 0

    def release(self, sequence: Sequence) -> None:
        """Give back everything a sequence holds, slot included."""
        for group, pages in enumerate(sequence.pages):
            self.pools[group].release(page for page in pages if page)
            pages.clear()
            sequence.num_passed[group] = 0
        if sequence.slot is not None:
            self._rows.give_back(sequence)
