"""The messages of a chat, checked and brought into the one form that templates are given.

Roles are strings, contents are strings (text parts are joined by a line break), arguments of
tool calls are objects. Everything else a message carries is kept. Knows no template and no tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from xjax.errors import RequestError

_TEXT_PARTS = ("text", "input_text", "output_text")
Message = dict[str, Any]


def check_unicode(text: str, param: str | None = None) -> None:
    """Raise RequestError for half a surrogate pair, which no tokenizer can encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds a lone surrogate at character {error.start}; send valid Unicode", param=param
        ) from error


def check_messages(messages: object) -> list[Message]:
    """Return the messages in template form; RequestError(param="messages") for what is none."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise _error("expected a list of at least one message")
    items = cast("Sequence[object]", messages)
    return [_check_message(item, index) for index, item in enumerate(items)]


def _error(text: str) -> RequestError:
    return RequestError(f"messages: {text}", param="messages")


def _check_message(message: object, index: int) -> Message:
    if not isinstance(message, Mapping):
        raise _error(f"number {index} is {_kind(message)}; expected an object with role and content")
    checked: Message = dict(cast("Mapping[str, Any]", message))
    role = checked.get("role")
    if not isinstance(role, str) or not role:
        raise _error(f"number {index} has no role, or one that is not a string")
    calls = checked.get("tool_calls")
    if calls is not None:
        checked["tool_calls"] = _check_calls(calls, index)
    content = checked.get("content")
    if content is None:
        if not calls and role != "assistant":
            raise _error(f"number {index}, of role {role!r}, has no content")
    else:
        checked["content"] = _join_parts(content, index)
    return checked


def _join_parts(content: object, index: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _error(
            f"the content of number {index} is {_kind(content)}; expected a string or a list of parts"
        )
    texts: list[str] = []
    for part in cast("Sequence[object]", content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise _error(
                f"number {index} has a content part that is {_kind(part)}; expected an object with a type"
            )
        fields = cast("Mapping[str, object]", part)
        kind, text = fields.get("type"), fields.get("text")
        if kind not in _TEXT_PARTS:
            raise _error(f"number {index} has a content part of type {kind!r}; this model takes text only")
        if not isinstance(text, str):
            raise _error(f"number {index} has a text part whose text is {_kind(text)}; expected a string")
        texts.append(text)
    return "\n".join(texts)


def _check_calls(calls: object, index: int) -> list[Message]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise _error(f"tool_calls of number {index} is {_kind(calls)}; expected a list")
    checked: list[Message] = []
    for call in cast("Sequence[object]", calls):
        if not isinstance(call, Mapping):
            raise _error(f"number {index} has a tool call that is {_kind(call)}; expected an object")
        fields: Message = dict(cast("Mapping[str, Any]", call))
        function = fields.get("function")
        if isinstance(function, Mapping):
            named: Message = dict(cast("Mapping[str, Any]", function))
            named["arguments"] = _parse_arguments(named.get("arguments"))
            fields["function"] = named
        checked.append(fields)
    return checked


def _parse_arguments(arguments: object) -> object:
    """Templates write arguments as JSON themselves, so the API's JSON text is read first."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed: object = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments  # what a model once wrote goes back as it was
    return cast("object", parsed) if isinstance(parsed, dict) else arguments


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
