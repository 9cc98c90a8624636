"""Every living sequence, where it stands and what it holds: the moves between line and rows.

    enter -> (held back) -> line --admit--> running --preempt or swap--> line ...
                               +--------- retire ---------+            from anywhere, the one release

Moves keep lists, pools, slots and shared pages consistent; which move to make is decided by the
planner and the scheduler.
"""

from collections.abc import Iterable

from xjax.cache.index import Match
from xjax.config import SchedulerConfig
from xjax.request import Request
from xjax.scheduler.admission import SampleGroup, WaitingLine, insert_by_order, remove_by_order
from xjax.scheduler.pages.book import PageBook
from xjax.scheduler.pages.prefix import NO_MATCH, PrefixCache, Prompt
from xjax.scheduler.pages.rows import RowTable
from xjax.scheduler.pages.swap import SwapBook
from xjax.scheduler.sequence import Sequence, Status


class Roster:
    """Owner of sequences, sample groups, pools and rows.

    running   by order: oldest of the highest priority first
    groups    by request id, while any sample lives
    counts    events since the start
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.rows = RowTable(config)
        self.book = PageBook(config, self.rows)
        self.prefix = PrefixCache(config, self.book)
        self.swap = SwapBook(
            config,
            self.book,
            on_lost=self._lose,
            on_unload=self._unload,
            on_found=self.prefix.count_landed,
            on_uncopied=self._leave_shared,
        )
        self.line = WaitingLine()
        self.running: list[Sequence] = []
        self.groups: dict[str, SampleGroup] = {}
        self.num_queued = 0  # requests of which no sample ever ran
        self.counts = dict.fromkeys(
            ("steps", "repeats", "preemptions", "recomputed_tokens", "prefill_tokens", "decode_tokens",
             "chunk_splits", "aborts", "shared_tokens", "stalls", "bypasses"), 0
        )  # fmt: skip
        self._sharing: list[SampleGroup] = []
        self._has_state = config.has_recurrent
        self._next_serial = 0

    def group_of(self, sequence: Sequence) -> SampleGroup:
        """The samples of a living sequence's request."""
        return self.groups[sequence.request.request_id]

    def enter(self, request: Request, prompt: Prompt, *, max_tokens: int) -> SampleGroup:
        """Put the samples of a new request into the line, or behind sample 0."""
        sequences: list[Sequence] = []
        for sample_id in range(request.sampling.n):
            sequences.append(
                Sequence(
                    request,
                    sample_id,
                    prompt=prompt.ids,
                    max_tokens=max_tokens,
                    num_groups=len(self.book.pools),
                    serial=self._next_serial,
                )
            )
            self._next_serial += 1
            progress = sequences[-1].cache
            progress.tokens, progress.keys = list(prompt.pages), list(prompt.keys)
        group = SampleGroup(request, sequences, page_size=self.book.page_size, can_share=not self._has_state)
        self.groups[request.request_id] = group
        self.num_queued += 1
        for sequence in sequences:
            if not group.is_held_back(sequence):
                self.line.add(sequence)
        return group

    def admit(self, sequence: Sequence, now: float, match: Match) -> None:
        """Give a waiting sequence a row, with its pages on the host, those of its request or matched ones."""
        group = self.group_of(sequence)
        sequence.begin(now)
        if not group.has_started:
            group.has_started = True
            self.num_queued -= 1
        self.line.remove(sequence)
        away: list[list[tuple[int, int]]] = []
        if sequence.cache.swapped is None:
            if group.adopt(sequence, self.book):
                self.counts["shared_tokens"] += sequence.num_computed
                self._copy_partial(group, sequence)
            else:
                away = self.prefix.adopt(sequence, match, self.counts["steps"])
        self.rows.take(sequence)
        sequence.num_bypassed = 0
        sequence.move(Status.RUNNING)
        insert_by_order(self.running, sequence)
        if sequence.cache.swapped is not None:
            self.swap.load_own(sequence)
        self.swap.load_matched(sequence, away)
        self.rows.write(sequence)
        self._settle(group)

    def preempt(self, sequence: Sequence, *, swap: bool = False) -> None:
        """Send a running sequence back to the line, its pages to the host or away.

        swap   move its pages to the host where there is room; else it will compute its tokens again
        """
        self.counts["preemptions"] += 1
        if self.swap.revoke(sequence):
            if sequence.status is Status.WAITING:
                return
            swap = False  # its pages were to be made by what is revoked
        if swap and sequence.num_computed and self.swap.save(sequence):
            self._send_back(sequence)
            return
        self.counts["recomputed_tokens"] += sequence.num_computed
        self._restart(sequence)
        self._send_back(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        """From its row to the line, with the pages that it holds."""
        self.prefix.leave(sequence)
        remove_by_order(self.running, sequence)
        self.rows.give_back(sequence)
        sequence.move(Status.WAITING)
        self.line.add(sequence)

    def _restart(self, sequence: Sequence) -> None:
        """Let go of all pages, so that a sequence begins anew."""
        self.prefix.leave(sequence)
        self.book.release(sequence)
        self.swap.drop(sequence)
        self.prefix.restart(sequence)
        sequence.num_computed = 0

    def _lose(self, sequence: Sequence) -> None:
        """The pages of a waiting sequence on the host are gone."""
        self.counts["recomputed_tokens"] += sequence.num_computed
        self._restart(sequence)

    def _unload(self, sequence: Sequence) -> None:
        """The pages of a running sequence did not come back from the host."""
        if sequence.cache.swapped is None:
            self._restart(sequence)
        self._send_back(sequence)

    def _leave_shared(self, sequence: Sequence) -> None:
        """A page that its request shares could not be copied for a sample: nobody tries that again."""
        group = self.group_of(sequence)
        if group.shared is not None:
            group.drop(self.book)
            self._sharing.remove(group)
        self._unload(sequence)

    def forget_all(self) -> None:
        """Nothing that was in pages is left: neither the index nor a waiting sequence may go on from it."""
        for sequence in tuple(self.line):
            if sequence.cache.swapped is not None:
                self._lose(sequence)
        self.prefix.clear()

    def find_prefix(self, sequence: Sequence) -> Match:
        """What a waiting sequence would find in the index, unless it has pages or its request shares some."""
        if sequence.cache.swapped is not None or self.group_of(sequence).shared is not None:
            return NO_MATCH
        return self.prefix.match(sequence)

    def num_away(self, sequence: Sequence, match: Match) -> list[int]:
        """Pages by group that a waiting sequence has on the host and needs on the device."""
        if sequence.cache.swapped is not None:
            return [len(sequence.cache.swapped.in_group(group)) for group in range(len(self.book.pools))]
        return self.prefix.num_away(match)

    def forget_host(self, sequence: Sequence) -> None:
        """Let a swapped sequence begin anew, since its pages have no room; others find none to load."""
        if sequence.cache.swapped is not None:
            self._lose(sequence)

    def free_retained(self, sequence: Sequence | None) -> bool:
        """Free the device pages of the youngest waiting sequence that has some; False for none.

        sequence   only younger ones than this, None for any
        """
        for other in reversed(self.line):
            if sequence is not None and other.order < sequence.order:
                return False
            if not any(page for pages in other.pages for page in pages):
                continue
            if not self.swap.save_retained(other):
                self._lose(other)
            return True
        return False

    def retire(self, sequence: Sequence) -> None:
        """End a sequence wherever it is and free all it holds."""
        group = self.group_of(sequence)
        if sequence.status is Status.RUNNING:
            remove_by_order(self.running, sequence)
        elif not group.is_held_back(sequence):
            self.line.remove(sequence)
        self.prefix.leave(sequence)
        self.book.release(sequence)
        self.swap.drop(sequence)
        if sequence.slot is not None:
            self.rows.give_back(sequence)
        sequence.move(Status.FINISHED)
        if group.is_pending and sequence.sample_id == 0:
            self._let_go(group)
        self._settle(group)
        if not group.live:
            self.num_queued -= not group.has_started
            del self.groups[sequence.request.request_id]

    def publish(self, sequence: Sequence) -> None:
        """Share the prompt pages of a sample 0 that has just computed them all."""
        group = self.group_of(sequence)
        group.publish(self.book)
        self._sharing.append(group)
        self._let_go(group)
        self._settle(group)

    def drop_shared(self) -> bool:
        """Let go of pages held for one request's samples that wait; False when there are none."""
        if not self._sharing:
            return False
        self._sharing.pop().drop(self.book)
        return True

    def withdraw(self, leader: Sequence) -> None:
        """Undo the sharing of prompt pages that turned out never to be written."""
        group = self.group_of(leader)
        if group.shared is not None:
            group.drop(self.book)
            self._sharing.remove(group)
        for sequence in group.live:
            if sequence is not leader:
                self.start_over(sequence)

    def start_over(self, sequence: Sequence) -> None:
        """What a sequence has in pages is wrong: let it compute all of it again."""
        if sequence.status is Status.RUNNING:
            self.preempt(sequence)
        elif sequence.cache.swapped is not None:
            self._lose(sequence)

    def _copy_partial(self, group: SampleGroup, sequence: Sequence) -> None:
        """Copy the last, partial page of the prompt for a sample, which is about to write into it."""
        for page_group, source in enumerate(group.partial or ()):
            (target,) = self.book.take(page_group, 1)
            sequence.pages[page_group].append(target)
            self.swap.copy(sequence, page_group, source, target)
        sequence.num_computed = sequence.num_prompt - 1

    def _let_go(self, group: SampleGroup) -> None:
        """Put samples that were held back into the line."""
        group.is_pending = False
        for sequence in group.live:
            if sequence.sample_id > 0:
                self.line.add(sequence)

    def _settle(self, group: SampleGroup) -> None:
        """Drop shared pages that nobody waits for."""
        if group.shared is not None and not any(item.status is Status.WAITING for item in group.sequences):
            group.drop(self.book)
            self._sharing.remove(group)

    def check(self, max_num_seqs: int) -> None:
        """Verify refcounts, tables, slots and lists."""
        live = [item for group in self.groups.values() for item in group.live]
        for g, pool in enumerate(self.book.pools):
            shared = [group.held_in(g) for group in self.groups.values()]
            pool.check([item.pages[g] for item in live] + shared, self.book.index.kept_pages(g))
            host, swapped = (
                self.book.hosts[g],
                [item.cache.swapped for item in live if item.cache.swapped is not None],
            )
            slots = [*(item.in_group(g) for item in swapped), *host.busy, *self.swap.owned_slots()[g]]
            host.check(slots, self.book.index.kept_slots(g))
        self._check_states([item for item in live if item.cache.swapped is not None])
        waiting = [item for item in live if item.status is Status.WAITING]
        running = [item for item in live if item.status is Status.RUNNING]
        self.prefix.check(running)
        assert _is_sorted_set(self.running, running), "the running list is wrong"
        in_line = [item for item in waiting if not self.group_of(item).is_held_back(item)]
        assert _is_sorted_set(list(self.line), in_line), "the waiting line is wrong"
        plain = [item for item in waiting if item.cache.swapped is None]
        assert not any(item.slot is not None for item in waiting)
        assert not any(any(item.pages) or item.num_computed for item in plain), "it waits with pages"
        rows = {item.slot for item in running}
        assert None not in rows and len(rows) == len(running), "two sequences share a row"
        assert len(rows) + self.rows.num_free == max_num_seqs, "a row is lost"
        for item in running:
            for g, pages in enumerate(item.pages):
                assert self.rows.pages[g, item.slot, : len(pages)].tolist() == pages, "a table is wrong"
                assert not any(pages[: item.num_passed[g]]) and all(pages[item.num_passed[g] :])
        assert self.num_queued == sum(not group.has_started for group in self.groups.values())

    def _check_states(self, away: list[Sequence]) -> None:
        """Recurrent state is in a sequence's row, or once on the host, and only while its pages are there."""
        assert all(item.status is Status.WAITING for item in away), "a copy of a running sequence"
        slots = [item.cache.swapped.state for item in away if item.cache.swapped is not None]
        assert all((slot > 0) == self._has_state for slot in slots), "pages and state went apart"
        assert len(set(slots)) == len(slots) or not self._has_state, "two sequences share a state"
        self.book.states.check([slots, *self.book.states.busy, *self.swap.owned_slots()[-1]])


def _is_sorted_set(line: list[Sequence], members: Iterable[Sequence]) -> bool:
    orders = [item.order for item in line]
    return orders == sorted(item.order for item in members)
