"""The prefix index: which pages hold which tokens, one record a page of tokens, one truth.

    insert   a page was computed        -> its record names the page of every group
    match    a prompt's keys            -> the records of its longest usable prefix
    evict    a group needs pages        -> the page that was idle longest goes; so may its record
    demote   a page goes to the host    -> its record names the slot instead
    promote  its bytes are back         -> its record names the new page

Records are a tree: each knows the record of the page before, so that one found from the first page on
stands for exactly these tokens, whatever its key. A record has bytes while every full-attention group has
its page, on the device or on the host; without, it is but a link, and there while a record follows it.
Window groups may lack pages; a match needs those inside the window at its end alone.
Knows no sequence; refcounts are the pools'.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from xjax.cache.host import HostPool
from xjax.cache.pool import PagePool


class Record:
    """One page of tokens.

    key            of this page
    parent         the record of the page before; the salt in the first
    tokens         as `keys.page_tokens` has them
    pages          device page by group, 0 where there is none
    slots          host slot by group, 0 where there is none
    num_children   records whose parent it is
    snapshot       recurrent state at the end of this page; nothing makes one yet
    """

    __slots__ = ("key", "num_children", "pages", "parent", "slots", "snapshot", "tokens")

    def __init__(self, key: bytes, parent: "Parent", tokens: bytes, num_groups: int) -> None:
        self.key, self.parent, self.tokens = key, parent, tokens
        # Tuples of numbers, which the garbage collector does not go through: there may be millions.
        self.pages: tuple[int, ...] = (0,) * num_groups
        self.slots: tuple[int, ...] = self.pages
        self.num_children = 0
        self.snapshot: None = None

    def is_page(self, parent: "Parent", tokens: bytes) -> bool:
        """Whether it is that of these tokens after that page."""
        if self.tokens != tokens:
            return False
        return self.parent == parent if isinstance(parent, bytes) else self.parent is parent

    def has(self, group: int) -> bool:
        """Whether the bytes of a group are anywhere."""
        return bool(self.pages[group] or self.slots[group])


Parent = Union[Record, bytes]  # noqa: UP007  a class and its alias name each other


@dataclass(frozen=True)
class Match:
    """The usable prefix of a prompt.

    records   of its pages, first to last
    reason    why it is no longer: "" where the whole prompt matched; "unknown": no page with these
              tokens; "window": pages matched, but those inside a window are gone
    """

    records: tuple[Record, ...]
    reason: str


class PrefixIndex:
    """Records by key, over the pools of all groups; `windows` and `page_size` as the scheduler has them.

    max_pages   most records with pages on the device, None for no limit
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        hosts: Sequence[HostPool],
        windows: Sequence[int | None],
        page_size: int,
        *,
        max_pages: int | None = None,
    ) -> None:
        self._pools, self._hosts, self._windows = tuple(pools), tuple(hosts), tuple(windows)
        self._page_size, self._max_pages = page_size, max_pages
        self._records: dict[bytes, Record] = {}
        self._by_page: tuple[dict[int, Record], ...] = tuple({} for _ in pools)
        self._by_slot: tuple[dict[int, Record], ...] = tuple({} for _ in hosts)
        whole = tuple(group for group, window in enumerate(windows) if window is None)
        self._needed = whole or tuple(range(len(pools)))
        self._is_whole = bool(whole)
        self._num_links = 0
        self.num_stored = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        """Records that have bytes; links alone do not count."""
        return len(self._records) - self._num_links

    def first_page(self, group: int, num_pages: int) -> int:
        """First page that a sequence of so many full pages still needs in a group."""
        window = self._windows[group]
        if window is None:
            return 0
        return min(max(num_pages * self._page_size - window + 1, 0) // self._page_size, num_pages)

    # ---- match ----

    def match(self, keys: Sequence[bytes], pages: Sequence[bytes], limit: int, salt: bytes = b"") -> Match:
        """Find the longest usable prefix of at most `limit` pages; changes nothing.

        keys, pages   key and tokens of each page of the prompt
        salt          that the keys were made with
        """
        found = self._chain(keys, pages, limit, salt)
        length = self._usable(found)
        if length == limit:
            return Match(tuple(found), "")
        is_gone = length == len(found) or (self._is_whole and not self._has_bytes(found[length]))
        return Match(tuple(found[:length]), "unknown" if is_gone else "window")

    def _chain(self, keys: Sequence[bytes], pages: Sequence[bytes], limit: int, salt: bytes) -> list[Record]:
        records, found = self._records, list[Record]()
        parent: Parent = salt
        for place in range(limit):
            record = records.get(keys[place])
            if record is None or not record.is_page(parent, pages[place]):
                break
            found.append(record)
            parent = record
        return found

    def _usable(self, found: Sequence[Record]) -> int:
        """Most leading records after which every group has the pages it needs."""
        length = len(found)
        missing = [
            [i for i, record in enumerate(found) if not record.pages[group] and not record.slots[group]]
            for group in range(len(self._pools))
        ]
        is_open = True
        while length and is_open:
            is_open = False
            for group, gaps in enumerate(missing):
                while gaps and gaps[-1] >= length:
                    gaps.pop()
                if gaps and gaps[-1] >= self.first_page(group, length):
                    length, is_open = gaps[-1], True
        return length

    # ---- changes ----

    def is_known(self, record: Record) -> bool:
        """Whether a record is still one of the index's, so that pages can follow it."""
        return self._records.get(record.key) is record

    def insert(self, key: bytes, parent: Parent, tokens: bytes, pages: Sequence[int]) -> Record | None:
        """Record a computed page; None where it has no record and can have none.

        parent   the record of the page before, or the salt
        pages    device page by group, 0 for one already given back; each is referenced

        What the record of an equal page lacks is taken from this one, where that makes it whole and
        there is room; the rest stays as it is.
        """
        record, first = self._records.get(key), self._needed[0]
        if record is not None and not record.is_page(parent, tokens):
            return None  # another page with the same key; never to be mistaken
        is_more = pages[first] and (record is None or not record.pages[first])
        if is_more and self._max_pages is not None:
            if not self._has_room():
                return record
            record = self._records.get(key)  # what made room may have been the last to follow it
        if isinstance(parent, Record) and self._records.get(parent.key) is not parent:
            return None
        if 0 in pages and not self._is_enough(record, pages):
            return record
        if record is None:
            record = self._add(key, parent, tokens)
        elif _is_link(record):
            self._num_links -= 1
        for group, page in enumerate(pages):
            if page and not record.pages[group]:
                self._hold(record, group, page)
        return record

    def _is_enough(self, record: Record | None, pages: Sequence[int]) -> bool:
        """Whether a match could use a record with these pages beside those it has."""
        for group in self._needed:
            if bool(pages[group] or (record is not None and record.has(group))) is not self._is_whole:
                return not self._is_whole
        return self._is_whole

    def _add(self, key: bytes, parent: Parent, tokens: bytes) -> Record:
        record = self._records[key] = Record(key, parent, tokens, len(self._pools))
        if isinstance(parent, Record):
            parent.num_children += 1
        self.num_stored += 1
        return record

    def _has_room(self) -> bool:
        """Whether one more page may be kept, after the one idle longest went if need be."""
        if self._max_pages is None:
            return True
        if self._max_pages <= 0:
            return False
        return self._pools[self._needed[0]].num_kept < self._max_pages or self.evict(self._needed[0])

    def _hold(self, record: Record, group: int, page: int) -> None:
        self._pools[group].keep(page)
        record.pages = _with(record.pages, group, page)
        self._by_page[group][page] = record

    def promote(self, record: Record, group: int, page: int) -> None:
        """Name the device page that a record's bytes were copied into; its host slot is let go."""
        if not self.is_known(record) or record.pages[group]:
            return
        if group != self._needed[0] or self._has_room():
            self._hold(record, group, page)
            self._let_go_of_slot(record, group)

    def demote(self, group: int, page: int, slot: int) -> None:
        """Name the host slot that a page's bytes are copied into, and let the page go."""
        record = self._by_page[group].get(page)
        if record is None:
            return
        self._let_go_of_slot(record, group)
        self._hosts[group].keep(slot)
        record.slots = _with(record.slots, group, slot)
        self._by_slot[group][slot] = record
        self._let_go_of_page(record, group)

    def evict(self, group: int) -> bool:
        """Free the page of a group that has been idle longest; False when none is."""
        page = self._pools[group].oldest_idle()
        if page is None:
            return False
        record = self._by_page[group][page]
        self._let_go_of_page(record, group)
        self.num_evicted += 1
        self._settle(record)
        return True

    def evict_slot(self, group: int) -> bool:
        """Free the host slot of a group that has been idle longest; False when none is."""
        slot = self._hosts[group].oldest_idle()
        if slot is None:
            return False
        record = self._by_slot[group][slot]
        self._let_go_of_slot(record, group)
        self._settle(record)
        return True

    def forget_slots(self, group: int, slots: Sequence[int]) -> None:
        """Let go of host slots whose bytes never landed, or cannot be read."""
        for slot in slots:
            record = self._by_slot[group].get(slot)
            if record is not None:
                self._let_go_of_slot(record, group)
                self._settle(record)

    def forget(self, record: Record) -> None:
        """Forget the bytes of one page, where it is still known; sequences keep theirs."""
        if self.is_known(record) and not _is_link(record):
            self._strip(record)
            self._settle(record)

    def clear(self) -> int:
        """Forget everything; pages that sequences reference stay theirs. Returns how many had bytes."""
        count = len(self)
        for record in self._records.values():
            self._strip(record)
        self._records.clear()
        self._num_links = 0
        return count

    def _let_go_of_page(self, record: Record, group: int) -> None:
        page = record.pages[group]
        if page:
            record.pages = _with(record.pages, group, 0)
            del self._by_page[group][page]
            self._pools[group].drop(page)

    def _let_go_of_slot(self, record: Record, group: int) -> None:
        slot = record.slots[group]
        if slot:
            record.slots = _with(record.slots, group, 0)
            del self._by_slot[group][slot]
            self._hosts[group].drop(slot)

    def _strip(self, record: Record) -> None:
        """Let go of all bytes of a record."""
        for group in range(len(self._pools)):
            self._let_go_of_page(record, group)
            self._let_go_of_slot(record, group)

    def _has_bytes(self, record: Record) -> bool:
        """Whether a match can use a record, where windows allow."""
        there = [record.has(group) for group in self._needed]
        return all(there) if self._is_whole else any(there)

    def _settle(self, record: Record) -> None:
        """Make a link of a record that no match can use; remove it and those before it that nothing needs."""
        if self._has_bytes(record):
            return
        self._strip(record)
        self._num_links += 1
        link: Parent = record
        while isinstance(link, Record) and not link.num_children and not self._has_bytes(link):
            del self._records[link.key]
            self._num_links -= 1
            link = link.parent
            if isinstance(link, Record):
                link.num_children -= 1

    # ---- looking in ----

    @property
    def num_on_host(self) -> int:
        """Host slots of all groups that records name."""
        return sum(len(by_slot) for by_slot in self._by_slot)

    def kept_pages(self, group: int) -> list[int]:
        """Device pages of a group that records name."""
        return list(self._by_page[group])

    def kept_slots(self, group: int) -> list[int]:
        """Host slots of a group that records name."""
        return list(self._by_slot[group])

    def check(self) -> None:
        """Verify that records, pages and slots name each other; for tests."""
        children, held = Counter[int](), 0
        for key, record in self._records.items():
            assert record.key == key, "a record is under another's key"
            if isinstance(record.parent, Record):
                assert self.is_known(record.parent), "a lost parent"
                children[id(record.parent)] += 1
            for group, (page, slot) in enumerate(zip(record.pages, record.slots, strict=True)):
                assert not page or self._by_page[group].get(page) is record, "pages and records disagree"
                assert not slot or self._by_slot[group].get(slot) is record, "slots and records disagree"
                held += (page > 0) + (slot > 0)
            if not self._has_bytes(record):
                assert not any(record.pages + record.slots) and record.num_children, "a record of no use"
        links = [record for record in self._records.values() if _is_link(record)]
        assert len(links) == self._num_links, "links are miscounted"
        assert held == sum(map(len, self._by_page + self._by_slot)), "a page or slot of no record"
        for record in self._records.values():
            assert record.num_children == children[id(record)], "children are miscounted"
        if self._max_pages is not None and self._pools:
            assert self._pools[self._needed[0]].num_kept <= self._max_pages, "more pages than the limit"


def _is_link(record: Record) -> bool:
    """Whether a record has no bytes and is there for those behind it alone."""
    return not any(record.pages) and not any(record.slots)


def _with(values: tuple[int, ...], group: int, value: int) -> tuple[int, ...]:
    return (*values[:group], value, *values[group + 1 :])
