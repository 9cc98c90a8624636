"""Reads a step's result into sequences: tokens, log-probabilities, hidden states, why a sample ends."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt

from xjax.request import FinishReason, TokenEvent, TokenLogprobs
from xjax.scheduler.plan import Plan, StepResult
from xjax.scheduler.sequence import Sequence, Status


class Scores:
    """Log-probabilities of a full step by sampled position, the best `count` each; made when first read."""

    def __init__(self, result: StepResult, count: int) -> None:
        assert result.scores is not None, "the step was not a full one"
        self._arrays, self._count = result.scores, count
        self._lists: tuple[list[float], list[int], list[list[int]], list[list[float]]] | None = None

    def at(self, place: int, count: int) -> TokenLogprobs:
        """The position's own log-probability and rank, and its best `count`."""
        if self._lists is None:
            arrays, most = self._arrays(), self._count
            best = arrays.top_ids[:, :most].tolist(), arrays.top_logprobs[:, :most].tolist()
            self._lists = (arrays.logprob.tolist(), arrays.rank.tolist(), *best)
        logprobs, ranks, ids, values = self._lists
        top = tuple(zip(ids[place][:count], values[place][:count]))  # noqa: B905
        return TokenLogprobs(logprobs[place], ranks[place], top)


def scores_of(plan: Plan, result: StepResult) -> Scores | None:
    """The log-probabilities of a step, or None when nobody asked for any."""
    if not plan.full:
        return None
    wanted = [item.request.sampling.logprobs for item in plan.sequences]
    wanted += [plan.sequences[c.row].request.sampling.prompt_logprobs for c in plan.chunks if c.num_scored]
    counts = [count for count in wanted if count is not None]
    return Scores(result, max(counts)) if counts else None


class StepEvents:
    """The events of a step in row order, made while they are iterated: by whoever delivers them.

    tokens     sampled token by row
    ordinary   rows with a token and nothing else to tell
    special    events that say more, by row
    """

    def __init__(self, plan: Plan, tokens: Seq[int], scores: Scores | None) -> None:
        self._sequences, self._tokens, self._scores = plan.sequences, tokens, scores
        self.ordinary: list[int] = []
        self.special: dict[int, TokenEvent] = {}

    def __bool__(self) -> bool:
        return bool(self.ordinary or self.special)

    def __iter__(self) -> Iterator[TokenEvent]:
        for row in sorted([*self.ordinary, *self.special]) if self.special else self.ordinary:
            event = self.special.get(row)
            if event is None:
                sequence = self._sequences[row]
                # By position: names would cost as much again, once for every token of every row.
                event = TokenEvent(
                    sequence.request.request_id, sequence.sample_id, (self._tokens[row],), self.logprobs(row)
                )
            yield event

    def logprobs(self, row: int) -> tuple[TokenLogprobs, ...]:
        """The row's log-probabilities, one entry or none."""
        if self._scores is None:
            return ()
        count = self._sequences[row].request.sampling.logprobs
        return () if count is None else (self._scores.at(row, count),)


def take_token(sequence: Sequence, token_id: int) -> FinishReason | None:
    """Append a sampled token; a reason that is returned means that the sample must end."""
    sequence.append(token_id)
    if token_id in sequence.stop_ids:
        return FinishReason.STOP
    if sequence.num_tokens - sequence.num_prompt >= sequence.max_tokens:
        return FinishReason.LENGTH
    return None


def special_event(
    sequence: Sequence, token_id: int, reason: FinishReason | None, logprobs: tuple[TokenLogprobs, ...]
) -> TokenEvent:
    """The event of a sample's first or last token."""
    request = sequence.request
    event = TokenEvent(
        request_id=request.request_id,
        sample_id=sequence.sample_id,
        token_ids=(token_id,),
        logprobs=logprobs,
        finish_reason=reason,
        stop_token_id=token_id if reason is FinishReason.STOP else None,
    )
    return event if sequence.num_tokens - sequence.num_prompt > 1 else _first(sequence, event)


def _first(sequence: Sequence, event: TokenEvent) -> TokenEvent:
    """The event with what the first one of a sample tells beside."""
    request = sequence.request
    scores, admitted = sequence.prompt_logprobs, sequence.admitted
    return event._replace(
        prompt_logprobs=None if scores is None else tuple(scores),
        num_cached_tokens=sequence.cache.num_cached or 0,
        queue_seconds=None if admitted is None else max(admitted - request.arrival, 0.0),
    )


class HiddenSums:
    """Hidden states added up over the chunks of prompts whose mean is wanted, while they are computed."""

    def __init__(self) -> None:
        self._sums: dict[Sequence, npt.NDArray[np.float64]] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def take(self, plan: Plan, result: StepResult) -> None:
        """Add what a step gave of each prompt."""
        assert result.pooled is not None, "the step did not pool"
        for chunk in plan.chunks:
            sequence = plan.sequences[chunk.row]
            if sequence.request.pooling == "mean" and sequence.status is not Status.FINISHED:
                part = result.pooled[chunk.row].astype(np.float64)
                # A prompt that was preempted begins anew; what it had under way is added in vain before.
                is_new = chunk.start == 0 or sequence not in self._sums
                self._sums[sequence] = part if is_new else self._sums[sequence] + part

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that ends."""
        self._sums.pop(sequence, None)

    def event(self, sequence: Sequence, last: npt.NDArray[np.float32]) -> TokenEvent | None:
        """The one event of a prompt that is computed; None when its hidden states are not finite.

        last   [E] hidden state of its last token, where that is what is asked for
        """
        values: npt.NDArray[Any] = last
        if sequence.request.pooling == "mean":
            values = self._sums[sequence] / sequence.num_prompt
        if not np.isfinite(values).all():
            return None
        event = TokenEvent(
            request_id=sequence.request.request_id,
            sample_id=sequence.sample_id,
            finish_reason=FinishReason.STOP,
            embedding=tuple(values.tolist()),
        )
        return _first(sequence, event)


def take_prompt_scores(plan: Plan, scores: Scores) -> None:
    """Store the log-probabilities of prompt tokens that a step's chunks were asked for."""
    place = plan.num_rows
    for chunk in plan.chunks:
        sequence = plan.sequences[chunk.row]
        if chunk.num_scored and sequence.prompt_logprobs is not None:
            count = sequence.request.sampling.prompt_logprobs or 0
            for offset in range(chunk.num_scored):
                sequence.prompt_logprobs[chunk.start + offset + 1] = scores.at(place + offset, count)
        place += chunk.num_scored
