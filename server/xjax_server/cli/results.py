"""A finished request as JSON, for `--json` and for the lines of `--output`."""

import dataclasses
from typing import Any

import xjax
from xjax.errors import RequestError, XjaxError


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def error_object(error: XjaxError) -> dict[str, Any]:
    """Message, kind and, of a request's own fault, code and field."""
    found: dict[str, Any] = {"message": str(error), "type": type(error).__name__}
    if isinstance(error, RequestError):
        found |= {"code": error.code, "param": error.param}
    return found


def result_object(result: "xjax.RequestOutput") -> dict[str, Any]:
    """Answers and token counts, or the error in their place."""
    if result.error is not None:
        return {"error": error_object(result.error)}
    outputs = [
        {
            "index": output.index,
            "text": output.text,
            "token_ids": list(output.token_ids),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "cumulative_logprob": output.cumulative_logprob,
            "logprobs": _plain(output.logprobs),
        }
        for output in result.outputs
    ]
    usage = {
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.num_cached_tokens,
        "completion_tokens": sum(len(output.token_ids) for output in result.outputs),
    }
    metrics = {
        "first_token_seconds": result.metrics.first_token_seconds,
        "total_seconds": result.metrics.total_seconds,
        "tokens_per_second": result.metrics.tokens_per_second,
    }
    found: dict[str, Any] = {"outputs": outputs, "usage": usage, "metrics": metrics}
    if result.prompt_logprobs is not None:
        found["prompt_logprobs"] = _plain(result.prompt_logprobs)
    return found
