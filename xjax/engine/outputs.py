"""What `LLM` returns: results shaped as users of such engines know them, folded from deltas."""

import time
from dataclasses import dataclass, field

from xjax.errors import EngineError, RequestError, XjaxError
from xjax.request import FinishReason, Request, TokenLogprobs
from xjax.text.answer import Delta
from xjax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token at one position; `rank` counts from 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]  # by token id


@dataclass
class CompletionOutput:
    """One sample.

    finish_reason   "stop", "length", "abort" or "error"
    stop_reason     the stop string or token id that ended it; None for an end-of-sequence token
    logprobs        for each token, by token id: the token's own and the best that were asked for
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestMetrics:
    """Seconds from submission: to the first token, to the last; and tokens made by all samples."""

    first_token_seconds: float | None = None
    total_seconds: float = 0.0
    num_output_tokens: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens after the first per second of decoding; None with fewer than two."""
        if self.first_token_seconds is None or self.num_output_tokens < 2:
            return None
        decoding = self.total_seconds - self.first_token_seconds
        return (self.num_output_tokens - 1) / decoding if decoding > 0 else None


@dataclass
class RequestOutput:
    """Everything about one prompt, or `error` in its place."""

    request_id: str
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: XjaxError | None = None
    finished: bool = False


@dataclass(frozen=True, kw_only=True)
class StreamChunk:
    """A piece of one sample as it is made; texts, ids and logprobs are to be appended."""

    sample_id: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class ResultBuilder:
    """Folds the deltas of one request into a RequestOutput."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self._began = time.perf_counter()
        self._tokenizer = tokenizer
        has_logprobs = request.sampling.logprobs is not None
        self.result = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=list(request.prompt_ids),
            outputs=[
                CompletionOutput(
                    index=i, logprobs=[] if has_logprobs else None, cumulative_logprob=0.0 if has_logprobs else None
                )
                for i in range(request.sampling.n)
            ],
        )
        self._num_open = request.sampling.n
        self._prompt_ids = request.prompt_ids

    def add(self, delta: Delta) -> bool:
        """Take one delta in; True when it was the last."""
        result, output = self.result, self.result.outputs[delta.sample_id]
        now = time.perf_counter() - self._began
        if delta.token_ids and result.metrics.first_token_seconds is None:
            result.metrics.first_token_seconds = now
        result.metrics.num_output_tokens += len(delta.token_ids)
        output.text += delta.text
        output.token_ids.extend(delta.token_ids)
        if output.logprobs is not None and output.cumulative_logprob is not None:
            output.logprobs.extend(positions(delta.token_ids, delta.logprobs, self._tokenizer))
            output.cumulative_logprob += sum(item.logprob for item in delta.logprobs)
        if delta.prompt_logprobs is not None:
            result.prompt_logprobs = [None, *positions(self._prompt_ids[1:], delta.prompt_logprobs[1:], self._tokenizer)]
        if delta.num_cached_tokens:
            result.num_cached_tokens = max(result.num_cached_tokens, delta.num_cached_tokens)
        if delta.finish_reason is None:
            return False
        output.finish_reason, output.stop_reason = str(delta.finish_reason), delta.stop_reason
        if delta.finish_reason is FinishReason.ERROR:
            result.error = EngineError(delta.error or "the request failed")
        result.metrics.total_seconds = now
        self._num_open -= 1
        result.finished = self._num_open == 0
        return result.finished


def positions(
    token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs | None, ...], tokenizer: Tokenizer | None
) -> list[PositionLogprobs]:
    """One dictionary a position: the token's own log-probability and the best ones."""
    found = []
    for token_id, item in zip(token_ids, logprobs, strict=False):
        assert item is not None
        entry = {top_id: Logprob(value, i + 1, _decoded(tokenizer, top_id)) for i, (top_id, value) in enumerate(item.top)}
        entry[token_id] = Logprob(item.logprob, item.rank, _decoded(tokenizer, token_id))
        found.append(entry)
    return found


def _decoded(tokenizer: Tokenizer | None, token_id: int) -> str | None:
    return None if tokenizer is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def failed(request_id: str, prompt: str | None, error: XjaxError) -> RequestOutput:
    """The result of a prompt that was never run."""
    assert isinstance(error, RequestError | XjaxError)
    return RequestOutput(request_id=request_id, prompt=prompt, error=error, finished=True)
