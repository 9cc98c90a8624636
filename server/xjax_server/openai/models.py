"""GET /v1/models and /v1/models/{id}: the served names, all of one model."""

import json
from typing import Any

from starlette.types import Receive, Scope, Send

from xjax_server.openai.read import model_not_found
from xjax_server.serving import ServedModel, Service
from xjax_server.sse import respond_json


class ModelListEndpoint:
    """ASGI endpoint of the list."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._service.model
        data = [describe(name, model) for name in model.names]
        await respond_json(send, json.dumps({"object": "list", "data": data}).encode())


class ModelEndpoint:
    """ASGI endpoint of one name. Raises RequestError (404) for one that is not served."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model, name = self._service.model, scope["path_params"]["id"]
        if name not in model.names:
            raise model_not_found(name, model)
        await respond_json(send, json.dumps(describe(name, model)).encode())


def describe(name: str, model: ServedModel) -> dict[str, Any]:
    """A served name as OpenAI's model object, with what users of vLLM look for."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "xjax",
        "root": model.names[0],
        "parent": None,
        "max_model_len": model.max_model_len,
    }
