"""Every living sequence, where it stands and what it holds: the moves between line and rows.

    enter -> (held back) -> line --admit--> running --preempt--> line ...
                               +------- retire -------+            from anywhere, the one release

Moves keep lists, pools, slots and shared pages consistent; which move to make is decided by the
planner and the scheduler.
"""

from collections.abc import Iterable

import numpy as np

from xjax.config import SchedulerConfig
from xjax.request import Request
from xjax.scheduler.admission import SampleGroup, WaitingLine, insert_by_order, remove_by_order
from xjax.scheduler.memory import PageBook, RowTable
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
        self.line = WaitingLine()
        self.running: list[Sequence] = []
        self.groups: dict[str, SampleGroup] = {}
        self.num_queued = 0  # requests of which no sample ever ran
        self.counts = dict.fromkeys(
            ("steps", "repeats", "preemptions", "recomputed_tokens", "prefill_tokens", "decode_tokens",
             "chunk_splits", "aborts", "shared_tokens", "stalls", "bypasses"), 0
        )  # fmt: skip
        self._sharing: list[SampleGroup] = []
        self._can_share = not config.has_recurrent
        self._next_serial = 0

    def group_of(self, sequence: Sequence) -> SampleGroup:
        """The samples of a living sequence's request."""
        return self.groups[sequence.request.request_id]

    def enter(self, request: Request, *, max_tokens: int) -> SampleGroup:
        """Put the samples of a new request into the line, or behind sample 0."""
        prompt = np.array(request.prompt_ids, np.int32)
        sequences: list[Sequence] = []
        for sample_id in range(request.sampling.n):
            sequences.append(
                Sequence(
                    request,
                    sample_id,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    num_groups=len(self.book.pools),
                    serial=self._next_serial,
                )
            )
            self._next_serial += 1
        group = SampleGroup(request, sequences, page_size=self.book.page_size, can_share=self._can_share)
        self.groups[request.request_id] = group
        self.num_queued += 1
        for sequence in sequences:
            if not group.is_held_back(sequence):
                self.line.add(sequence)
        return group

    def admit(self, sequence: Sequence, now: float) -> None:
        """Give a waiting sequence a row, with the pages its request shares."""
        group = self.group_of(sequence)
        sequence.begin(now)
        if not group.has_started:
            group.has_started = True
            self.num_queued -= 1
        self.line.remove(sequence)
        group.adopt(sequence, self.book)
        self.counts["shared_tokens"] += sequence.num_computed
        self.rows.take(sequence)
        sequence.num_bypassed = 0
        sequence.move(Status.RUNNING)
        insert_by_order(self.running, sequence)
        self._settle(group)

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the line; it will compute its tokens again."""
        self.counts["preemptions"] += 1
        self.counts["recomputed_tokens"] += sequence.num_computed
        remove_by_order(self.running, sequence)
        self.book.release(sequence)
        sequence.num_computed = 0
        sequence.move(Status.WAITING)
        self.line.add(sequence)

    def retire(self, sequence: Sequence) -> None:
        """End a sequence wherever it is and free all it holds."""
        group = self.group_of(sequence)
        if sequence.status is Status.RUNNING:
            remove_by_order(self.running, sequence)
        elif not group.is_held_back(sequence):
            self.line.remove(sequence)
        self.book.release(sequence)
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
            if sequence is not leader and sequence.status is Status.RUNNING:
                self.preempt(sequence)

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
            shared = [group.shared[g] for group in self.groups.values() if group.shared is not None]
            pool.check([item.pages[g] for item in live] + shared)
        waiting = [item for item in live if item.status is Status.WAITING]
        running = [item for item in live if item.status is Status.RUNNING]
        assert _is_sorted_set(self.running, running), "the running list is wrong"
        in_line = [item for item in waiting if not self.group_of(item).is_held_back(item)]
        assert _is_sorted_set(list(self.line), in_line), "the waiting line is wrong"
        assert not any(item.slot is not None or any(item.pages) or item.num_computed for item in waiting)
        slots = {item.slot for item in running}
        assert None not in slots and len(slots) == len(running), "two sequences share a row"
        assert len(slots) + self.rows.num_free == max_num_seqs, "a row is lost"
        for item in running:
            for g, pages in enumerate(item.pages):
                assert self.rows.pages[g, item.slot, : len(pages)].tolist() == pages, "a table is wrong"
                assert not any(pages[: item.num_passed[g]]) and all(pages[item.num_passed[g] :])
        assert self.num_queued == sum(not group.has_started for group in self.groups.values())


def _is_sorted_set(line: list[Sequence], members: Iterable[Sequence]) -> bool:
    orders = [item.order for item in line]
    return orders == sorted(item.order for item in members)
