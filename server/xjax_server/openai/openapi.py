"""GET /openapi.json: the document of the OpenAI endpoints, made from the wire types."""

import json
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.types import Receive, Scope, Send

import xjax
from xjax_server.openai.replies import (
    CacheCleared,
    CacheStats,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ErrorReply,
    Model,
    ModelList,
    Text,
    Tokens,
)
from xjax_server.openai.types import (
    CacheClearRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from xjax_server.sse import respond_json

Shape = type[BaseModel]
# path, method: (what it does, body, reply, event of a stream)
OPERATIONS: dict[tuple[str, str], tuple[str, Shape | None, Shape, Shape | None]] = {
    ("/v1/models", "get"): ("List the served names", None, ModelList, None),
    ("/v1/models/{id}", "get"): ("Describe a served name", None, Model, None),
    ("/v1/chat/completions", "post"): (
        "Answer a conversation", ChatRequest, ChatCompletion, ChatCompletionChunk,
    ),
    ("/v1/completions", "post"): ("Continue prompts", CompletionRequest, Completion, Completion),
    ("/tokenize", "post"): ("Turn text or messages into token ids", TokenizeRequest, Tokens, None),
    ("/detokenize", "post"): ("Turn token ids into text", DetokenizeRequest, Text, None),
    ("/v1/cache/stats", "get"): ("Tell what the prefix cache did and holds", None, CacheStats, None),
    ("/v1/cache/clear", "post"): ("Empty the prefix cache", CacheClearRequest, CacheCleared, None),
}  # fmt: skip
ERRORS = {
    "400": "the request cannot be served as it is",
    "401": "no key, or a wrong one",
    "403": "the cache's endpoints without keys: not from this machine",
    "404": "no such model",
    "408": "the body came too slowly",
    "413": "the body is too large",
    "415": "the body is no JSON by its media type",
    "429": "the queue is full; see Retry-After",
    "500": "the engine failed",
    "503": "the model loads, the server stops, or the engine has failed; see Retry-After",
}

_ALWAYS = ("401", "403", "404", "503")  # whether there is a body or not


class OpenApiEndpoint:
    """ASGI endpoint of the document."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond_json(send, _written())


@cache
def _written() -> bytes:
    return json.dumps(document()).encode()


def document() -> dict[str, Any]:
    """The document as OpenAPI 3.1 has it."""
    shapes = [shape for _, *kinds in OPERATIONS.values() for shape in kinds if shape is not None]
    listed = [(shape, "validation") for shape in dict.fromkeys([*shapes, ErrorReply])]
    _, schemas = models_json_schema(listed, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for (path, method), (summary, body, reply, chunk) in OPERATIONS.items():
        paths.setdefault(path, {})[method] = _operation(path, summary, body, reply, chunk)
    return {
        "openapi": "3.1.0",
        "info": {"title": "xjax", "version": xjax.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(
    path: str, summary: str, body: Shape | None, reply: Shape, chunk: Shape | None
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(reply)}}
    if chunk is not None:
        note = f"events whose data is a {chunk.__name__}, then [DONE]"
        content["text/event-stream"] = {"schema": {"description": note}}
    errors = {
        status: {"description": text, "content": {"application/json": {"schema": _ref(ErrorReply)}}}
        for status, text in ERRORS.items()
        if (status in _ALWAYS or body is not None) and (status != "403" or path.startswith("/v1/cache/"))
    }
    found: dict[str, Any] = {
        "summary": summary,
        "operationId": f"{path.strip('/').replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {"200": {"description": "the reply", "content": content}, **errors},
    }
    if body is not None:
        is_required = body is not CacheClearRequest
        content = {"application/json": {"schema": _ref(body)}}
        found["requestBody"] = {"required": is_required, "content": content}
    if "{id}" in path:
        found["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return found


def _ref(shape: Shape) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{shape.__name__}"}
