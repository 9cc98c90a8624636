"""POST /v1/completions: prompts as text or token ids, continued; also scored, with echo and no new token.

    body ─ CompletionRequest ─ tokenizer ─ Job ─ Generation ─ TextWriter ─ events or one reply

The answer to sample k of prompt i has index i·n + k. It knows no engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from starlette.types import Receive, Scope, Send

from xjax.request import FinishReason, SamplingParams
from xjax.text.answer import Delta
from xjax_server.generation import Item, Prompt
from xjax_server.openai.frames import (
    Head,
    Job,
    StreamShape,
    Tally,
    event,
    ids_json,
    merge,
    quote,
    reason_json,
)
from xjax_server.openai.logprobs import Columns, TextLogprobs, prompt_logprobs
from xjax_server.openai.read import (
    check_best_of,
    check_choices,
    check_length,
    check_name,
    check_stream,
    read_request,
    sampling_of,
)
from xjax_server.openai.run import answer, new_head
from xjax_server.openai.types import CompletionRequest
from xjax_server.serving import ServedModel, Service

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API


class CompletionEndpoint:
    """ASGI endpoint of completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(self._service, scope, receive, send, prefix="cmpl", prepare=prepare)


def prepare(model: ServedModel, request_id: str, body: bytes) -> Job:
    """Do the text work of a request. Raises RequestError for what cannot be served."""
    request = read_request(CompletionRequest, body)
    name = check_name(request.model, model)
    check_stream(request)
    check_best_of(request)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    scores = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        scores = max(request.logprobs, scores or 0)
    sampling = sampling_of(
        request, model, max_tokens=max(max_tokens, 1), logprobs=request.logprobs, prompt_logprobs=scores
    )
    prompts = _prompts(request)
    check_choices(len(prompts), sampling.n)
    sources = [_encode(item, request, model) for item in prompts]
    for source in sources:
        check_length(source.ids, model, "prompt")
    writer = TextWriter(new_head(request_id, name, model), request, sources, sampling)
    return Job(
        prompts=tuple(
            Prompt(ids=source.ids, sampling=sampling, cache_salt=request.cache_salt) for source in sources
        ),
        priority=-(request.priority or 0),
        is_stream=bool(request.stream),
        writer=writer,
    )


@dataclass(frozen=True)
class Source:
    """One prompt: its ids, its text where echo needs it, and how many ids were put before the text."""

    ids: tuple[int, ...]
    text: str
    num_added: int


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [cast("list[int]", prompt)]
    return cast("list[str | list[int]]", prompt)


def _encode(prompt: str | list[int], request: CompletionRequest, model: ServedModel) -> Source:
    tokenizer = model.front.tokenizer
    if isinstance(prompt, list):
        text = tokenizer.decode(prompt, skip_special_tokens=False) if request.echo else ""
        return Source(tuple(prompt), text, 0)
    ids = encode_text(prompt, request.add_special_tokens, model)
    prefix = tokenizer.prefix
    is_added = (
        bool(prefix) and tuple(ids[: len(prefix)]) == prefix and not _begins_with(prompt, prefix, model)
    )
    return Source(tuple(ids), prompt, len(prefix) if is_added else 0)


def _begins_with(text: str, prefix: tuple[int, ...], model: ServedModel) -> bool:
    """Whether a text spells the special tokens itself that would else be put before it."""
    return text.startswith(model.front.tokenizer.token_string(prefix[0]))


def encode_text(text: str, add_special_tokens: bool | None, model: ServedModel) -> list[int]:
    """Token ids of a prompt, as `LLM.generate` makes them unless told to add nothing."""
    if add_special_tokens is False:
        return model.front.tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    return model.front.encode_prompt(text)


class TextWriter:
    """Writes the continuations of some prompts."""

    def __init__(
        self, head: Head, request: CompletionRequest, sources: Sequence[Source], sampling: SamplingParams
    ) -> None:
        self._request = request
        self._sources = sources
        self._tokenizer = head.model.front.tokenizer
        self._tally = Tally([source.ids for source in sources])
        self._shape = StreamShape.of(request.stream_options)
        self._num_samples = sampling.n
        count = len(sources) * sampling.n
        self._logprobs = (
            None
            if request.logprobs is None
            else [self._columns_of(sources[i // sampling.n], request.logprobs) for i in range(count)]
        )
        self._start = head.json("text_completion")
        self._closing = "]" + ("" if not self._shape.has_usage else ',"usage":null') + "}\n\n"
        self._is_begun = [False] * count
        self._held: list[list[Item]] = [[] for _ in sources]
        self._echoes: list[Columns | None] = [None] * len(sources)

    def _columns_of(self, source: Source, num_top: int) -> TextLogprobs:
        offset = len(source.text) if self._request.echo else 0
        shows_specials = self._request.skip_special_tokens is False
        return TextLogprobs(self._tokenizer, num_top, offset=offset, shows_specials=shows_specials)

    # ---- a stream ----

    def first(self) -> bytes:
        """Nothing: echo comes with the first tokens."""
        return b""

    def of(self, items: Sequence[Item]) -> bytes:
        """What is new of each sample, and why it ended."""
        frames: list[str] = []
        for i, delta in merge(self._after_echo(items)):
            delta = self._without_tokens(delta)
            self._tally.count(((i, delta),))
            index = i * self._num_samples + delta.sample_id
            is_empty = not (
                delta.text or (delta.token_ids and (self._logprobs or self._request.return_token_ids))
            )
            if is_empty and delta.finish_reason is None and (self._is_begun[index] or not self._request.echo):
                continue
            frames.append(f'data: {self._start},"choices":[{self._choice(i, delta)}{self._close()}')
        return "".join(frames).encode()

    def last(self) -> bytes:
        """The usage, when asked for."""
        if not self._shape.has_usage:
            return b""
        return event(f'{self._start},"choices":[],"usage":{self._tally.json()}}}').encode()

    def _close(self) -> str:
        return f'],"usage":{self._tally.json()}}}\n\n' if self._shape.has_running_usage else self._closing

    def _after_echo(self, items: Sequence[Item]) -> list[Item]:
        """Hold deltas back until the prompt's log-probabilities, which come first, are there."""
        if not self._request.echo or self._logprobs is None:
            return list(items)
        ready: list[Item] = []
        for i, delta in items:
            if delta.prompt_logprobs is not None:
                self._take_echo(i, delta)
                ready += self._held[i]
                self._held[i] = []
            if self._echoes[i] is None:
                self._held[i].append((i, delta))
            else:
                ready.append((i, delta))
        return ready

    # ---- one reply ----

    def whole(self, items: Sequence[Item]) -> bytes:
        """All of it at once."""
        merged = sorted(merge(items), key=lambda item: (item[0], item[1].sample_id))
        merged = [(i, self._without_tokens(delta)) for i, delta in merged]
        self._tally.count(merged)
        scores = {i: delta.prompt_logprobs for i, delta in merged if delta.prompt_logprobs is not None}
        for i, delta in merged:
            if delta.prompt_logprobs is not None:
                self._take_echo(i, delta)
        choices: list[str] = []
        for i, delta in merged:
            choice = self._choice(i, delta)
            num_top = self._request.prompt_logprobs
            if num_top is not None and i in scores:
                written = prompt_logprobs(self._sources[i].ids, scores[i], num_top, self._tokenizer)
                choice = f'{choice[:-1]},"prompt_logprobs":{written}}}'
            choices.append(choice)
        return f'{self._start},"choices":[{",".join(choices)}],"usage":{self._tally.json()}}}'.encode()

    # ---- parts of both ----

    def _choice(self, i: int, delta: Delta) -> str:
        index = i * self._num_samples + delta.sample_id
        is_first, self._is_begun[index] = not self._is_begun[index], True
        text, columns, ids = delta.text, None, ""
        if self._logprobs is not None:
            columns = self._logprobs[index].write(delta.token_ids, delta.logprobs)
        if is_first and self._request.echo:
            text = self._sources[i].text + text
            echo = self._echoes[i]
            columns = columns if columns is None or echo is None else echo + columns
        if self._request.return_token_ids:
            ids = f',"token_ids":{ids_json(delta.token_ids)}'
            if is_first:
                ids += f',"prompt_token_ids":{ids_json(self._sources[i].ids)}'
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        logprobs = "null" if columns is None else columns.json()
        return (
            f'{{"index":{index},"text":{quote(text)},"logprobs":{logprobs},'
            f'"finish_reason":{reason},"stop_reason":{reason_json(delta.stop_reason)}{ids}}}'
        )

    def _without_tokens(self, delta: Delta) -> Delta:
        """With max_tokens 0 the engine's one token counts for nothing."""
        if self._request.max_tokens != 0:
            return delta
        kept = replace(delta, text="", token_ids=(), logprobs=(), stop_reason=None)
        return kept if delta.finish_reason is None else replace(kept, finish_reason=FinishReason.LENGTH)

    def _take_echo(self, i: int, delta: Delta) -> None:
        assert delta.prompt_logprobs is not None
        if self._request.echo and self._request.logprobs is not None:
            source = self._sources[i]
            writer = TextLogprobs(self._tokenizer, self._request.logprobs, silent=source.num_added)
            self._echoes[i] = writer.write(source.ids, delta.prompt_logprobs)
