"""From token events to text: one `Answer` per request, fed on the backend's output thread.

    TokenEvent --detokenize, match stops--> Delta --> whoever asked

It decides `stop` on text and tells the backend where. The LLM class and the server use the same
one, so both see the same text. Knows no engine and no wire format.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xjax.backend import Backend
from xjax.request import FinishReason, Request, TokenEvent, TokenLogprobs
from xjax.text.output import OutputStream
from xjax.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What is new of one sample.

    text, token_ids, logprobs   to be appended to what came before
    finish_reason               set on the sample's last delta
    stop_reason                 the stop string or token id that ended it, if one did
    """

    sample_id: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int | None = None
    queue_seconds: float | None = None
    error: str | None = None
    error_code: str | None = None


@dataclass
class _Sample:
    stream: OutputStream | None
    num_tokens: int = 0
    is_done: bool = False


class Answer:
    """The samples of one request as text. Call it with each event; it calls `on_delta`.

    tokenizer   None for token ids alone
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        backend: Backend,
        on_delta: Callable[[Delta], None],
    ) -> None:
        self.request = request
        self._backend = backend
        self._on_delta = on_delta
        sampling = request.sampling
        self._samples = [
            _Sample(
                None
                if tokenizer is None
                else OutputStream(
                    tokenizer,
                    stop=sampling.stop,
                    include_stop=sampling.include_stop_str_in_output,
                    skip_special_tokens=sampling.skip_special_tokens,
                    min_tokens=sampling.min_tokens,
                )
            )
            for _ in range(sampling.n)
        ]

    @property
    def is_done(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.is_done for sample in self._samples)

    def __call__(self, event: TokenEvent) -> None:
        """Take one event in."""
        sample = self._samples[event.sample_id]
        if sample.is_done:
            return  # ended by its text; what the engine had under way does not count
        token_ids = event.token_ids
        spoken: Sequence[int] = token_ids
        keeps_stop = self.request.sampling.include_stop_str_in_output
        if event.stop_token_id is not None and not keeps_stop:
            spoken = token_ids[:-1]
        text = ""
        if sample.stream is not None:
            text = sample.stream.push(spoken)
            if sample.stream.stopped is not None:
                self._stop(sample, event, text)
                return
            if event.finish_reason is not None:
                text += sample.stream.flush()
                if sample.stream.stopped is not None:
                    self._stop(sample, event, text)
                    return
        sample.num_tokens += len(token_ids)
        sample.is_done = event.finish_reason is not None
        self._on_delta(
            Delta(
                sample_id=event.sample_id,
                text=text,
                token_ids=token_ids,
                logprobs=event.logprobs,
                finish_reason=event.finish_reason,
                stop_reason=None if self._is_eos(event.stop_token_id) else event.stop_token_id,
                prompt_logprobs=event.prompt_logprobs,
                num_cached_tokens=event.num_cached_tokens,
                queue_seconds=event.queue_seconds,
                error=event.error,
                error_code=event.error_code,
            )
        )

    def _is_eos(self, token_id: int | None) -> bool:
        return token_id in self.request.eos_ids and not self.request.sampling.ignore_eos

    def _stop(self, sample: _Sample, event: TokenEvent, text: str) -> None:
        assert sample.stream is not None
        count = sample.stream.stop_token_count
        new = max(count - sample.num_tokens, 0)
        sample.num_tokens, sample.is_done = count, True
        if event.finish_reason is None:
            self._backend.finish(event.request_id, event.sample_id, count)
        self._on_delta(
            Delta(
                sample_id=event.sample_id,
                text=text,
                token_ids=event.token_ids[:new],
                logprobs=event.logprobs[:new],
                finish_reason=FinishReason.STOP,
                stop_reason=sample.stream.stopped,
                prompt_logprobs=event.prompt_logprobs,
                num_cached_tokens=event.num_cached_tokens,
                queue_seconds=event.queue_seconds,
            )
        )
