"""What `LLM` returns: results shaped as users of such engines know them, folded from deltas.

events --Answer--> deltas --ResultBuilder--> RequestOutput, all of a call in one Batch
       --vector_sink----------------------> vectors, all of a call in one Batch
                          --Stream---------> StreamChunk, one after the other
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from xjax.backend import Backend, EventSink
from xjax.errors import EngineError, XjaxError
from xjax.request import FinishReason, Request, TokenEvent, TokenLogprobs
from xjax.text.answer import Answer, Delta
from xjax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token at one position; `rank` counts from 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Result = TypeVar("Result")
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
                    index=i,
                    logprobs=[] if has_logprobs else None,
                    cumulative_logprob=0.0 if has_logprobs else None,
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
            result.prompt_logprobs = [
                None,
                *positions(self._prompt_ids[1:], delta.prompt_logprobs[1:], self._tokenizer),
            ]
        if delta.num_cached_tokens and delta.sample_id == 0:  # others find what it has computed
            result.num_cached_tokens = delta.num_cached_tokens
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
        entry = {
            top_id: Logprob(value, i + 1, _decoded(tokenizer, top_id))
            for i, (top_id, value) in enumerate(item.top)
        }
        entry[token_id] = Logprob(item.logprob, item.rank, _decoded(tokenizer, token_id))
        found.append(entry)
    return found


def _decoded(tokenizer: Tokenizer | None, token_id: int) -> str | None:
    return None if tokenizer is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def failed(request_id: str, prompt: str | None, error: XjaxError) -> RequestOutput:
    """The result of a prompt that was never run."""
    return RequestOutput(request_id=request_id, prompt=prompt, error=error, finished=True)


class Batch(Generic[Result]):
    """The results of one call of `LLM`, filled in on the output thread while the caller waits.

    on_result   called with index and result as each is complete; what it raises ends the wait
    """

    def __init__(self, size: int, on_result: Callable[[int, Result], None] | None) -> None:
        self._results: list[Result | None] = [None] * size
        self._on_result = on_result
        self._num_open = size
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._progress = threading.Condition()

    def settle(self, i: int, result: Result) -> None:
        """Store a result and report it; all but the first for an index are ignored."""
        with self._lock:
            if self._results[i] is not None or self._error is not None:
                return
            self._results[i] = result
        try:
            if self._on_result is not None:
                self._on_result(i, result)
        except BaseException as error:
            self.stop(error)
            raise
        with self._progress:
            self._num_open -= 1
            self._progress.notify_all()

    def stop(self, error: BaseException) -> None:
        """Take no further results; whoever waits gets the error."""
        with self._lock:
            self._error = self._error or error
        with self._progress:
            self._progress.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait a little, or until something is complete. Raises what ended the wait for all of them."""
        with self._progress:
            if self._error is None:
                self._progress.wait(seconds)
        if self._error is not None:
            raise self._error

    def wait(self) -> list[Result]:
        """Wait for all results; they come in order. Raises what `on_result` raised."""
        with self._progress:
            while self._num_open and self._error is None:
                self._progress.wait(1.0)  # woken now and then so that Ctrl-C is heard
        if self._error is not None:
            raise self._error
        return [result for result in self._results if result is not None]


def guarded(
    batch: Batch[RequestOutput], i: int, answer: Callable[[TokenEvent], None], request: Request
) -> EventSink:
    """Guard the sink of a request: what it raises becomes the request's result."""

    def receive(event: TokenEvent) -> None:
        try:
            answer(event)
        except Exception as error:
            line = f"the answer could not be made into text: {type(error).__name__}: {error}"
            batch.settle(i, failed(request.request_id, None, EngineError(line)))
            raise

    return receive


Vector = tuple[float, ...]


def vector_sink(batch: Batch[Vector], i: int) -> EventSink:
    """The sink of a request that pools its hidden states; an error ends the batch."""

    def receive(event: TokenEvent) -> None:
        if event.embedding is not None:
            batch.settle(i, event.embedding)
        else:
            batch.stop(EngineError(event.error or "the request was aborted"))

    return receive


def as_array(vectors: Sequence[Vector], dimensions: int, *, normalize: bool) -> npt.NDArray[np.float32]:
    """The first numbers of vectors as [n, dimensions] float32, each divided by its length where wanted."""
    found = np.array([vector[:dimensions] for vector in vectors], np.float64).reshape(-1, dimensions)
    if normalize:
        found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-30)
    return found.astype(np.float32)


class Stream(Iterator[StreamChunk]):
    """The pieces of one answer as they are made. Closing it, or dropping it, aborts the request."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, backend: Backend) -> None:
        self._request, self._tokenizer, self._backend = request, tokenizer, backend
        self._deltas: SimpleQueue[Delta | Exception] = SimpleQueue()
        self._num_open = request.sampling.n
        self._num_cached = 0
        # The sink must not hold this object, or dropping it would never be seen.
        backend.submit(request, _queued(request, tokenizer, backend, self._deltas))

    def __next__(self) -> StreamChunk:
        if not self._num_open:
            raise StopIteration
        delta = self._deltas.get()
        if isinstance(delta, Exception):
            self.close()
            raise EngineError(f"the answer could not be made into text: {delta}") from delta
        if delta.finish_reason is FinishReason.ERROR:
            self.close()
            raise EngineError(delta.error or "the request failed")
        if delta.num_cached_tokens and delta.sample_id == 0:  # others find what it has computed
            self._num_cached = delta.num_cached_tokens
        self._num_open -= delta.finish_reason is not None
        return StreamChunk(
            sample_id=delta.sample_id,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=tuple(positions(delta.token_ids, delta.logprobs, self._tokenizer)),
            finish_reason=None if delta.finish_reason is None else str(delta.finish_reason),
            stop_reason=delta.stop_reason,
            num_prompt_tokens=len(self._request.prompt_ids),
            num_cached_tokens=self._num_cached,
        )

    def close(self) -> None:
        """Stop; the iterator is at its end then."""
        if self._num_open:
            self._num_open = 0
            self._backend.abort(self._request.request_id)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_num_open", 0):
            self.close()


def _queued(
    request: Request, tokenizer: Tokenizer | None, backend: Backend, deltas: SimpleQueue[Delta | Exception]
) -> EventSink:
    answer = Answer(request, tokenizer, backend, deltas.put)

    def receive(event: TokenEvent) -> None:
        try:
            answer(event)
        except Exception as error:
            deltas.put(error)
            raise

    return receive
