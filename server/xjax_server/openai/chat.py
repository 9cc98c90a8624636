"""POST /v1/chat/completions: messages through the model's template, answers as messages.

    body ─ ChatRequest ─ template and tokenizer ─ Job ─ Generation ─ ChatWriter ─ events or one reply

It knows no engine; what runs is the generation's business.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from xjax.errors import RequestError
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
from xjax_server.openai.logprobs import ChatLogprobs, prompt_logprobs
from xjax_server.openai.read import (
    check_length,
    check_name,
    check_stream,
    read_request,
    sampling_of,
    unsupported,
)
from xjax_server.openai.run import answer, new_head
from xjax_server.openai.types import ChatRequest, Message, TokenizeRequest
from xjax_server.serving import ServedModel, Service

# Arguments of the template that have fields of their own, or none.
_FIXED = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")


class ChatEndpoint:
    """ASGI endpoint of chat completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(self._service, scope, receive, send, prefix="chatcmpl", prepare=prepare)


def prepare(model: ServedModel, request_id: str, body: bytes) -> Job:
    """Do the text work of a request. Raises RequestError for what cannot be served."""
    request = read_request(ChatRequest, body)
    name = check_name(request.model, model)
    check_stream(request)
    num_top = _check_logprobs(request)
    if request.tools and request.tool_choice != "none":
        raise unsupported("tools", 'calls are not read from answers yet; send tool_choice "none" or no tools')
    sampling = sampling_of(
        request, model, max_tokens=request.max_completion_tokens or request.max_tokens, logprobs=num_top
    )
    extra = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
    ids = encode_messages(model, request, request.messages, extra)
    check_length(ids, model, "messages")
    prompt = Prompt(ids=tuple(ids), sampling=sampling, cache_salt=request.cache_salt)
    writer = ChatWriter(new_head(request_id, name, model), request, prompt, num_top)
    return Job(
        prompts=(prompt,),
        priority=-(request.priority or 0),
        is_stream=bool(request.stream),
        writer=writer,
    )


def encode_messages(
    model: ServedModel,
    request: ChatRequest | TokenizeRequest,
    messages: Sequence[Message],
    extra: Mapping[str, Any],
) -> list[int]:
    """Token ids of a conversation, as `LLM.chat` makes them; `extra` are arguments besides the request's."""
    kwargs = {**extra, **(request.chat_template_kwargs or {})}
    for name in _FIXED:
        if name in (request.chat_template_kwargs or {}):
            raise RequestError(
                f"chat_template_kwargs: {name} cannot be set here", param=f"chat_template_kwargs.{name}"
            )
    if request.add_generation_prompt is not None:
        kwargs["add_generation_prompt"] = request.add_generation_prompt
    if request.continue_final_message:
        kwargs["continue_final_message"] = True
    return model.front.encode_chat([message.as_given() for message in messages], **kwargs)


def _check_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise RequestError("top_logprobs: only allowed with logprobs", param="top_logprobs")
    return None


class ChatWriter:
    """Writes the answers to one conversation.

    num_top   best tokens to show with each; None for no log-probabilities
    """

    def __init__(self, head: Head, request: ChatRequest, prompt: Prompt, num_top: int | None) -> None:
        self._head = head
        self._prompt = prompt
        self._tally = Tally([prompt.ids])
        self._num_prompt_top = request.prompt_logprobs
        self._has_ids = bool(request.return_token_ids)
        self._shape = StreamShape.of(request.stream_options)
        self._tokenizer = head.model.front.tokenizer
        self._logprobs = (
            None
            if num_top is None
            else [ChatLogprobs(self._tokenizer, num_top) for _ in range(prompt.sampling.n)]
        )
        start = head.json("chat.completion.chunk")
        self._opening = [f'data: {start},"choices":[{{"index":{i},"delta":' for i in range(prompt.sampling.n)]
        self._closing = "]" + ("" if not self._shape.has_usage else ',"usage":null') + "}\n\n"

    # ---- a stream ----

    def first(self) -> bytes:
        """The roles."""
        role = '{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
        frames = [opening + role + self._close() for opening in self._opening]
        if self._has_ids:
            prompt = f',"prompt_token_ids":{ids_json(self._prompt.ids)}}}\n\n'
            frames[0] = frames[0].removesuffix("}\n\n") + prompt
        return "".join(frames).encode()

    def of(self, items: Sequence[Item]) -> bytes:
        """What is new of each sample, and why it ended."""
        frames: list[str] = []
        for item in merge(items):
            self._tally.count((item,))
            delta = item[1]
            logprobs = self._logprobs_json(delta)
            ids = self._ids_json(delta)
            opening = self._opening[delta.sample_id]
            if delta.text or (delta.token_ids and (ids or self._logprobs is not None)):
                content = (
                    f'{{"content":{quote(delta.text)}}},"logprobs":{logprobs},"finish_reason":null{ids}}}'
                )
                frames.append(opening + content + self._close())
            if delta.finish_reason is not None:
                frames.append(f'{opening}{{}},"logprobs":null,{_ending(delta)}}}{self._close()}')
        return "".join(frames).encode()

    def last(self) -> bytes:
        """The usage, when asked for."""
        if not self._shape.has_usage:
            return b""
        start = self._head.json("chat.completion.chunk")
        return event(f'{start},"choices":[],"usage":{self._tally.json()}}}').encode()

    def _close(self) -> str:
        return f'],"usage":{self._tally.json()}}}\n\n' if self._shape.has_running_usage else self._closing

    # ---- one reply ----

    def whole(self, items: Sequence[Item]) -> bytes:
        """All of it at once."""
        merged = sorted(merge(items), key=lambda item: item[1].sample_id)
        self._tally.count(merged)
        choices = ",".join(self._choice(delta) for _, delta in merged)
        text = f'{self._head.json("chat.completion")},"choices":[{choices}],"usage":{self._tally.json()}'
        scores = merged[0][1].prompt_logprobs
        if self._num_prompt_top is not None and scores is not None:
            written = prompt_logprobs(self._prompt.ids, scores, self._num_prompt_top, self._tokenizer)
            text += f',"prompt_logprobs":{written}'
        if self._has_ids:
            text += f',"prompt_token_ids":{ids_json(self._prompt.ids)}'
        return (text + "}").encode()

    def _choice(self, delta: Delta) -> str:
        message = f'{{"role":"assistant","content":{quote(delta.text)},"refusal":null}}'
        return (
            f'{{"index":{delta.sample_id},"message":{message},"logprobs":{self._logprobs_json(delta)},'
            f"{_ending(delta)}{self._ids_json(delta)}}}"
        )

    # ---- parts of both ----

    def _logprobs_json(self, delta: Delta) -> str:
        if self._logprobs is None:
            return "null"
        return self._logprobs[delta.sample_id].write(delta.token_ids, delta.logprobs)

    def _ids_json(self, delta: Delta) -> str:
        return f',"token_ids":{ids_json(delta.token_ids)}' if self._has_ids else ""


def _ending(delta: Delta) -> str:
    return f'"finish_reason":"{delta.finish_reason}","stop_reason":{reason_json(delta.stop_reason)}'
