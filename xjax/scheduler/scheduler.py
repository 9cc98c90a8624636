"""Decides, step by step, which sequence computes which tokens.

    1. submit    a request becomes n sequences in the waiting line
    2. plan      decodes first, oldest first; then admissions; then prefill chunks
    3.           (the engine runs the step; the next plan may be made before its tokens are known)
    4. commit    tokens are appended, ended samples released, events made
    5. finish / abort / fail end a sample at any time

Every plan is committed, failed or cancelled exactly once, in the order made, and at most one is
outstanding when the next is made. Used by one thread. Knows no device array and no text; time is an
argument.
"""

import heapq
from collections.abc import Iterable

import numpy as np

from xjax.config import SchedulerConfig
from xjax.errors import CapacityError, RequestError
from xjax.request import FinishReason, Request, TokenEvent
from xjax.scheduler.admission import SampleGroup
from xjax.scheduler.builder import build_plan, repeat_plan
from xjax.scheduler.outcome import (
    HiddenSums,
    StepEvents,
    scores_of,
    special_event,
    take_prompt_scores,
    take_token,
)
from xjax.scheduler.pages.prefix import Prompt
from xjax.scheduler.plan import Plan, StepResult
from xjax.scheduler.planner import Planner
from xjax.scheduler.roster import Roster
from xjax.scheduler.sequence import Sequence, Status

_NOT_FINITE = "the model's logits are not finite; its weights or the prompt overflow the dtype"


class Scheduler:
    """What the engine's loop talks to.

    longest   the most tokens that a request may have in all
    swap      tells after each plan which pages to move, and hears what came of it
    prefix    what is shared, for looking in and clearing
    pace      how long things take
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._roster = Roster(config)
        self._planner = Planner(config, self._roster)
        self.swap, self.prefix, self.pace = self._roster.swap, self._roster.prefix, self._planner.pace
        self._counts = self._roster.counts
        self._deadlines: list[tuple[float, int, str]] = []  # a heap: (time, serial, request id)
        self._hidden = HiddenSums()
        self._last_plan: Plan | None = None
        self.longest = min(config.max_model_len, self._roster.book.capacity())

    # ---- requests come and go ----

    def submit(self, request: Request, prompt: Prompt | None = None) -> None:
        """Queue a request. Raises RequestError or CapacityError; then nothing has changed.

        prompt   of the request, where it was made already
        """
        self.validate(request)
        if request.request_id in self._roster.groups:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        queue = self.config.max_queue
        if queue is not None and self._roster.num_queued >= queue:
            raise CapacityError(f"the queue is full ({queue} requests wait); try again later")
        room = self.longest - len(request.prompt_ids)
        wanted = request.sampling.max_tokens
        max_tokens = room if wanted is None else min(wanted, room)
        if request.pooling is not None:
            max_tokens = 0
        prompt = prompt or Prompt.of(request, self.config)
        group = self._roster.enter(request, prompt, max_tokens=max_tokens)
        if request.max_queue_time is not None:
            self._forget_deadlines()
            deadline = request.arrival + request.max_queue_time
            heapq.heappush(self._deadlines, (deadline, group.sequences[0].order[-1], request.request_id))

    def validate(self, request: Request) -> None:
        """Raise RequestError for a prompt that can never run here; reads fixed values, from any thread."""
        num_prompt = len(request.prompt_ids)
        if num_prompt == 0:
            raise RequestError(
                "the prompt is empty; give at least one token", code="empty_prompt", param="prompt"
            )
        is_answered = request.pooling is None
        if num_prompt + is_answered > self.longest:
            in_context = self.longest == self.config.max_model_len
            why = "the context" if in_context else "the page pool (--num-pages)"
            answer = ", one of them for the answer" if is_answered else ""
            raise RequestError(
                f"the prompt has {num_prompt} tokens; {why} holds {self.longest}{answer}",
                code="context_length_exceeded",
                param="prompt",
            )

    @property
    def num_queued(self) -> int:
        """Requests that wait and of which nothing has run."""
        return self._roster.num_queued

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End every sample of a request, whatever it is doing."""
        group = self._roster.groups.get(request_id)
        if group is None:
            return []
        self._counts["aborts"] += 1
        return [self._end(item, FinishReason.ABORT) for item in group.live]

    def finish(self, request_id: str, sample_id: int, num_tokens: int) -> list[TokenEvent]:
        """End a sample with reason "stop" after `num_tokens` output tokens, which the text decided."""
        group = self._roster.groups.get(request_id)
        if group is None or not 0 <= sample_id < len(group.sequences):
            return []
        sequence = group.sequences[sample_id]
        if sequence.status is Status.FINISHED:
            return []
        sequence.num_tokens = min(sequence.num_tokens, sequence.num_prompt + num_tokens)
        return [self._end(sequence, FinishReason.STOP)]

    def expire(self, now: float) -> list[TokenEvent]:
        """End requests whose queue time is over and of which no sample ever ran."""
        events: list[TokenEvent] = []
        while self._deadlines and self._deadlines[0][0] < now:
            _, serial, request_id = heapq.heappop(self._deadlines)
            group = self._queued(serial, request_id)
            if group is not None:
                message = f"waited more than {group.request.max_queue_time:g} s in the queue"
                events += [
                    self._end(item, FinishReason.ERROR, error=message, error_code="queue_timeout")
                    for item in group.live
                ]
        return events

    def _queued(self, serial: int, request_id: str) -> SampleGroup | None:
        """The group of a request that waits and of which nothing has run, None when that is over."""
        group = self._roster.groups.get(request_id)
        if group is None or group.has_started or group.sequences[0].order[-1] != serial:
            return None  # an id may be used again
        return group

    def _forget_deadlines(self) -> None:
        """Drop those that mean nothing any more, before they are most of a heap that lives for hours."""
        if len(self._deadlines) > 64 + 2 * self._roster.num_queued:
            self._deadlines = [item for item in self._deadlines if self._queued(*item[1:])]
            heapq.heapify(self._deadlines)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is alive."""
        return bool(self._roster.groups)

    # ---- steps ----

    def plan(self, now: float = 0.0) -> Plan | None:
        """Decide the next step from what every dispatched step will have done; None for nothing to do.

        now   seconds on the clock of the requests' `arrival`
        """
        step_id, last = self._counts["steps"], self._last_plan
        again = self._planner.again(last) if last is not None else None
        if last is not None and again is not None:
            self._counts["repeats"] += 1
            plan = repeat_plan(last, again, self._roster.rows, step_id=step_id)
        else:
            draft = self._planner.draft(now)
            if not draft.decodes and not draft.chunks:
                return None
            plan = build_plan(draft, self._roster.rows, self.config, step_id=step_id)
        self._last_plan = plan
        self._advance(plan)
        return plan

    def _advance(self, plan: Plan) -> None:
        """Count a step as run in its sequences."""
        self._counts["steps"] += 1
        self._counts["prefill_tokens"] += plan.num_prefill_tokens
        self._counts["decode_tokens"] += plan.num_decode
        for sequence in plan.sequences[: plan.num_decode]:
            assert sequence.in_flight <= 1, "a plan must be committed before the one after next"
            sequence.num_computed += 1
            sequence.in_flight += 1
            if sequence.num_computed == sequence.num_prompt:
                self._share_prompt(sequence)
        for chunk in plan.chunks:
            sequence = plan.sequences[chunk.row]
            sequence.num_computed += chunk.length
            sequence.in_flight += chunk.is_last
            self.prefix.publish(sequence, sequence.num_computed, plan.step_id)
            if sequence.num_computed >= sequence.num_prompt:
                self._share_prompt(sequence)

    def _share_prompt(self, sequence: Sequence) -> None:
        """Let the other samples of a request have the prompt's pages, once all are computed."""
        if sequence.sample_id == 0 and self._roster.group_of(sequence).is_pending:
            self._roster.publish(sequence)

    def commit(self, plan: Plan, result: StepResult) -> Iterable[TokenEvent]:
        """Take in what a step returned; events come in row order, and can be iterated on another thread."""
        scores, is_pooled = scores_of(plan, result), plan.pool_mean is not None
        if is_pooled:
            self._hidden.take(plan, result)
        if scores is not None:
            take_prompt_scores(plan, scores)
        tokens: list[int] = result.token.tolist()
        flags: list[int] = result.flags.tolist()
        samples: list[bool] = plan.samples.tolist()
        events = StepEvents(plan, tokens, scores)
        self._publish_decodes(plan)
        for row, sequence in enumerate(plan.sequences):
            if not samples[row]:
                continue
            sequence.in_flight -= 1
            if sequence.status is Status.FINISHED:
                continue
            if flags[row] & 1:
                self.prefix.forget_own(sequence)
                events.special[row] = self._end(sequence, FinishReason.ERROR, error=_NOT_FINITE)
                continue
            if is_pooled and sequence.request.pooling is not None:
                events.special[row] = self._end_pooled(sequence, result, row)
                continue
            reason = take_token(sequence, tokens[row])
            if reason is None and sequence.num_tokens - sequence.num_prompt > 1:
                events.ordinary.append(row)
                continue
            events.special[row] = special_event(sequence, tokens[row], reason, events.logprobs(row))
            if reason is not None:
                self._end(sequence, reason)
        return events

    def _end_pooled(self, sequence: Sequence, result: StepResult, row: int) -> TokenEvent:
        """End a sequence whose prompt was computed for its hidden states."""
        assert result.pooled is not None
        event = self._hidden.event(sequence, result.pooled[row])
        if event is None:
            self.prefix.forget_own(sequence)
            return self._end(sequence, FinishReason.ERROR, error=_NOT_FINITE)
        self._end(sequence, FinishReason.STOP)
        return event

    def _publish_decodes(self, plan: Plan) -> None:
        """Tell the index of pages that a step's decodes have filled."""
        prefix = self._roster.prefix
        prefix.end_step(plan.step_id, ok=True)
        computed = plan.positions + 1
        for row in np.flatnonzero(computed % self.config.page_size == 0).tolist():
            sequence, num_tokens = plan.sequences[row], int(computed[row])
            if sequence.status is Status.RUNNING and sequence.num_computed >= num_tokens:
                prefix.publish(sequence, num_tokens)

    def fail(self, plan: Plan, message: str) -> list[TokenEvent]:
        """End the sequences of a step that could not be run."""
        events: list[TokenEvent] = []
        self.prefix.end_step(plan.step_id, ok=False)
        roster = self._roster
        for sequence in (*roster.running, *roster.line):  # may have started from what is taken back
            if sequence.cache.matched_step > plan.step_id and sequence not in plan.sequences:
                roster.start_over(sequence)
        samples: list[bool] = plan.samples.tolist()
        chunk_rows = {chunk.row for chunk in plan.chunks}
        for row, sequence in enumerate(plan.sequences):
            sequence.in_flight -= samples[row]
            if sequence.status is Status.FINISHED:
                continue
            if row in chunk_rows and sequence.sample_id == 0:
                self._roster.withdraw(sequence)
            events.append(self._end(sequence, FinishReason.ERROR, error=message))
        return events

    def cancel(self, plan: Plan) -> None:
        """Forget a step that is never read: its sequences have ended, or all are preempted with it."""
        self.prefix.end_step(plan.step_id, ok=False)
        samples: list[bool] = plan.samples.tolist()
        for row, sequence in enumerate(plan.sequences):
            sequence.in_flight -= samples[row]

    def preempt_all(self) -> None:
        """Send every sequence back to the line without a page, as when the device state was lost."""
        while self._roster.drop_shared():
            pass
        for sequence in tuple(self._roster.running):
            self._roster.preempt(sequence)
        self._roster.forget_all()

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from how long a step took."""
        self.pace.observe(plan, seconds)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        error: str | None = None,
        error_code: str | None = None,
    ) -> TokenEvent:
        """The one way a sequence ends: everything it holds is released here."""
        self._roster.retire(sequence)
        self._hidden.drop(sequence)
        sequence.finish_reason = reason
        return TokenEvent(
            request_id=sequence.request.request_id,
            sample_id=sequence.sample_id,
            finish_reason=reason,
            error=error,
            error_code=error_code,
        )

    # ---- looking in ----

    def stats(self) -> dict[str, float]:
        """Counters since the start, and gauges of now."""
        roster = self._roster
        gauges: dict[str, float] = {
            "running": len(roster.running),
            "waiting": sum(len(group.live) for group in tuple(roster.groups.values())) - len(roster.running),
            "swapped": sum(item.cache.swapped is not None for item in tuple(roster.line)),
            "queued_requests": roster.num_queued,
            "longest_request": self.longest,
        }
        counts = {**self._counts, **roster.prefix.counts, **roster.swap.counts}
        return {**counts, **gauges, **roster.book.stats()}

    def check(self) -> None:
        """Verify refcounts, tables, slots and queues; for tests."""
        self._roster.check(self.config.max_num_seqs)
        assert self.has_work or not len(self._hidden), "hidden states of sequences that have ended"
