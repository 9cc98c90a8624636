"""Refcounted pages of one group: counts and hands out ids, knows neither bytes nor owners.

    free --allocate--> held --release--> free
                        |  ^
      keep (the index)  |  | retain
                        v  |
                       kept --the last reference but the index's goes--> idle --drop--> free

The index keeps a page by a mark that outlives references; a kept page that nobody references is idle,
and idle pages are in the order in which they became so, which makes them a least-recently-used list.
Page 0 is the trash page: never handed out, never released. The pool is used by one thread.
"""

from collections.abc import Iterable


class PagePool:
    """Pages 1 .. num_pages-1, each free, held, kept, or both of these."""

    least = 2  # the trash page and one more

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= self.least, "a pool of too few pages"
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._kept = bytearray(num_pages)
        self._idle: dict[int, None] = {}  # oldest first
        self._num_kept = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody references or keeps."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Pages that are kept and that nobody references."""
        return len(self._idle)

    @property
    def num_kept(self) -> int:
        """Pages that are kept, referenced or not."""
        return self._num_kept

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones, and idle ones once they are dropped."""
        return len(self._free) + len(self._idle)

    @property
    def num_usable(self) -> int:
        """Pages that can be handed out at all."""
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages with one reference each; the caller has looked at `num_free`."""
        assert 0 <= count <= len(self._free), "allocate beyond the free pages"
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._refs[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that have one or are kept."""
        refs = self._refs
        for page in pages:
            if refs[page] == 0:
                assert self._kept[page], f"page {page} is free"
                del self._idle[page]
            refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference; a page without any is idle at once where it is kept, else free."""
        refs = self._refs
        for page in pages:
            assert page > 0 and refs[page] > 0, f"page {page} is not held"
            refs[page] -= 1
            if refs[page] == 0:
                if self._kept[page]:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """Mark a referenced page as the index's."""
        assert self._refs[page] > 0 and not self._kept[page], f"page {page} cannot be kept"
        self._kept[page] = 1
        self._num_kept += 1

    def drop(self, page: int) -> None:
        """Take the mark away; an idle page is free."""
        assert self._kept[page], f"page {page} is not kept"
        self._kept[page] = 0
        self._num_kept -= 1
        if self._refs[page] == 0:
            del self._idle[page]
            self._free.append(page)

    def oldest_idle(self) -> int | None:
        """The idle page that has been so for longest."""
        return next(iter(self._idle), None)

    def refs(self, page: int) -> int:
        """References of a page."""
        return self._refs[page]

    def is_kept(self, page: int) -> bool:
        """Whether the index has a page."""
        return bool(self._kept[page])

    def check(self, holders: Iterable[Iterable[int]], kept: Iterable[int] = ()) -> None:
        """Verify that references are those of `holders` and marks those of `kept` (page ids, 0 skipped)."""
        expected = [0] * self.num_pages
        for pages in holders:
            for page in pages:
                expected[page] += page != 0
        assert expected == self._refs, "refcounts differ from their holders"
        marks = {page for page in kept if page}
        assert marks == {page for page in range(self.num_pages) if self._kept[page]}, "marks differ"
        assert len(marks) == self._num_kept, "kept pages are miscounted"
        unheld = {page for page in range(1, self.num_pages) if expected[page] == 0}
        assert self._idle.keys() == unheld & marks, "the idle list is wrong"
        free = unheld - marks
        assert len(free) == len(self._free) and free == set(self._free), "the free list is wrong"
