"""Reads a step's result into sequences: tokens, log-probabilities and why a sample ends."""

import numpy as np

from xjax.request import FinishReason, TokenEvent, TokenLogprobs
from xjax.scheduler.plan import Plan, StepResult
from xjax.scheduler.sequence import Sequence


class Scores:
    """Log-probabilities of a full step by sampled position, converted once; the best `count` of each."""

    def __init__(self, result: StepResult, count: int) -> None:
        assert result.logprob is not None and result.rank is not None, "the step was not a full one"
        assert result.top_ids is not None and result.top_logprobs is not None
        self._logprobs: list[float] = result.logprob.astype(np.float64).tolist()
        self._ranks: list[int] = result.rank.tolist()
        self._top_ids: list[list[int]] = result.top_ids[:, :count].tolist()
        self._top_logprobs: list[list[float]] = result.top_logprobs[:, :count].tolist()

    def at(self, place: int, count: int) -> TokenLogprobs:
        """The position's own log-probability and rank, and its best `count`."""
        best = zip(self._top_ids[place][:count], self._top_logprobs[place][:count], strict=True)
        return TokenLogprobs(self._logprobs[place], self._ranks[place], tuple(best))


def scores_of(plan: Plan, result: StepResult) -> Scores | None:
    """The log-probabilities of a step, or None when nobody asked for any."""
    wanted = [item.request.sampling.logprobs for item in plan.sequences]
    wanted += [plan.sequences[c.row].request.sampling.prompt_logprobs for c in plan.chunks if c.num_scored]
    counts = [count for count in wanted if count is not None]
    return Scores(result, max(counts)) if plan.full and counts else None


def take_token(sequence: Sequence, token_id: int, logprobs: tuple[TokenLogprobs, ...]) -> TokenEvent:
    """Append a sampled token and tell of it; a finish reason in the event means that the sample must end."""
    request, sampling = sequence.request, sequence.request.sampling
    sequence.append(token_id)
    reason = None
    is_eos = token_id in request.eos_ids and not sampling.ignore_eos
    is_stop = is_eos or token_id in sampling.stop_token_ids
    if is_stop:
        reason = FinishReason.STOP
    elif sequence.num_output >= sequence.max_tokens:
        reason = FinishReason.LENGTH
    is_first = not sequence.has_emitted
    sequence.has_emitted = True
    scores = sequence.prompt_logprobs
    return TokenEvent(
        request_id=request.request_id,
        sample_id=sequence.sample_id,
        token_ids=(token_id,),
        logprobs=logprobs,
        finish_reason=reason,
        stop_token_id=token_id if is_stop else None,
        prompt_logprobs=tuple(scores) if is_first and scores is not None else None,
        num_cached_tokens=0 if is_first else None,
    )


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
