"""Pages and recurrent state of sequences between device and host: what is to be moved, what came of it.

    running --save--> waiting, pages on the host --load--> running, computes from the next plan on
                 \\-- failed: computes again            \\-- failed: waits as before

The leading pages that a sequence found in the index, or that another sequence uses, stay on the device
with its reference; every other page of it goes. A page that the index knows keeps its record: it names
the host slot then. Recurrent state goes with the pages, in the same transfer: it is in the sequence's row
or on the host, and either all of it came through or the sequence computes again. Bytes are moved elsewhere,
in the order of `take_moves`; reports come back by serial.
"""

from collections.abc import Callable
from dataclasses import dataclass

from xjax.config import SchedulerConfig
from xjax.scheduler.pages.book import PageBook
from xjax.scheduler.pages.moves import Moves, Transfer, ids
from xjax.scheduler.sequence import Sequence, Status, SwappedPages

_MAX_FAILED = 3  # loads of a sequence's own pages, before it computes them again

Pairs = list[tuple[int, int]]  # (page index in the sequence, host slot)


@dataclass
class _Save:
    """Slots that bytes are landing in: of each group, then for the state."""

    sequence: Sequence
    slots: list[list[int]]


@dataclass
class _Load:
    """Slots that are being read, and the pages that they go to.

    swapped   what to fall back to, where the slots are the sequence's own
    """

    sequence: Sequence
    away: list[Pairs]
    pages: list[list[int]]
    swapped: SwappedPages | None

    def slots(self) -> list[list[int]]:
        """Slots of each group, then that of the state, if any."""
        states = [self.swapped.state] if self.swapped is not None and self.swapped.state else []
        return [*([slot for _, slot in part] for part in self.away), states]


@dataclass(frozen=True)
class _Copy:
    """A page that a sequence needs a copy of."""

    sequence: Sequence
    group: int
    source: int
    target: int


class SwapBook:
    """Moves under way, by serial.

    on_lost       called with a sequence whose pages on the host are gone: it must compute again
    on_unload     called with a running sequence whose load failed: it must go back to the line
    on_found      called with a sequence and how many pages of its prefix came from the host
    on_uncopied   called with a running sequence that did not get the copy of a page
    """

    def __init__(
        self,
        config: SchedulerConfig,
        book: PageBook,
        *,
        on_lost: Callable[[Sequence], None],
        on_unload: Callable[[Sequence], None],
        on_found: Callable[[Sequence, int], None],
        on_uncopied: Callable[[Sequence], None],
    ) -> None:
        self._book, self._on_lost, self._on_unload = book, on_lost, on_unload
        self._on_found, self._on_uncopied = on_found, on_uncopied
        self._stores = (*book.hosts, book.states)
        self._has_state, self._retains = config.has_recurrent, config.prefix_cache
        self._saves: dict[int, _Save] = {}
        self._loads: dict[int, _Load] = {}
        self._serial = 0
        self._planned_saves: list[Transfer] = []
        self._planned_loads: list[Transfer] = []
        self._copies: list[_Copy] = []
        self._copied: list[Sequence] = []  # by the moves taken last
        self._loading: list[Sequence] = []
        self.counts: dict[str, int] = dict.fromkeys(
            ("swap_out_sequences", "swap_out_pages", "swap_in_sequences", "swap_in_pages", "swap_failures",
             "retained_pages", "page_copies", "swap_out_states", "swap_in_states"), 0
        )  # fmt: skip

    # ---- out ----

    def private_pages(self, sequence: Sequence) -> tuple[int, list[Pairs]]:
        """How many leading pages stay if a sequence is swapped, and by group (index, page) of the others."""
        first = self._num_retained(sequence)
        return first, [
            [(i, page) for i, page in enumerate(pages[first:], first) if page] for pages in sequence.pages
        ]

    def _num_retained(self, sequence: Sequence) -> int:
        if not self._retains:
            return 0
        most, count = max(map(len, sequence.pages), default=0), 0
        while count < most and (
            count < sequence.cache.num_matched or self._is_used_elsewhere(sequence, count)
        ):
            count += 1
        return count

    def _is_used_elsewhere(self, sequence: Sequence, index: int) -> bool:
        held = [(pool, pages[index]) for pool, pages in zip(self._book.pools, sequence.pages, strict=True)]
        return any(page for _, page in held) and all(pool.refs(page) > 1 for pool, page in held if page)

    def save(self, sequence: Sequence) -> bool:
        """Plan to move a running sequence's private pages and state to the host; False for no room there.

        The sequence lets go of these pages at once, and may let go of its row; the mover reads them before
        anything else is written.
        """
        assert sequence.slot is not None
        self._cut(sequence, -(-sequence.num_computed // self._book.page_size))
        first, private = self.private_pages(sequence)
        if not self._move_out(sequence, first, private, [sequence.slot] if self._has_state else []):
            return False
        self._cut(sequence, first)
        self.counts["swap_out_sequences"] += 1
        self.counts["retained_pages"] += sum(page != 0 for pages in sequence.pages for page in pages)
        return True

    def save_retained(self, sequence: Sequence) -> bool:
        """Plan to move what stayed on the device of a waiting sequence, too; False for no room."""
        assert sequence.cache.swapped is not None
        kept = [[(i, page) for i, page in enumerate(pages) if page] for pages in sequence.pages]
        if not self._move_out(sequence, 0, kept, []):
            return False
        self._cut(sequence, 0)
        return True

    def _move_out(self, sequence: Sequence, first: int, pairs: list[Pairs], rows: list[int]) -> bool:
        taken_slots = self._book.take_slots([len(part) for part in pairs], len(rows))
        if taken_slots is None:
            return False
        *slots, states = taken_slots
        pages = [[page for _, page in part] for part in pairs]
        for group, (given, taken) in enumerate(zip(pages, slots, strict=True)):
            for page, slot in zip(given, taken, strict=True):
                if self._book.pools[group].refs(page) == 1:
                    self._book.index.demote(group, page, slot)
        serial = self._next_serial()
        self._planned_saves.append(
            Transfer(serial, tuple(map(ids, pages)), tuple(map(ids, slots)), ids(rows), ids(states))
        )
        self._saves[serial] = _Save(sequence, taken_slots)
        sequence.cache.swapped = _with_slots(sequence, first, pairs, slots, states)
        self.counts["swap_out_pages"] += sum(map(len, pages))
        self.counts["swap_out_states"] += len(states)
        return True

    def _cut(self, sequence: Sequence, first: int) -> None:
        """Let go of the pages from an index on, the last first."""
        for group, pages in enumerate(sequence.pages):
            self._book.pools[group].release(page for page in reversed(pages[first:]) if page)
            del pages[first:]

    def end_save(self, serial: int, *, ok: bool) -> None:
        """The mover has landed the pages of a save, or failed to."""
        save = self._saves.pop(serial)
        for store, slots in zip(self._stores, save.slots, strict=True):
            store.end_save(slots)
        if ok:
            return
        self.counts["swap_failures"] += 1
        for group, slots in enumerate(save.slots[:-1]):
            self._book.index.forget_slots(group, slots)
        swapped = save.sequence.cache.swapped
        if swapped is not None and any(
            not set(slots).isdisjoint(mine) for slots, mine in zip(save.slots, swapped.held(), strict=True)
        ):
            self._on_lost(save.sequence)

    # ---- in ----

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether the pages of a swapped sequence have landed, so that they can come back."""
        swapped = sequence.cache.swapped
        return swapped is None or all(
            store.is_ready(slots) for store, slots in zip(self._stores, swapped.held(), strict=True)
        )

    def load_own(self, sequence: Sequence) -> None:
        """Plan to bring back what a swapped sequence that has a row has away; pages must be available."""
        swapped = sequence.cache.swapped
        assert swapped is not None
        away = [[(i, slot) for i, slot in enumerate(slots, swapped.first) if slot] for slots in swapped.slots]
        length = swapped.first + max(map(len, swapped.slots), default=0)
        for pages in sequence.pages:
            pages += [0] * (length - len(pages))
        sequence.cache.swapped = None
        self._plan_load(sequence, away, swapped)

    def load_matched(self, sequence: Sequence, away: list[Pairs]) -> None:
        """Plan to bring matched pages from the host to a sequence that has a row."""
        if any(away):
            self._plan_load(sequence, away, None)

    def _plan_load(self, sequence: Sequence, away: list[Pairs], swapped: SwappedPages | None) -> None:
        pages: list[list[int]] = []
        load = _Load(sequence, away, pages, swapped)
        *slots, states = load.slots()
        # All of them, before a page is taken and a record goes for it.
        for store, part in zip(self._stores, load.slots(), strict=True):
            store.begin_load(part)
        for group, part in enumerate(away):
            pages.append(self._book.take(group, len(part)))
            for (i, _), page in zip(part, pages[group], strict=True):
                sequence.pages[group][i] = page
        serial = self._next_serial()
        self._loads[serial] = load
        assert sequence.slot is not None
        rows = [sequence.slot] if states else []
        self._planned_loads.append(
            Transfer(serial, tuple(map(ids, pages)), tuple(map(ids, slots)), ids(rows), ids(states))
        )
        sequence.cache.is_loading = True
        self._loading.append(sequence)

    def settle(self) -> None:
        """A new plan begins: what the plan before brought back is there for it."""
        for sequence in self._loading:
            sequence.cache.is_loading = False
        self._loading.clear()

    def end_load(self, serial: int, *, ok: bool) -> None:
        """The mover has copied what a load is of, or failed before it began to."""
        load = self._loads.pop(serial)
        sequence = load.sequence
        if ok:
            self._promote(load)
            if load.swapped is None:
                self._on_found(sequence, max(map(len, load.away)))
        self._end_load(load)
        if ok:
            if load.swapped is not None:
                self._release_slots(load.swapped)
            return
        self.counts["swap_failures"] += 1
        if load.swapped is None:  # a prefix that cannot be had is a miss, and not tried for ever
            for group, part in enumerate(load.away):
                self._book.index.forget_slots(group, [slot for _, slot in part])
        self._fail_load(sequence, load.swapped)

    def _end_load(self, load: _Load) -> None:
        for store, slots in zip(self._stores, load.slots(), strict=True):
            store.end_load(slots)

    def _fail_load(self, sequence: Sequence, swapped: SwappedPages | None) -> None:
        """Take a sequence back to before its load; to its very start where that has failed often."""
        if sequence.status is not Status.RUNNING or not sequence.cache.is_loading:
            if swapped is not None:
                self._release_slots(swapped)
            return
        self._undo(sequence, swapped)
        if swapped is not None:
            sequence.cache.num_failed += 1
            if sequence.cache.num_failed >= _MAX_FAILED:
                self._on_lost(sequence)

    def _promote(self, load: _Load) -> None:
        """Let records name the pages that their bytes were copied to."""
        index, records = self._book.index, load.sequence.cache.records
        for group, (part, pages) in enumerate(zip(load.away, load.pages, strict=True)):
            held = load.sequence.pages[group]
            for (i, slot), page in zip(part, pages, strict=True):
                is_there = i < len(records) and i < len(held) and held[i] == page
                if is_there and records[i].slots[group] == slot:
                    index.promote(records[i], group, page)

    def _undo(self, sequence: Sequence, swapped: SwappedPages | None) -> None:
        """Put a sequence back to where it was before its load."""
        sequence.cache.is_loading = False
        self._loading.remove(sequence)
        if swapped is not None:
            self._cut(sequence, swapped.first)
        sequence.cache.swapped = swapped
        self._on_unload(sequence)

    # ---- on the device ----

    def copy(self, sequence: Sequence, group: int, source: int, target: int) -> None:
        """Plan to copy a page for a sequence before the next step."""
        self._copies.append(_Copy(sequence, group, source, target))

    def fail_copies(self) -> None:
        """The mover could not make the copies that it took last: who was to have one begins anew."""
        for sequence in self._copied:
            if sequence.status is Status.RUNNING:
                self._on_uncopied(sequence)
        self._copied = []

    # ---- either way ----

    def drop(self, sequence: Sequence) -> None:
        """Let go of what a sequence has on the host."""
        if sequence.cache.swapped is not None:
            self._release_slots(sequence.cache.swapped)
            sequence.cache.swapped = None

    def revoke(self, sequence: Sequence) -> bool:
        """Undo what was planned for a sequence since the last step; False where nothing was."""
        kept = [copy for copy in self._copies if copy.sequence is not sequence]
        was_copied, self._copies = len(kept) < len(self._copies), kept
        for transfer in self._planned_loads:
            load = self._loads[transfer.serial]
            if load.sequence is sequence:
                self._planned_loads.remove(transfer)
                del self._loads[transfer.serial]
                self._end_load(load)
                self._undo(sequence, load.swapped)
                return True
        return was_copied

    def take_moves(self) -> Moves | None:
        """What is to be moved before the next step, None for nothing; each is taken once."""
        if not (self._planned_saves or self._planned_loads or self._copies):
            return None
        groups = range(len(self._book.pools))
        moves = Moves(
            tuple(self._planned_saves),
            tuple(self._planned_loads),
            tuple(ids([copy.source for copy in self._copies if copy.group == group]) for group in groups),
            tuple(ids([copy.target for copy in self._copies if copy.group == group]) for group in groups),
        )
        own = [load for load in moves.loads if self._loads[load.serial].swapped is not None]
        self.counts["swap_in_sequences"] += len(own)
        self.counts["swap_in_pages"] += sum(load.num_pages for load in moves.loads)
        self.counts["swap_in_states"] += sum(len(load.states) for load in moves.loads)
        self.counts["page_copies"] += moves.num_copies
        self._copied = list(dict.fromkeys(copy.sequence for copy in self._copies))
        self._planned_saves, self._planned_loads, self._copies = [], [], []
        return moves

    def _release_slots(self, swapped: SwappedPages) -> None:
        for store, slots in zip(self._stores, swapped.held(), strict=True):
            store.release(reversed(slots))

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    # ---- looking in ----

    def owned_slots(self) -> list[list[list[int]]]:
        """By group, then for states, lists of slots that loads hold for their sequences; for `check`."""
        own = [load.swapped.held() for load in self._loads.values() if load.swapped is not None]
        return [[held[place] for held in own] for place in range(len(self._stores))]


def _with_slots(
    sequence: Sequence, first: int, pairs: list[Pairs], slots: list[list[int]], states: list[int]
) -> SwappedPages:
    """What a sequence has on the host, with the slots just taken for these pages and its state."""
    old, tables = sequence.cache.swapped, list[tuple[int, ...]]()
    for group, (part, taken) in enumerate(zip(pairs, slots, strict=True)):
        by_index = {i: slot for (i, _), slot in zip(part, taken, strict=True)}
        if old is not None:
            by_index |= {i: slot for i, slot in enumerate(old.slots[group], old.first) if slot}
        length = len(sequence.pages[group]) if old is None else old.first + len(old.slots[group])
        tables.append(tuple(by_index.get(i, 0) for i in range(first, length)))
    state = 0 if old is None else old.state
    return SwappedPages(first, tuple(tables), states[0] if states else state)
