"""Run a chat template that may be hostile: bounded in steps, time and size.

Templates come out of model files. jinja2's sandbox keeps them from Python; this module keeps them
from running or growing without end: every pass of a loop or macro is counted, every piece of
output and every joined string is measured, and what could be huge is checked before it is made.
Knows jinja2, not messages.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format, do_join
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
MAX_CHARACTERS = 32_000_000
_BUDGET = "_xjax_budget"
_WIDE = re.compile(r"[0-9]{5}|\*")
_MAX_ARGUMENT = 100_000
_UNUSED_FILTERS = ("batch", "center", "filesizeformat", "pprint", "slice", "urlize", "wordwrap", "xmlattr")


class TemplateLimit(Exception):
    """The template ran or grew beyond its bounds."""


class TemplateRefusal(Exception):
    """The template itself refused the messages, by raise_exception."""


class Budget:
    """What one rendering may still use."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._deadline = clock() + MAX_SECONDS
        self._steps = 0
        self._characters = 0

    def step(self) -> None:
        """Count one pass."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TemplateLimit(f"it takes more than {MAX_STEPS} steps")
        if self._clock() > self._deadline:
            raise TemplateLimit(f"it runs for more than {MAX_SECONDS:g} s")

    def write(self, size: int) -> None:
        """Count characters written or joined."""
        self._characters += size
        if self._characters > MAX_CHARACTERS:
            raise TemplateLimit(f"it writes more than {MAX_CHARACTERS} characters")

    def weigh(self, value: object) -> None:
        """Count a value with everything in it, however often it is in there."""
        waiting = [value]
        while waiting:
            self.step()
            item = waiting.pop()
            if isinstance(item, str):
                self.write(len(item))
            elif isinstance(item, Mapping):
                waiting += cast("Mapping[object, object]", item).keys()
                waiting += cast("Mapping[object, object]", item).values()
            elif isinstance(item, list | tuple | set | frozenset):
                waiting += cast("Iterable[object]", item)


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise TemplateLimit(f"it builds a value of {size} characters or items")


def _length(value: object) -> int:
    """Characters or items of what an operation can make long; 0 for anything else."""
    return len(cast("str", value)) if isinstance(value, str | bytes | list | tuple) else 0


# Filters are constant-folded unless they take the context, so both do.
@jinja2.pass_context
def _step(context: Context, value: object) -> object:
    context[_BUDGET].step()
    return value


@jinja2.pass_context
def _measured(context: Context, value: object) -> object:
    context[_BUDGET].weigh(value)
    return value


class _Counting(NodeTransformer):
    """Put a counter into every loop and macro, and a measure around everything written or joined."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counted(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            part if isinstance(part, nodes.TemplateData) else _filtered(part, "_measured")
            for part in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_measured")

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.ExprStmt(_filtered(nodes.Const(None, lineno=node.lineno), "_step"), lineno=node.lineno)
        node.body = [tick, *node.body]
        return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks the assistant's part, for training only."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    _check_size(_length(many) * times)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                _check_size(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TemplateLimit("it formats a number with a width of five digits")
        result: Any = super().call_binop(context, operator, left, right)
        context[_BUDGET].write(_length(result))
        return result

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str | bytes | int):
            if any(isinstance(arg, int) and arg > _MAX_ARGUMENT for arg in args):
                raise TemplateLimit(f"it calls {name} with a number above {_MAX_ARGUMENT}")
            if name in ("translate", "expandtabs"):
                raise TemplateRefusal(f"the string method {name} is not available to templates")
            if name == "replace" and isinstance(owner, str):
                _check_size(len(owner) + owner.count(args[0]) * len(args[1]))
        result: Any = super().call(context, function, *args, **kwargs)
        context[_BUDGET].write(_length(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE.search(value.__self__):
            raise TemplateLimit("it formats a value with a width of five digits")
        return wrapped


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


@jinja2.pass_context
def _to_json(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    context[_BUDGET].weigh(value)
    if isinstance(indent, int) and indent > 100:
        raise TemplateLimit(f"it indents JSON by {indent}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@jinja2.pass_context
def _join(context: Context, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items: list[Any] = list(value)
    context[_BUDGET].weigh(items)
    context[_BUDGET].write(len(items) * len(d))
    return cast(str, do_join(context.eval_ctx, items, d, attribute))


@jinja2.pass_context
def _string(context: Context, value: object) -> str:
    context[_BUDGET].weigh(value)
    return str(value)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    if _WIDE.search(value):
        raise TemplateLimit("it formats a value with a width of five digits")
    return do_format(value, *args, **kwargs)


def _replace(value: object, old: object, new: object, count: int | None = None) -> str:
    text, old, new = str(value), str(old), str(new)
    _check_size(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _indent(value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    space = width if isinstance(width, str) else " " * min(width, 1000)
    lines = str(value).split("\n")
    _check_size(len(space) * len(lines))
    tail = [space + line if line or blank else line for line in lines[1:]]
    return "\n".join([space + lines[0] if first else lines[0], *tail])


_FILTERS: dict[str, Callable[..., Any]] = {
    "_step": _step,
    "_measured": _measured,
    "tojson": _to_json,
    "join": _join,
    "string": _string,
    "format": _format,
    "replace": _replace,
    "indent": _indent,
}


def make_environment(functions: Mapping[str, Callable[..., Any]]) -> jinja2.Environment:
    """Make the environment that chat templates expect, with more functions by name."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    filters = cast("dict[str, Callable[..., Any]]", environment.filters)  # pyright: ignore[reportUnknownMemberType]
    for name in _UNUSED_FILTERS:
        filters.pop(name, None)
    filters.update(_FILTERS)
    names = cast("dict[str, Any]", environment.globals)  # pyright: ignore[reportUnknownMemberType]
    names.pop("lipsum", None)
    names.update(functions, raise_exception=_raise_exception)
    return environment


def run_template(
    template: jinja2.Template, variables: Mapping[str, Any], budget: Budget | None = None
) -> str:
    """Render within a budget; TemplateLimit when it is used up, whatever jinja2 raises otherwise."""
    return template.render({**variables, _BUDGET: budget or Budget()})
