"""A model of the prefix index that keeps whole prefixes and searches all of them, and random use of both."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from xjax.cache.host import HostPool
from xjax.cache.index import PrefixIndex, Record
from xjax.cache.keys import KeyChain
from xjax.cache.pool import PagePool

SIZE = 4
Windows = tuple[int | None, ...]
Path = tuple[bytes, ...]  # the salt, then the tokens of each page


KINDS = (
    *["start"] * 3, *["end"] * 2, "grow", "pass", "evict", *["evict_slot"] * 2, *["save"] * 2,
    *["land"] * 2, *["load"] * 3, *["drop"] * 2, "forget", "clear",
)  # fmt: skip


@dataclass
class Naive:
    """Bytes by whole prefix, and the order in which pages and slots became idle."""

    windows: tuple[int | None, ...]
    cap: int | None
    key_of: object
    pages: dict[Path, list[int]] = field(default_factory=dict)
    slots: dict[Path, list[int]] = field(default_factory=dict)
    refs: list[Counter] = field(default_factory=list)
    idle: list[list[int]] = field(default_factory=list)
    slot_refs: list[Counter] = field(default_factory=list)
    idle_slots: list[list[int]] = field(default_factory=list)

    def __post_init__(self):
        groups = range(len(self.windows))
        self.refs, self.slot_refs = [Counter() for _ in groups], [Counter() for _ in groups]
        self.idle, self.idle_slots = [[] for _ in groups], [[] for _ in groups]
        self.needed = [g for g in groups if self.windows[g] is None] or list(groups)
        self.test = all if None in self.windows else any

    def has(self, path: Path, group: int) -> bool:
        return bool(self.pages.get(path, [0] * 9)[group] or self.slots.get(path, [0] * 9)[group])

    def is_usable(self, path: Path) -> bool:
        return self.test(self.has(path, group) for group in self.needed)

    def existing(self) -> set[Path]:
        paths = [path for path in self.pages if self.is_usable(path)]
        return {path[:length] for path in paths for length in range(2, len(path) + 1)}

    def match(self, path: Path) -> tuple[int, str]:
        existing = self.existing()
        found = 0
        while found + 1 < len(path) and path[: found + 2] in existing:
            found += 1
        for length in range(found, -1, -1):
            needed = [
                (place, group)
                for group, window in enumerate(self.windows)
                for place in range(length)
                if window is None or (place + 1) * SIZE - 1 > length * SIZE - window
            ]
            if all(self.has(path[: place + 2], group) for place, group in needed):
                break
        if length == len(path) - 1:
            return length, ""
        if length == found or (self.test is all and not self.is_usable(path[: length + 2])):
            return length, "unknown"
        return length, "window"

    def insert(self, path: Path, pages: list[int]) -> bool:
        existing, first = self.existing(), self.needed[0]
        if any(self.key_of(other) == self.key_of(path) for other in existing - {path}):
            return False
        if pages[first] and not self.pages.get(path, [0] * 9)[first] and not self.make_room():
            return path in existing
        existing = self.existing()
        if len(path) > 2 and path[:-1] not in existing:
            return False
        if not self.test(pages[group] or self.has(path, group) for group in self.needed):
            return path in existing
        mine = self.pages.setdefault(path, [0] * len(pages))
        self.slots.setdefault(path, [0] * len(pages))
        self.pages[path] = [old or new for old, new in zip(mine, pages, strict=True)]
        return True

    def make_room(self) -> bool:
        if self.cap is None:
            return True
        first = self.needed[0]
        kept = sum(pages[first] > 0 for pages in self.pages.values())
        return kept < self.cap or (self.cap > 0 and self.evict(first))

    def evict(self, group: int) -> bool:
        if not self.idle[group]:
            return False
        page = self.idle[group].pop(0)
        (path,) = [path for path, pages in self.pages.items() if pages[group] == page]
        self.pages[path][group] = 0
        self.settle(path)
        return True

    def evict_slot(self, group: int) -> bool:
        if not self.idle_slots[group]:
            return False
        self.drop_slot(group, self.idle_slots[group][0])
        return True

    def drop_slot(self, group: int, slot: int) -> None:
        for path, slots in self.slots.items():
            if slots[group] == slot:
                slots[group] = 0
                if slot in self.idle_slots[group]:
                    self.idle_slots[group].remove(slot)
                self.settle(path)

    def settle(self, path: Path) -> None:
        if not self.is_usable(path):
            self.strip(path)

    def strip(self, path: Path) -> None:
        for held, idle in ((self.pages, self.idle), (self.slots, self.idle_slots)):
            for group, item in enumerate(held.get(path, ())):
                if item in idle[group]:
                    idle[group].remove(item)
            held[path] = [0] * len(self.windows)

    def promote(self, path: Path, group: int, page: int) -> None:
        if path not in self.existing() or self.pages[path][group]:
            return
        if group == self.needed[0] and not self.make_room():
            return
        self.pages[path][group] = page
        slot = self.slots[path][group]
        self.slots[path][group] = 0
        if slot in self.idle_slots[group]:
            self.idle_slots[group].remove(slot)

    def demote(self, group: int, page: int, slot: int) -> None:
        for path, pages in self.pages.items():
            if pages[group] == page:
                old = self.slots[path][group]
                if old in self.idle_slots[group]:
                    self.idle_slots[group].remove(old)
                self.slots[path][group], pages[group] = slot, 0

    def hold(self, group: int, items: list[int], *, on_host: bool = False) -> None:
        refs, idle = (self.slot_refs, self.idle_slots) if on_host else (self.refs, self.idle)
        for item in items:
            refs[group][item] += 1
            if item in idle[group]:
                idle[group].remove(item)

    def let_go(self, group: int, items: list[int], *, on_host: bool = False) -> None:
        refs, idle = (self.slot_refs, self.idle_slots) if on_host else (self.refs, self.idle)
        held = self.slots if on_host else self.pages
        for item in items:
            refs[group][item] -= 1
            if not refs[group][item] and any(kept[group] == item for kept in held.values()):
                idle[group].append(item)


@dataclass
class Holder:
    """A sequence: a path, its pages by group, and the records it was given."""

    path: Path
    pages: list[list[int]]
    records: list[Record]


class Trace:
    """The real thing and the naive one side by side; `step` does one thing to both and compares them."""

    def __init__(
        self, seed: int, windows: tuple[int | None, ...], *, cap: int | None, short_keys: bool
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.windows, self.groups = windows, range(len(windows))
        self.pools = [PagePool(int(self.rng.integers(8, 26))) for _ in windows]
        self.hosts = [HostPool(int(self.rng.integers(0, 20))) for _ in windows]
        self.index = PrefixIndex(self.pools, self.hosts, windows, SIZE, max_pages=cap)
        self.naive = Naive(windows, cap, self.key_of)
        self.holders: list[Holder] = []
        self.saving: list[tuple[list[list[int]], bool]] = []
        self.owned: list[list[list[int]]] = []  # slots that sequences own
        self.salts = [b"", b"a"]
        self.alphabet = [np.full(SIZE, i, "<u4").tobytes() for i in range(3)]
        self._chain, self._short = KeyChain(bytes(32), SIZE), short_keys
        self.counts: Counter[str] = Counter()

    def key_of(self, path: Path) -> bytes:
        parent = None
        for tokens in path[1:]:
            parent = self._chain.next(parent, tokens, path[0])
            if self._short:  # three bits, so that most prefixes share a key with others
                parent = bytes([hashlib.sha256(parent).digest()[0] % 8])
        assert parent is not None
        return parent

    def keys_of(self, path: Path) -> list[bytes]:
        return [self.key_of(path[:length]) for length in range(2, len(path) + 1)]

    def any_path(self, *, known: float = 0.3) -> Path:
        existing = sorted(self.naive.existing())
        if existing and self.rng.random() < known:
            return existing[self.rng.integers(len(existing))]
        salt = self.salts[self.rng.integers(2)]
        depth = int(self.rng.integers(1, 8))
        return (
            salt,
            *(self.alphabet[i] for i in self.rng.integers(0, 3, depth) * (self.rng.random(depth) < 0.4)),
        )

    def step(self) -> None:
        kind = KINDS[self.rng.integers(len(KINDS))]
        if kind in ("forget", "clear") and self.rng.random() < 0.8:
            return
        getattr(self, kind)()
        self.compare()

    # ---- what can happen ----

    def start(self) -> None:
        path = self.any_path()
        found = self.index.match(self.keys_of(path), path[1:], len(path) - 1, path[0])
        assert (len(found.records), found.reason) == self.naive.match(path)
        self.counts["matched"] += len(found.records)
        self.counts[f"reason {found.reason}"] += 1
        pages: list[list[int]] = []
        for group in self.groups:
            first = self.index.first_page(group, len(found.records))
            mine = [record.pages[group] if i >= first else 0 for i, record in enumerate(found.records)]
            if any(not page for page in mine[first:]):
                mine = [0] * len(mine)  # on the host: the test does without
            pages.append(mine)
        self.holders.append(Holder(path[: len(found.records) + 1], pages, list(found.records)))
        for group in self.groups:
            self.pools[group].retain(page for page in pages[group] if page)
            self.naive.hold(group, [page for page in pages[group] if page])
        self.grow(self.holders[-1], path)

    def grow(self, holder: Holder | None = None, path: Path | None = None) -> None:
        holder = holder or self.any_holder()
        if holder is None:
            return
        path = path or (*holder.path, self.alphabet[self.rng.integers(3)])
        for length in range(len(holder.path), len(path)):
            for group in self.groups:
                if not self.pools[group].num_free:
                    assert self.index.evict(group) == self.naive.evict(group)
            if not all(pool.num_free for pool in self.pools):
                return
            fresh = [pool.allocate(1)[0] for pool in self.pools]
            for group, page in enumerate(fresh):
                self.naive.hold(group, [page])
                holder.pages[group].append(page)
            holder.path = path[: length + 1]
            self.insert(holder)

    def insert(self, holder: Holder) -> None:
        if holder.records and not self.index.is_known(holder.records[-1]):
            holder.records.clear()
            self.counts["started anew"] += 1
        for i in range(len(holder.records), len(holder.path) - 1):
            path = holder.path[: i + 2]
            parent = holder.records[-1] if holder.records else path[0]
            mine = [pages[i] for pages in holder.pages]
            kept = sum(pool.num_kept for pool in self.pools)
            record = self.index.insert(self.key_of(path), parent, path[-1], mine)
            assert (record is not None) == self.naive.insert(path, mine)
            if record is None:
                self.counts["refused"] += 1
                return
            self.counts["kept"] += sum(pool.num_kept for pool in self.pools) > kept
            holder.records.append(record)

    def end(self) -> None:
        holder = self.any_holder()
        if holder is not None:
            self.holders.remove(holder)
            for group in self.groups:
                pages = [page for page in reversed(holder.pages[group]) if page]
                self.pools[group].release(pages)
                self.naive.let_go(group, pages)

    def drop(self) -> None:
        if self.owned:
            for group, slots in enumerate(self.owned.pop(self.rng.integers(len(self.owned)))):
                self.hosts[group].release(slots)
                self.naive.let_go(group, slots, on_host=True)

    def evict(self) -> None:
        group = int(self.rng.integers(len(self.windows)))
        found = self.index.evict(group)
        assert found == self.naive.evict(group)
        self.counts["evicted"] += found

    def evict_slot(self) -> None:
        group = int(self.rng.integers(len(self.windows)))
        found = self.index.evict_slot(group)
        assert found == self.naive.evict_slot(group)
        self.counts["slots evicted"] += found

    def save(self) -> None:
        """Demote the tail of a holder, as when it is swapped."""
        holder = self.any_holder()
        if holder is None or not len(holder.path) - 1:
            return
        first = int(self.rng.integers(0, len(holder.path)))
        tails = [[page for page in pages[first:] if page] for pages in holder.pages]
        for group in self.groups:
            while self.hosts[group].num_free < len(tails[group]):
                found = self.index.evict_slot(group)
                assert found == self.naive.evict_slot(group)
                if not found:
                    return
        if any(host.num_free < len(tail) for host, tail in zip(self.hosts, tails, strict=True)):
            return
        slots = [host.allocate(len(tail)) for host, tail in zip(self.hosts, tails, strict=True)]
        for group, (tail, taken) in enumerate(zip(tails, slots, strict=True)):
            for slot in taken:  # one reference of the mover, one of the owner
                self.naive.hold(group, [slot, slot], on_host=True)
            for page, slot in zip(tail, taken, strict=True):
                if self.pools[group].refs(page) == 1:
                    self.counts["demoted"] += self.pools[group].is_kept(page)
                    self.index.demote(group, page, slot)
                    self.naive.demote(group, page, slot)
            self.pools[group].release(reversed(tail))
            self.naive.let_go(group, tail[::-1])
            del holder.pages[group][first:]
        holder.path, holder.records = holder.path[: first + 1], holder.records[:first]
        self.owned.append(slots)
        self.saving.append((slots, bool(self.rng.random() < 0.85)))

    def land(self) -> None:
        if not self.saving:
            return
        by_group, is_there = self.saving.pop(self.rng.integers(len(self.saving)))
        for group, slots in enumerate(by_group):
            assert not slots or not self.hosts[group].is_ready(slots)
            self.hosts[group].end_save(slots)
            self.naive.let_go(group, slots, on_host=True)
            assert self.hosts[group].is_ready(slots)
            if not is_there:
                self.index.forget_slots(group, slots)
                for slot in slots:
                    self.naive.drop_slot(group, slot)
                self.counts["never landed"] += len(slots)

    def load(self) -> None:
        """Promote what is on the host of a path, as when a prompt matches it."""
        for group, pool in enumerate(self.pools):
            while pool.num_free < 7 and pool.oldest_idle() is not None:
                assert self.index.evict(group) == self.naive.evict(group)
        away = sorted(path for path, slots in self.naive.slots.items() if any(slots))
        path = away[self.rng.integers(len(away))] if away else self.any_path()
        found = self.index.match(self.keys_of(path), path[1:], len(path) - 1, path[0]).records
        holder = Holder(path[: len(found) + 1], [[] for _ in self.groups], list(found))
        for group in self.groups:
            first = self.index.first_page(group, len(found))
            away = [i for i in range(first, len(found)) if not found[i].pages[group]]
            slots = [found[i].slots[group] for i in away]
            if not self.hosts[group].is_ready(slots) or self.pools[group].num_free < len(away):
                return
        for group in self.groups:
            first = self.index.first_page(group, len(found))
            pages = [0] * first + [record.pages[group] for record in found[first:]]
            self.pools[group].retain(page for page in pages if page)
            self.naive.hold(group, [page for page in pages if page])
            away = [i for i in range(first, len(found)) if not pages[i]]
            slots = [found[i].slots[group] for i in away]
            self.hosts[group].begin_load(slots)
            self.naive.hold(group, slots, on_host=True)
            for i, page in zip(away, self.pools[group].allocate(len(away)), strict=True):
                pages[i] = page
                self.naive.hold(group, [page])
                self.index.promote(found[i], group, page)
                self.naive.promote(path[: i + 2], group, page)
                self.counts["promoted"] += 1
            self.hosts[group].end_load(slots)
            self.naive.let_go(group, slots, on_host=True)
            holder.pages[group] = pages
        self.holders.append(holder)

    def forget(self) -> None:
        holder = self.any_holder()
        if holder is not None and holder.records:
            i = int(self.rng.integers(len(holder.records)))
            if self.index.is_known(holder.records[i]):
                self.naive.strip(holder.path[: i + 2])
            self.index.forget(holder.records[i])
            self.counts["forgotten"] += 1

    def clear(self) -> None:
        assert self.index.clear() == sum(map(self.naive.is_usable, self.naive.existing()))
        for path in list(self.naive.pages):
            self.naive.strip(path)

    def pass_window(self, holder: Holder) -> None:
        for group, window in enumerate(self.windows):
            if window is not None:
                pages = holder.pages[group]
                first = self.index.first_page(group, len(pages))
                gone = [page for page in pages[:first] if page]
                self.pools[group].release(gone)
                self.naive.let_go(group, gone)
                pages[:first] = [0] * first

    def any_holder(self) -> Holder | None:
        return self.holders[self.rng.integers(len(self.holders))] if self.holders else None

    # ---- what must be the same ----

    def compare(self) -> None:
        self.index.check()
        for group, (pool, host) in enumerate(zip(self.pools, self.hosts, strict=True)):
            pool.check([holder.pages[group] for holder in self.holders], self.index.kept_pages(group))
            busy = [*host.busy, *(slots[group] for slots in self.owned)]
            host.check(busy, self.index.kept_slots(group))
            assert list(pool._idle) == self.naive.idle[group]
            assert list(host._idle) == self.naive.idle_slots[group]
        found = {_path(record): record for record in self.index._records.values()}
        assert found.keys() == self.naive.existing()
        assert len(self.index) == sum(map(self.naive.is_usable, found))
        self.counts["links"] += len(found) - len(self.index)
        for path, record in found.items():
            assert record.key == self.key_of(path)
            assert (list(record.pages), list(record.slots)) == (
                self.naive.pages.get(path, [0] * len(self.windows)),
                self.naive.slots.get(path, [0] * len(self.windows)),
            )


setattr(Trace, "pass", lambda self: self.pass_window(self.any_holder()) if self.holders else None)


def _path(record: Record) -> Path:
    tail: list[bytes] = []
    link: Record | bytes = record
    while isinstance(link, Record):
        tail.append(link.tokens)
        link = link.parent
    return (link, *tail[::-1])
