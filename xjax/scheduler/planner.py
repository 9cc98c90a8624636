"""Decides one step: who computes how many tokens, who is admitted, who yields its pages.

    1. decodes, oldest first; each may make the youngest yield
    2. admissions, unless somebody just had to yield
    3. prefill chunks, oldest first, in the shape that takes most tokens for its cost

Out of pages: idle ones of the index go first, then those held only for sharing, then the youngest of the
lowest priority is preempted, then waiting ones let go of what they still hold. Only a younger one ever
yields to an older one, so the oldest always progresses.
"""

from xjax.cache.index import Match
from xjax.config import SchedulerConfig
from xjax.scheduler.builder import NO_TOKEN, Again, Draft
from xjax.scheduler.chunks import choose_prefill, divide
from xjax.scheduler.pace import Pace
from xjax.scheduler.pages.prefix import NO_MATCH
from xjax.scheduler.plan import Plan
from xjax.scheduler.roster import Roster
from xjax.scheduler.sequence import Sequence, Status

_MAX_MATCHED = 4  # prompts that a plan looks up, so that a long line costs a step little


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
        self._roster.swap.settle()
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
        if any(pool.num_available < len(growing) for pool in book.pools):
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
            if sequence.status is not Status.RUNNING or sequence.cache.is_loading:
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
                # Alone, it may take what any waiting one still holds: else nobody would go on.
                if roster.free_retained(sequence if len(roster.running) > 1 else None):
                    continue
                return False
            draft.remove(victim)
            roster.preempt(victim, swap=self._is_swap_better(victim))
        return True

    def _is_swap_better(self, sequence: Sequence) -> bool:
        """Whether to move a sequence's pages to the host rather than to compute them again."""
        mode, sizes = self._config.preemption_mode, self._config.page_bytes
        if mode != "auto" or sizes is None:
            return mode != "recompute"
        first, private = self._roster.swap.private_pages(sequence)
        num_bytes = sum(size * len(pages) for size, pages in zip(sizes, private, strict=True))
        num_bytes += self._config.state_bytes
        # What stays is found again, unless there is a state to be computed from the first token on.
        kept = 0 if self._config.has_recurrent else first * self._book.page_size
        tokens = sequence.num_computed - kept
        return self.pace.is_moving_faster(num_bytes, tokens)

    # ---- admission ----

    def _admit(self, now: float) -> None:
        roster, rows = self._roster, self._roster.rows
        if not len(roster.line) or not rows.num_free:
            return
        promised = [0] * len(self._book.pools)
        for sequence in roster.running:
            promised = _sum(promised, self._still_needs(sequence))
        passed: list[Sequence] = []
        looks = _MAX_MATCHED
        for sequence in roster.line.front():
            if not rows.num_free or not looks:
                break
            if sequence.in_flight or not self._may_start(sequence):
                continue
            looks -= 1
            match = roster.find_prefix(sequence)
            if not roster.prefix.is_ready(match) or roster.prefix.await_older(sequence, match):
                continue
            total = _sum(promised, self._still_needs(sequence, match))
            if roster.running and self._exceeds(total):
                if roster.line.is_starved(sequence):
                    break
                passed.append(sequence)
                continue
            if not self._can_load(sequence, match):
                continue
            for other in passed:
                other.num_bypassed += 1
            self._counts["bypasses"] += bool(passed)
            roster.admit(sequence, now, match)
            promised = _sum(promised, self._still_needs(sequence))

    def _may_start(self, sequence: Sequence) -> bool:
        """Whether nothing that a waiting sequence needs is still under way."""
        return self._roster.swap.is_ready(sequence) and not self._roster.prefix.must_wait(sequence)

    def _exceeds(self, needs: list[int]) -> bool:
        return any(n > pool.num_available for n, pool in zip(needs, self._book.pools, strict=True))

    def _can_load(self, sequence: Sequence, match: Match) -> bool:
        """Whether there is room for what a sequence starts from; else room is made, for a later plan."""
        roster = self._roster
        if not self._exceeds(roster.num_away(sequence, match)):
            return True
        if not roster.drop_shared() and not roster.free_retained(sequence):
            roster.forget_host(sequence)
        return False

    def _still_needs(self, sequence: Sequence, match: Match = NO_MATCH) -> list[int]:
        """Pages by group that a sequence needs for its tokens, with a page of room to decode into.

        Idle pages of a match count as needed: they are among the available ones.
        """
        most = sequence.num_prompt + sequence.max_tokens
        num_tokens = min(sequence.num_expected + 1 + self._config.page_size, most)
        num_left = sequence.num_left - len(match.records) * self._config.page_size
        needs: list[int] = []
        for group, pages in enumerate(sequence.pages):
            if sequence.slot is None and sequence.cache.swapped is None:
                held = self._roster.group_of(sequence).num_held(group)
                held = held or self._roster.prefix.num_shared(match, group)
            else:
                held = sum(page != 0 for page in pages[sequence.num_passed[group] :])
            needs.append(max(self._book.pages_at_once(group, num_tokens, num_left) - held, 0))
        return needs

    # ---- prefill ----

    def _draft_chunks(self, draft: Draft) -> None:
        waiting = [
            item for item in self._roster.running if not item.is_decoding and not item.cache.is_loading
        ]
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
        self._book.pass_window(sequence, start)
        if not self._make_room(sequence, start + 1, draft):
            return 0
        return min(count, self._book.fitting(sequence) - start)


def _sum(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]
