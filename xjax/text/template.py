"""Chat templates: where a model keeps them, and messages rendered through one.

    override file, chat_template.jinja, tokenizer_config.json, chat_template.json, GGUF metadata
      ─ sources by name ─ ChatTemplate.render(messages) ─ text with special tokens written out

Knows no token ids; what the rendered text means is the tokenizer's business.
"""

import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2

from xjax.checkpoints.checkpoint import Checkpoint
from xjax.checkpoints.metadata import parse_json, read_optional_json
from xjax.errors import LoadError, RequestError
from xjax.text.messages import check_messages
from xjax.text.sandbox import TemplateLimit, TemplateRefusal, make_environment, run_template

_GGUF_TEMPLATE = "tokenizer.chat_template"
_GGUF_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_HF_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_SOURCE = 1 << 20  # characters; the longest in use have some 20,000
_DEVELOPER = "developer"  # what OpenAI calls the role "system" now
_RESERVED = frozenset(("messages", "tools", "add_generation_prompt"))
# What a template's own code can raise: jinja2's errors and those of the operations it runs.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """The templates of one model; most have only "default".

    sources          jinja2 source by name; "tool_use" is taken when tools are given
    special_tokens   what bos_token, eos_token and the like stand for
    clock            what strftime_now reads

    Raises LoadError when a source is no template.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, Any],
        *,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
    ):

        def strftime_now(form: str) -> str:
            return clock().strftime(form)

        environment = make_environment({"strftime_now": strftime_now})
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._template_by_name = {name: _compile(environment, name, text) for name, text in sources.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render messages; other keyword arguments are variables of the template.

        The role "developer" becomes "system" for a template that does not speak of it.
        Raises RequestError for messages that are none, that the template refuses or fails on,
        and for a template that runs or grows without end.
        """
        clash = _RESERVED.intersection(variables)
        if clash:
            raise RequestError(
                f"chat_template_kwargs: {min(clash)} cannot be set here", param="chat_template_kwargs"
            )
        name = self._choose(has_tools=bool(tools))
        checked = check_messages(messages)
        if _DEVELOPER not in self.sources[name]:
            checked = [{**item, "role": "system"} if item["role"] == _DEVELOPER else item for item in checked]
        values = {
            **self._special_tokens,
            **variables,
            "messages": checked,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._template_by_name[name]
        if any(item.get("content") is None for item in checked):
            return _run_without_content(template, values)
        return _run(template, values)

    def _choose(self, *, has_tools: bool) -> str:
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self.sources:
                return name
        names = ", ".join(sorted(self.sources))
        raise RequestError(f"the model has no default chat template, only: {names}", param="messages")


def _run(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    try:
        return run_template(template, values)
    except TemplateRefusal as error:
        raise _failure("refused the messages", error) from error
    except TemplateLimit as error:
        raise _failure("was stopped", error) from error
    except _TEMPLATE_ERRORS as error:
        raise _failure(f"failed on the messages ({type(error).__name__})", error) from error


def _run_without_content(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    """Render messages of which some have no content, as when an assistant only calls tools.

    They are given as they are, since templates that know tool calls ask for null; one that fails on
    null or writes "None" gets empty texts.
    """
    filled = [{**item, "content": ""} if item.get("content") is None else item for item in values["messages"]]
    try:
        text = _run(template, values)
    except RequestError:
        return _run(template, {**values, "messages": filled})
    if "None" not in text:
        return text
    other = _run(template, {**values, "messages": filled})
    return other if other.count("None") < text.count("None") else text


def _failure(what: str, error: Exception) -> RequestError:
    reason = " ".join(str(error).split())
    return RequestError(f"the chat template {what}: {reason[:300]}", param="messages")


def _compile(environment: jinja2.Environment, name: str, source: str) -> jinja2.Template:
    if len(source) > _MAX_SOURCE:
        raise LoadError(f"the chat template {name!r} is longer than {_MAX_SOURCE} characters")
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise LoadError(
            f"the chat template {name!r} is not valid in line {error.lineno}: {error.message}"
        ) from error
    except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
        raise LoadError(f"the chat template {name!r} cannot be compiled: {type(error).__name__}") from error


def load_template(checkpoint: Checkpoint, *, override: Path | None = None) -> ChatTemplate | None:
    """Load a model's chat template, or the one in the file `override`; None when there is none.

    Raises LoadError for a file that cannot be read or a source that is no template.
    """
    if checkpoint.kind == "gguf":
        sources = _gguf_sources(checkpoint.config)
        tokens: Mapping[str, Any] = _gguf_tokens(checkpoint.config)
    else:
        config = read_optional_json(checkpoint.path / "special_tokens_map.json")
        config |= read_optional_json(checkpoint.path / "tokenizer_config.json")
        sources = _folder_sources(checkpoint.path, config)
        tokens = _folder_tokens(config)
    if override is not None:
        sources = _file_sources(override)
    return ChatTemplate(sources, tokens) if sources else None


def _file_sources(path: Path) -> dict[str, str]:
    text = _read(path)
    if path.suffix == ".json":
        return _named(parse_json(text.encode(), str(path)).get("chat_template"), str(path))
    return {"default": text}


def _folder_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    extra = {
        file.stem: _read(file) for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if path.exists():
        return {"default": _read(path), **extra}
    if config.get("chat_template") is not None:
        return {**_named(config["chat_template"], str(folder / "tokenizer_config.json")), **extra}
    path = folder / "chat_template.json"
    if path.exists():
        return {**_named(read_optional_json(path).get("chat_template"), str(path)), **extra}
    return extra


def _gguf_sources(metadata: Mapping[str, Any]) -> dict[str, str]:
    sources: dict[str, str] = {}
    for key, value in metadata.items():
        if key == _GGUF_TEMPLATE or key.startswith(_GGUF_TEMPLATE + "."):
            if not isinstance(value, str):
                raise LoadError(f"{key} is not a string")
            sources[key[len(_GGUF_TEMPLATE) + 1 :] or "default"] = value
    return sources


def _named(value: object, where: str) -> dict[str, str]:
    """Read a template, or a list of {"name": ..., "template": ...}."""
    if isinstance(value, str):
        return {"default": value}
    sources: dict[str, str] = {}
    for entry in cast("list[object]", value) if isinstance(value, list) else [None]:
        fields = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
        name, template = fields.get("name"), fields.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise LoadError(f"{where}: chat_template is neither a string nor a list of name and template")
        sources[name] = template
    return sources


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(4 * _MAX_SOURCE + 1)
        if len(data) > 4 * _MAX_SOURCE:
            raise LoadError(f"{path}: larger than {4 * _MAX_SOURCE >> 20} MB, too large for a chat template")
        return data.decode("utf-8")
    except OSError as error:
        raise LoadError(f"{path}: the chat template cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LoadError(f"{path}: the chat template is not UTF-8 text") from error


def _gguf_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens", ())
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in _GGUF_TOKENS.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def _folder_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    tokens: dict[str, Any] = {}
    for name in _HF_TOKENS:
        value: Any = config.get(name)
        content: Any = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens
