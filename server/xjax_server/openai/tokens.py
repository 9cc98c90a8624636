"""POST /tokenize and /detokenize: text or messages to ids as the other endpoints make them, and back."""

from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from xjax.errors import RequestError
from xjax_server.limits import read_body
from xjax_server.openai.chat import encode_messages
from xjax_server.openai.completions import encode_text
from xjax_server.openai.frames import ids_json, quote
from xjax_server.openai.read import check_name, read_request
from xjax_server.openai.types import DetokenizeRequest, TokenizeRequest
from xjax_server.serving import ServedModel, Service
from xjax_server.sse import respond_json, until_disconnect


class TextEndpoint:
    """ASGI endpoint of work on text alone: `function` makes a reply of a body, off the loop."""

    def __init__(self, service: Service, function: Callable[[ServedModel, bytes], bytes]) -> None:
        self._service = service
        self._function = function

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._service.limits)

        async def work() -> None:
            data = await self._service.in_thread(self._function, self._service.model, body)
            await respond_json(send, data)

        await until_disconnect(receive, work())


def tokenize(model: ServedModel, body: bytes) -> bytes:
    """Reply of /tokenize. Raises RequestError for what cannot be encoded."""
    request = read_request(TokenizeRequest, body)
    check_name(request.model, model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("prompt: give either prompt or messages", param="prompt")
    if request.messages is not None:
        ids = encode_messages(model, request, request.messages, {"tools": request.tools})
    else:
        ids = encode_text(request.prompt or "", request.add_special_tokens, model)
    strings = "null"
    if request.return_token_strs:
        strings = "[" + ",".join(quote(model.front.tokenizer.token_string(i)) for i in ids) + "]"
    return (
        f'{{"count":{len(ids)},"max_model_len":{model.max_model_len},'
        f'"tokens":{ids_json(ids)},"token_strs":{strings}}}'
    ).encode()


def detokenize(model: ServedModel, body: bytes) -> bytes:
    """Reply of /detokenize. Raises RequestError for ids that the vocabulary does not have."""
    request = read_request(DetokenizeRequest, body)
    check_name(request.model, model)
    tokenizer = model.front.tokenizer
    unknown = next((i for i in request.tokens if i >= tokenizer.vocab_size), None)
    if unknown is not None:
        last = tokenizer.vocab_size - 1
        raise RequestError(f"tokens: ids must lie in 0..{last}; found {unknown}", param="tokens")
    text = tokenizer.decode(request.tokens, skip_special_tokens=False)
    return f'{{"prompt":{quote(text)}}}'.encode()
