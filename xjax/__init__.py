"""xjax: LLM inference compiled by JAX and XLA.

These are the public names. They are looked up when first used, so that importing xjax, or a
host part of it, neither imports JAX nor reads the environment.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from xjax.engine.llm import LLM
    from xjax.engine.outputs import CompletionOutput, RequestOutput, StreamChunk
    from xjax.errors import CapacityError, EngineError, LoadError, RequestError, XjaxError
    from xjax.request import FinishReason, Request, SamplingParams, TokenEvent
    from xjax.weights.convert import convert

_HOME_BY_NAME = {
    "LLM": "xjax.engine.llm",
    "convert": "xjax.weights.convert",
    **dict.fromkeys(("CompletionOutput", "RequestOutput", "StreamChunk"), "xjax.engine.outputs"),
    **dict.fromkeys(
        ("CapacityError", "EngineError", "LoadError", "RequestError", "XjaxError"), "xjax.errors"
    ),
    **dict.fromkeys(("FinishReason", "Request", "SamplingParams", "TokenEvent"), "xjax.request"),
}

__all__ = [
    "LLM",
    "CapacityError",
    "CompletionOutput",
    "EngineError",
    "FinishReason",
    "LoadError",
    "Request",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
    "TokenEvent",
    "XjaxError",
    "__version__",
    "convert",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_BY_NAME:
        raise AttributeError(f"module 'xjax' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_BY_NAME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
