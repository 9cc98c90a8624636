"""Decides one step: who computes how many tokens, who is admitted, who yields its pages.

    1. decodes, oldest first; each may make the youngest yield
    2. admissions, unless somebody just had to yield
    3. prefill chunks, oldest first, in the shape that takes most tokens for its cost

Out of pages: pages held only for sharing go first, then the youngest of the lowest priority is
preempted. Only a younger one ever yields to an older one, so the oldest always progresses.
"""

from xjax.config import SchedulerConfig
from xjax.scheduler.builder import NO_TOKEN, Again, Draft
from xjax.scheduler.chunks import choose_prefill, divide
from xjax.scheduler.pace import Pace
from xjax.scheduler.plan import Plan
from xjax.scheduler.roster import Roster
from xjax.scheduler.sequence import Sequence, Status


class Planner:
    """Drafts steps over a roster. `pace` tells how much a prompt may take of a step."""

    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self._config = config
        self._shapes = config.shapes.prefill
        self._roster = roster
        self._book = roster.book
        self._counts = roster.counts
        self.pace = Pace()

    def draft(self, now: float) -> Draft:
        """Choose the sequences of the next step and give them their pages."""
        draft = Draft(self._config.shapes)
        preempted = self._counts["preemptions"]
        self._draft_decodes(draft)
        if self._counts["preemptions"] == preempted:
            self._admit(now)
        self._draft_chunks(draft)
        return draft

    def again(self, last: Plan) -> Again | None:
        """Let every row of the step before just go on, as in most steps, and give it its page.

        None, with nothing changed, when there is more to do; never decides what `draft` would not.
        """
        roster, book = self._roster, self._book
        if last.chunks or last.pairs or tuple(roster.running) != last.sequences:
            return None
        if len(roster.line) and roster.rows.num_free:
            return None
        found = Again([], [], [])
        computed, pending, known = found.computed, found.pending, found.known
        growing: list[Sequence] = []
        for sequence, slot in zip(last.sequences, last.slots.tolist(), strict=True):
            here, in_flight = sequence.num_computed, sequence.in_flight
            if (
                sequence.num_tokens + in_flight != here + 1
                or here + 1 - sequence.num_prompt >= sequence.max_tokens
                or sequence.penalties is not None
                or sequence.slot != slot
            ):
                return None
            if not here % book.page_size:
                growing.append(sequence)
            computed.append(here)
            pending.append(in_flight)
            known.append(NO_TOKEN if in_flight else sequence.last_token)
        if any(pool.num_free < len(growing) for pool in book.pools):
            return None
        for sequence in growing:
            book.pass_window(sequence, sequence.num_computed)
            book.grow(sequence, sequence.num_computed + 1)
        return found

    # ---- decodes ----

    def _draft_decodes(self, draft: Draft) -> None:
        book, longest = self._book, self._shapes[-1][0]
        page_size, decodes = book.page_size, draft.decodes
        for sequence in tuple(self._roster.running):
            if sequence.status is not Status.RUNNING:
                continue
            if not sequence.is_decoding:
                # An older one about to end its prompt must find room for its pairs.
                if sequence.num_left <= longest:
                    draft.hold_pairs(sequence)
                continue
            num_tokens = sequence.num_computed + 1
            if num_tokens - sequence.num_prompt >= sequence.max_tokens:
                continue  # the tokens under way are its last
            if (num_tokens - 1) % page_size and (sequence.penalties is None or draft.hold_pairs(sequence)):
                decodes[sequence] = None  # inside a page that it holds: nothing to get or give back
                continue
            book.pass_window(sequence, sequence.num_computed)
            has_room = draft.hold_pairs(sequence) and (
                book.has_pages(sequence, num_tokens) or self._make_room(sequence, num_tokens, draft)
            )
            if has_room:
                book.grow(sequence, num_tokens)
                draft.decodes[sequence] = None
            else:
                self._counts["stalls"] += 1

    def _make_room(self, sequence: Sequence, num_tokens: int, draft: Draft) -> bool:
        """Let younger ones yield until the first `num_tokens` tokens of `sequence` have pages."""
        book, roster = self._book, self._roster
        while not book.has_pages(sequence, num_tokens) and book.fitting(sequence) < num_tokens:
            if roster.drop_shared():
                continue
            victim = roster.running[-1]
            if victim is sequence:
                return False
            draft.remove(victim)
            roster.preempt(victim)
        return True

    # ---- admission ----

    def _admit(self, now: float) -> None:
        roster, rows = self._roster, self._roster.rows
        if not len(roster.line) or not rows.num_free:
            return
        promised = [0] * len(self._book.pools)
        for sequence in roster.running:
            promised = _sum(promised, self._still_needs(sequence))
        passed: list[Sequence] = []
        for sequence in roster.line.front():
            if not rows.num_free:
                break
            if sequence.in_flight:  # its last token is not known yet
                continue
            total = _sum(promised, self._still_needs(sequence))
            if roster.running and any(
                n > pool.num_free for n, pool in zip(total, self._book.pools, strict=True)
            ):
                if roster.line.is_starved(sequence):
                    break
                passed.append(sequence)
                continue
            for other in passed:
                other.num_bypassed += 1
            self._counts["bypasses"] += bool(passed)
            promised = total
            roster.admit(sequence, now)

    def _still_needs(self, sequence: Sequence) -> list[int]:
        """Pages by group that a sequence needs for its tokens, with a page of room to decode into."""
        most = sequence.num_prompt + sequence.max_tokens
        num_tokens = min(sequence.num_expected + 1 + self._config.page_size, most)
        needs: list[int] = []
        for group, pages in enumerate(sequence.pages):
            if sequence.slot is None:
                held = self._roster.group_of(sequence).num_held(group)
            else:
                held = len(pages) - sequence.num_passed[group]
            needs.append(max(self._book.pages_at_once(group, num_tokens, sequence.num_left) - held, 0))
        return needs

    # ---- prefill ----

    def _draft_chunks(self, draft: Draft) -> None:
        waiting = [item for item in self._roster.running if not item.is_decoding]
        if not waiting:
            return
        limit = self._shapes[-1][0]
        if draft.decodes:
            limit = self.pace.most_tokens(self._config.step_time_target, limit)
        most_scored = self._config.shapes.num_scored[-1]
        lengths = [s.num_left if s.num_unscored <= most_scored else most_scored for s in waiting]
        draft.shape_id = choose_prefill(lengths, self._shapes, limit)
        scored = self._config.shapes.num_scored[draft.shape_id]
        for sequence, count in zip(waiting, divide(lengths, *self._shapes[draft.shape_id]), strict=True):
            if sequence.status is not Status.RUNNING:
                continue
            if sequence.num_unscored > scored:
                count = min(count, scored)
            if count == sequence.num_left and not draft.hold_pairs(sequence):
                count -= 1
            if count:
                count = self._room_for_chunk(sequence, count, draft)
            if not count:
                self._counts["stalls"] += 1
                continue
            self._counts["chunk_splits"] += count < sequence.num_left
            scored -= min(count, sequence.num_unscored)
            self._book.grow(sequence, sequence.num_computed + count)
            draft.chunks[sequence] = count

    def _room_for_chunk(self, sequence: Sequence, count: int, draft: Draft) -> int:
        """Tokens of at most `count` that get pages, after others yielded where none would."""
        start = sequence.num_computed
        self._book.pass_window(sequence, self._roster.group_of(sequence).horizon(sequence))
        if not self._make_room(sequence, start + 1, draft):
            return 0
        return min(count, self._book.fitting(sequence) - start)


def _sum(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]
