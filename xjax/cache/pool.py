"""Refcounted pages of one group: counts and hands out ids, knows neither bytes nor owners.

    allocate -> refs 1        retain -> +1        release -> -1, free again at 0

Page 0 is the trash page: never handed out, never released. The pool is used by one thread.
"""

from collections.abc import Iterable


class PagePool:
    """Pages 1 .. num_pages-1, each free or referenced."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "a pool needs the trash page and one more"
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody references."""
        return len(self._free)

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
        """Add a reference to pages that already have one."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is free"
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference; a page without any is free at once."""
        refs = self._refs
        for page in pages:
            assert page > 0 and refs[page] > 0, f"page {page} is not held"
            refs[page] -= 1
            if refs[page] == 0:
                self._free.append(page)

    def refs(self, page: int) -> int:
        """References of a page."""
        return self._refs[page]

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Verify that the references are exactly those of `holders` (lists of page ids, 0 skipped)."""
        expected = [0] * self.num_pages
        for pages in holders:
            for page in pages:
                expected[page] += page != 0
        assert expected == self._refs, "refcounts differ from their holders"
        free = {page for page in range(1, self.num_pages) if expected[page] == 0}
        assert len(free) == len(self._free) and free == set(self._free), "the free list is wrong"
