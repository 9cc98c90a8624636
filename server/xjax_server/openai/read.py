"""From the bytes of a body to a checked request, the served model it means and its sampling.

    bytes ─ JSON and types (pydantic) ─ fields that are refused ─ the model's name ─ SamplingParams

Only cheap checks; templates and tokenizing come after them. It knows no reply.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from xjax.errors import RequestError
from xjax.request import SamplingParams
from xjax_server.errors import from_pydantic
from xjax_server.openai.types import MAX_CHOICES, CompletionRequest, Refused, SamplingFields
from xjax_server.serving import ServedModel

R = TypeVar("R", bound=BaseModel)

# Fields that mean in SamplingParams what they mean in a request.
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
    "min_tokens", "prompt_logprobs", "n",
)  # fmt: skip


def read_request(kind: type[R], body: bytes) -> R:
    """Parse and check a body. Raises RequestError naming the field, or saying what is wrong with the JSON."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _unreadable(error) from error
    for name, mark in refused_fields(kind).items():
        if not mark.is_harmless(getattr(request, name)):
            raise unsupported(name, mark.why)
    return request


@cache
def refused_fields(kind: type[BaseModel]) -> dict[str, Refused]:
    """The fields of a model that are refused, and why."""
    return {
        name: mark
        for name, item in kind.model_fields.items()
        for mark in item.metadata
        if isinstance(mark, Refused)
    }


def unsupported(name: str, why: str) -> RequestError:
    """The error of a field that is not built, and would change the answer."""
    return RequestError(f"{name}: not supported: {why}", code="unsupported_parameter", param=name)


def _unreadable(error: ValidationError) -> RequestError:
    errors = error.errors(include_url=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        reason = errors[0]["msg"].removeprefix("Invalid JSON: ")
        return RequestError(f"the body is not valid JSON: {reason}", code="invalid_json")
    return from_pydantic([dict(item) for item in errors])


def check_name(name: str | None, model: ServedModel) -> str:
    """Return the name to answer with. Raises RequestError (404) for one that is not served."""
    if not name:
        return model.names[0]
    if name not in model.names:
        raise model_not_found(name, model)
    return name


def model_not_found(name: str, model: ServedModel) -> RequestError:
    """The error of a name that is not served."""
    shown = name if len(name) <= 100 else name[:100] + "…"
    served = ", ".join(model.names)
    return RequestError(
        f"the model {shown!r} does not exist; served here: {served}", code="model_not_found", param="model"
    )


def sampling_of(request: SamplingFields, model: ServedModel, **changes: Any) -> SamplingParams:
    """What the model recommends, then what the request says, then `changes`, unless they are None."""
    fields: dict[str, Any] = dict(model.defaults)
    for name in _SAME:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if request.logit_bias:
        fields["logit_bias"] = {int(key): value for key, value in request.logit_bias.items()}
    fields |= {name: value for name, value in changes.items() if value is not None}
    return SamplingParams(**fields)


def check_stream(request: SamplingFields) -> None:
    """Raise RequestError for options that contradict `stream`."""
    if request.stream:
        if request.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs", "a stream has no place for them")
    elif request.stream_options is not None:
        raise RequestError("stream_options: only allowed with stream", param="stream_options")


def check_best_of(request: CompletionRequest) -> None:
    """Raise RequestError for more samples than answers."""
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "every sample is an answer; leave it out or give n the same value")


def check_choices(num_prompts: int, n: int) -> None:
    """Raise RequestError for more answers than one request may have."""
    if num_prompts * n > MAX_CHOICES:
        raise RequestError(
            f"n: {num_prompts} prompts with {n} answers each are more than {MAX_CHOICES} choices", param="n"
        )


def check_length(ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Raise RequestError for a prompt that leaves no room for an answer, or is none."""
    if not ids:
        raise RequestError(f"{param}: there is no token in it", code="empty_prompt", param=param)
    if len(ids) >= model.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {model.max_model_len} tokens, one of them at least for "
            f"the answer. However, {param} came to {len(ids)} tokens. Please shorten it.",
            code="context_length_exceeded",
            param=param,
        )
