"""Frozen dataclasses as what JSON has, and back by the types that their fields declare.

For a family's Config, whatever dataclasses, tuples and optional values it is made of. A value of another
type than declared, or a field that the class does not have, is a LoadError. Knows no field's meaning.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from xjax.errors import LoadError


def to_plain(value: Any) -> Any:
    """Return a value with its dataclasses as dictionaries by field and its tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    assert value is None or isinstance(value, bool | int | float | str), value
    return value


def from_plain(kind: Any, value: Any, where: str) -> Any:
    """Build a value of a declared type from what `to_plain` returned; missing fields get their default.

    where   what the value is called in errors
    """
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _one_of(get_args(kind), value, where)
    if origin is tuple:
        return _tuple(get_args(kind), value, where)
    if kind is float and type(value) is int:
        return float(value)
    if kind is type(None) and value is None:
        return None
    if kind in (bool, int, float, str) and type(value) is kind:
        return value
    raise LoadError(f"{where}: {str(value)[:40]!r} is not of the type {getattr(kind, '__name__', kind)}")


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise LoadError(f"{where}: expected the fields of a {kind.__name__}")
    hints = get_type_hints(kind)
    known = {item.name for item in dataclasses.fields(kind)}
    for name in value:
        if name not in known:
            raise LoadError(
                f"{where}: {str(name)[:40]!r} is unknown to this version of xjax; "
                "take the one that converted the model, or convert it again"
            )
    found = {name: from_plain(hints[name], item, f"{where}.{name}") for name, item in value.items()}
    try:
        return kind(**found)
    except (TypeError, ValueError, LoadError) as error:  # a field without default, or a check of its own
        raise LoadError(f"{where}: {error}; convert the model again") from error


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    kept = [kind for kind in kinds if kind is not type(None)]
    if value is None and len(kept) < len(kinds):
        return None
    for kind in kept[:-1]:
        try:
            return from_plain(kind, value, where)
        except LoadError:
            continue
    return from_plain(kept[-1], value, where)


def _tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise LoadError(f"{where}: expected a list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise LoadError(f"{where}: expected a list of {len(kinds)}, found {len(value)}")
    return tuple(
        from_plain(kind, item, f"{where}[{i}]")
        for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )
