"""Decides, step by step, which sequence computes which tokens.

    1. submit    a request becomes n sequences in the waiting line
    2. plan      decodes first, oldest first; then admissions; then prefill chunks
    3.           (the engine runs the step; the next plan may be made before its tokens are known)
    4. commit    tokens are appended, ended samples released, events made
    5. finish / abort / fail end a sample at any time

Out of pages: pages held only for sharing go first, then the youngest of the lowest priority is
preempted: it gives everything back and later computes its tokens again. The oldest always
progresses. Used by one thread. Knows no device array and no text; time is an argument.
"""

import dataclasses

import numpy as np

from xjax.config import SchedulerConfig
from xjax.errors import CapacityError, RequestError
from xjax.request import FinishReason, Request, TokenEvent, TokenLogprobs
from xjax.scheduler.admission import SampleGroup, WaitingLine
from xjax.scheduler.builder import Draft, build_plan
from xjax.scheduler.chunks import choose_prefill
from xjax.scheduler.memory import PageBook
from xjax.scheduler.plan import Plan, StepResult
from xjax.scheduler.rows import RowTable
from xjax.scheduler.sequence import Sequence, Status


class Scheduler:
    """Owns every sequence, the pools and the row table."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._rows = RowTable(config)
        self._book = PageBook(config, self._rows)
        self._waiting = WaitingLine()
        self._running: list[Sequence] = []  # by order: oldest of the highest priority first
        self._groups: dict[str, SampleGroup] = {}
        self._next_serial = 0
        self._seconds_per_token: float | None = None
        self._counts = dict.fromkeys(
            ("steps", "preemptions", "recomputed_tokens", "prefill_tokens", "decode_tokens", "chunk_splits",
             "aborts", "shared_tokens", "stalls", "bypasses"), 0
        )  # fmt: skip
        self.longest = min(config.max_model_len, self._book.capacity())

    # ---- requests come and go ----

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError or CapacityError; then nothing has changed."""
        self.validate(request)
        if request.request_id in self._groups:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        num_prompt, sampling = len(request.prompt_ids), request.sampling
        queue = self.config.max_queue
        if queue is not None and len(self._waiting) + sampling.n > queue:
            raise CapacityError(f"the queue is full ({queue} waiting); try again later")
        room = self.longest - num_prompt
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        sequences = []
        for sample_id in range(sampling.n):
            sequences.append(
                Sequence(
                    request, sample_id, max_tokens=max_tokens, num_groups=len(self._book.pools), serial=self._next_serial
                )
            )
            self._next_serial += 1
            self._waiting.add(sequences[-1])
        self._groups[request.request_id] = SampleGroup(
            request, sequences, page_size=self.config.page_size, can_share=not self.config.has_recurrent
        )

    def validate(self, request: Request) -> None:
        """Raise RequestError for a prompt that can never run here; reads fixed values only, so any thread may call."""
        num_prompt = len(request.prompt_ids)
        if num_prompt == 0:
            raise RequestError("the prompt is empty; give at least one token", code="empty_prompt", param="prompt")
        if num_prompt >= self.longest:
            why = "the context" if self.longest == self.config.max_model_len else "the page pool (--num-pages)"
            raise RequestError(
                f"the prompt has {num_prompt} tokens; {why} holds {self.longest}, one of them for the answer",
                code="context_length_exceeded",
                param="prompt",
            )

    @property
    def num_waiting(self) -> int:
        """Sequences in the waiting line."""
        return len(self._waiting)

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End every sample of a request, whatever it is doing."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        self._counts["aborts"] += 1
        live = [item for item in group.sequences if item.status is not Status.FINISHED]
        return [self._end(item, FinishReason.ABORT) for item in live]

    def finish(self, request_id: str, sample_id: int, num_tokens: int) -> list[TokenEvent]:
        """End a sample with reason "stop" after `num_tokens` output tokens, which the text decided."""
        group = self._groups.get(request_id)
        if group is None or group.sequences[sample_id].status is Status.FINISHED:
            return []
        sequence = group.sequences[sample_id]
        sequence.num_tokens = min(sequence.num_tokens, sequence.num_prompt + num_tokens)
        return [self._end(sequence, FinishReason.STOP)]

    def expire(self, now: float) -> list[TokenEvent]:
        """End waiting requests whose queue time is over and that never ran."""
        events = []
        for sequence in self._waiting:
            limit = sequence.request.max_queue_time
            if limit is not None and not sequence.has_emitted and now - sequence.request.arrival > limit:
                message = f"waited more than {limit:g} s in the queue"
                events.append(self._end(sequence, FinishReason.ERROR, error=message))
        return events

    @property
    def has_work(self) -> bool:
        """Whether any sequence is alive."""
        return bool(self._groups)

    # ---- plan ----

    def plan(self) -> Plan | None:
        """Decide the next step from what every dispatched step will have done; None for nothing to do."""
        draft = Draft(self.config.shapes)
        self._draft_decodes(draft)
        self._admit()
        self._draft_chunks(draft)
        if not draft.counts:
            return None
        plan = build_plan(draft, self._rows, self.config, step_id=self._counts["steps"])
        self._counts["steps"] += 1
        self._counts["prefill_tokens"] += plan.num_prefill_tokens
        self._counts["decode_tokens"] += plan.num_decode
        for row, sequence in enumerate(plan.sequences):
            sequence.num_computed += draft.counts[sequence]
            sequence.in_flight += int(plan.samples[row])
            if sequence.num_computed >= sequence.num_prompt and sequence.sample_id == 0:
                self._group(sequence).publish(self._book)
                self._group(sequence).settle(self._book)
        return plan

    def _draft_decodes(self, draft: Draft) -> None:
        for sequence in tuple(self._running):
            if sequence.status is not Status.RUNNING or not sequence.is_decoding or sequence.is_exhausted:
                continue
            if not draft.has_pairs_for(sequence):
                self._counts["stalls"] += 1
                continue
            self._book.pass_window(sequence, sequence.num_computed)
            if self._make_room(sequence, sequence.num_computed + 1, draft):
                self._book.grow(sequence, sequence.num_computed + 1)
                draft.add(sequence, 1)
            else:
                self._counts["stalls"] += 1

    def _draft_chunks(self, draft: Draft) -> None:
        waiting = [s for s in self._running if not s.is_decoding and s.num_left > 0 and draft.has_pairs_for(s)]
        if not waiting:
            return
        shapes = self.config.shapes.prefill
        limit = shapes[-1][0]
        if draft.counts and self._seconds_per_token:
            limit = int(self.config.step_time_target / self._seconds_per_token)
        draft.shape_id = choose_prefill([s.num_left for s in waiting], shapes, limit)
        tokens, tile = shapes[draft.shape_id]
        tiles, scored = tokens // tile, self.config.shapes.num_scored[draft.shape_id]
        for sequence in waiting:
            if sequence.status is not Status.RUNNING or tiles == 0:
                continue
            count = min(sequence.num_left, tiles * tile)
            if sequence.wants_prompt_logprobs and sequence.num_computed < sequence.num_prompt - 1:
                count = min(count, scored)
            count = self._room_for_chunk(sequence, count, draft)
            if count == 0:
                self._counts["stalls"] += 1
                continue
            self._book.grow(sequence, sequence.num_computed + count)
            if count < sequence.num_left:
                self._counts["chunk_splits"] += 1
            if sequence.wants_prompt_logprobs:
                scored -= min(count, scored)
            tiles -= -(-count // tile)
            draft.add(sequence, count)

    def _room_for_chunk(self, sequence: Sequence, count: int, draft: Draft) -> int:
        """Tokens of at most `count` that get pages, after others yielded where none would."""
        start = sequence.num_computed
        group = self._group(sequence)
        horizon = min(start, group.num_shared) if group.is_pending and sequence.sample_id == 0 else start
        self._book.pass_window(sequence, horizon)
        if self._book.missing(sequence, start + count):
            fits = self._book.fitting(sequence) - start
            if fits <= 0:
                if not self._make_room(sequence, start + 1, draft):
                    return 0
                fits = self._book.fitting(sequence) - start
            count = min(count, fits)
        return count

    def _make_room(self, sequence: Sequence, num_tokens: int, draft: Draft) -> bool:
        """Let younger ones yield until the first `num_tokens` tokens of `sequence` have pages."""
        while self._book.missing(sequence, num_tokens):
            if any(group.drop(self._book) for group in self._groups.values()):
                continue
            victim = self._running[-1]
            if victim.order <= sequence.order:
                return False
            draft.remove(victim)
            self._preempt(victim)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._counts["preemptions"] += 1
        self._counts["recomputed_tokens"] += sequence.num_computed
        self._running.remove(sequence)
        self._book.release(sequence)
        sequence.num_computed = 0
        sequence.move(Status.WAITING)
        self._waiting.add(sequence)

    def preempt_all(self) -> None:
        """Send every running sequence back to the line, as when the device state was lost."""
        for group in self._groups.values():
            group.drop(self._book)
        for sequence in tuple(self._running):
            self._preempt(sequence)

    def _admit(self) -> None:
        if not len(self._waiting) or not self._rows.num_free:
            return
        promised = self._promised()
        for sequence in self._waiting.front():
            group = self._group(sequence)
            if sequence.in_flight or (group.is_pending and sequence.sample_id > 0):
                continue
            if not self._rows.num_free:
                break
            need = [self._book.pages_at_once(g, sequence.num_tokens + 1) for g in range(len(self._book.pools))]
            if self._running and not self._fits(need, promised):
                if self._waiting.is_starved(sequence):
                    break
                continue
            self._waiting.remove(sequence)
            self._waiting.note_bypass(sequence)
            group.adopt(sequence, self._book)
            self._counts["shared_tokens"] += sequence.num_computed
            self._rows.take(sequence)
            sequence.move(Status.RUNNING)
            self._running.append(sequence)
            self._running.sort(key=lambda item: item.order)
            group.settle(self._book)
            promised = self._promised()

    def _promised(self) -> list[int]:
        """Pages that running sequences still need for the tokens they already have, by group."""
        promised = [0] * len(self._book.pools)
        for sequence in self._running:
            for group, pages in enumerate(sequence.pages):
                held = len(pages) - sequence.num_passed[group]
                need = self._book.pages_at_once(group, sequence.num_expected + 1)
                promised[group] += max(need - held, 0)
        return promised

    def _fits(self, need: list[int], promised: list[int]) -> bool:
        return all(
            count + more <= pool.num_free for count, more, pool in zip(need, promised, self._book.pools, strict=True)
        )

    # ---- commit ----

    def commit(self, plan: Plan, result: StepResult) -> list[TokenEvent]:
        """Take in what a step returned; events come in row order."""
        events = []
        self._take_scores(plan, result)
        for row, sequence in enumerate(plan.sequences):
            if not plan.samples[row]:
                continue
            sequence.in_flight -= 1
            if sequence.status is Status.FINISHED:
                continue
            if result.flags[row] & 1:
                message = "the model's logits are not finite; its weights or the prompt overflow the dtype"
                events.append(self._end(sequence, FinishReason.ERROR, error=message))
                continue
            events.append(self._take_token(sequence, row, result))
        return events

    def _take_token(self, sequence: Sequence, row: int, result: StepResult) -> TokenEvent:
        token_id = int(result.token[row])
        sampling = sequence.request.sampling
        sequence.append(token_id)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.logprobs is not None:
            logprobs = (_logprobs_at(result, row, sampling.logprobs),)
        reason, stop_id = None, None
        is_eos = token_id in sequence.request.eos_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            reason, stop_id = FinishReason.STOP, token_id
        elif sequence.num_output >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        event = TokenEvent(
            request_id=sequence.request.request_id,
            sample_id=sequence.sample_id,
            token_ids=(token_id,),
            logprobs=logprobs,
            stop_token_id=stop_id,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if sequence.wants_prompt_logprobs else None,  # type: ignore[arg-type]
            num_cached_tokens=None if sequence.has_emitted else 0,
        )
        sequence.has_emitted = True
        if reason is not None:
            self._end(sequence, reason)
            return dataclasses.replace(event, finish_reason=reason)
        return event

    def _take_scores(self, plan: Plan, result: StepResult) -> None:
        place = plan.num_rows
        for chunk in plan.chunks:
            sequence = plan.sequences[chunk.row]
            for i in range(chunk.num_scored):
                if sequence.prompt_logprobs is not None:
                    k = sequence.request.sampling.prompt_logprobs or 0
                    sequence.prompt_logprobs[chunk.start + i + 1] = _logprobs_at(result, place + i, k)
            place += chunk.num_scored

    def fail(self, plan: Plan, message: str) -> list[TokenEvent]:
        """End the sequences of a step that could not be run."""
        events = []
        for row, sequence in enumerate(plan.sequences):
            sequence.in_flight -= int(plan.samples[row])
            if sequence.status is not Status.FINISHED:
                events.append(self._end(sequence, FinishReason.ERROR, error=message))
        return events

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from how long a step took; only steps with prefill count."""
        if plan.prefill is None:
            return
        sample = seconds / plan.prefill[0]
        before = self._seconds_per_token
        self._seconds_per_token = sample if before is None else 0.8 * before + 0.2 * sample

    def _end(self, sequence: Sequence, reason: FinishReason, *, error: str | None = None) -> TokenEvent:
        """The one way a sequence ends: everything it holds is released here."""
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._book.release(sequence)
        sequence.move(Status.FINISHED)
        sequence.finish_reason = reason
        group = self._group(sequence)
        group.settle(self._book)
        if all(item.status is Status.FINISHED for item in group.sequences):
            del self._groups[sequence.request.request_id]
        return TokenEvent(
            request_id=sequence.request.request_id, sample_id=sequence.sample_id, finish_reason=reason, error=error
        )

    def _group(self, sequence: Sequence) -> SampleGroup:
        return self._groups[sequence.request.request_id]

    # ---- looking in ----

    def stats(self) -> dict[str, float]:
        """Counters since the start, and gauges of now."""
        gauges: dict[str, float] = {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "longest_request": self.longest,
        }
        for group, pool in enumerate(self._book.pools):
            gauges[f"pages_used_{group}"] = pool.num_usable - pool.num_free
            gauges[f"pages_total_{group}"] = pool.num_usable
        return {**self._counts, **gauges}

    def check(self) -> None:
        """Verify refcounts, slots and queues; for tests."""
        live = [item for group in self._groups.values() for item in group.sequences]
        for g, pool in enumerate(self._book.pools):
            shared = [group.shared[g] for group in self._groups.values() if group.shared is not None]
            pool.check([item.pages[g] for item in live] + shared)
        slots = [item.slot for item in self._running]
        assert None not in slots and len(set(slots)) == len(slots)
        assert len(slots) + self._rows.num_free == self.config.max_num_seqs
        assert all(item.status is Status.RUNNING for item in self._running)
        assert all(item.status is Status.WAITING and item.slot is None for item in self._waiting)
        running = sum(item.status is Status.RUNNING for item in live)
        waiting = sum(item.status is Status.WAITING for item in live)
        assert (running, waiting) == (len(self._running), len(self._waiting))


def _logprobs_at(result: StepResult, place: int, count: int) -> TokenLogprobs:
    assert result.logprob is not None and result.rank is not None
    assert result.top_ids is not None and result.top_logprobs is not None
    ids, values = result.top_ids[place, :count].tolist(), result.top_logprobs[place, :count].tolist()
    return TokenLogprobs(
        float(np.float64(result.logprob[place])), int(result.rank[place]), tuple(zip(ids, values, strict=True))
    )
