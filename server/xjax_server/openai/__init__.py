"""OpenAI's API: the wire types, the endpoints and their routes.

`routes` is what the application mounts. It knows no other API and no engine.
"""

from starlette.routing import Route

from xjax_server.openai.cache import CacheClearEndpoint, CacheStatsEndpoint
from xjax_server.openai.chat import ChatEndpoint
from xjax_server.openai.completions import CompletionEndpoint
from xjax_server.openai.models import ModelEndpoint, ModelListEndpoint
from xjax_server.openai.openapi import OpenApiEndpoint
from xjax_server.openai.tokens import TextEndpoint, detokenize, tokenize
from xjax_server.serving import Service


def routes(service: Service) -> list[Route]:
    """The routes of one service; endpoints raise XjaxError, which the application turns into replies."""
    return [
        Route("/v1/models", ModelListEndpoint(service), methods=["GET"]),
        Route("/v1/models/{id:path}", ModelEndpoint(service), methods=["GET"]),
        Route("/v1/chat/completions", ChatEndpoint(service), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(service), methods=["POST"]),
        Route("/tokenize", TextEndpoint(service, tokenize), methods=["POST"]),
        Route("/detokenize", TextEndpoint(service, detokenize), methods=["POST"]),
        Route("/v1/cache/stats", CacheStatsEndpoint(service), methods=["GET"]),
        Route("/v1/cache/clear", CacheClearEndpoint(service), methods=["POST"]),
        Route("/openapi.json", OpenApiEndpoint(), methods=["GET"]),
    ]
