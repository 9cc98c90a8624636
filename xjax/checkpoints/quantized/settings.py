"""Reading a quantization_config, with errors that name the file and the key."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from xjax.errors import LoadError


class Settings:
    """A mapping of settings from a named place; what is of a wrong kind is a LoadError.

    where   how the place is called in errors: "/models/x/config.json: quantization_config"
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise LoadError(f"{where} must be an object, not {_short(values)}")
        self.values: Mapping[str, Any] = values  # type: ignore[assignment]
        self.where = where

    def refuse(self, key: str, expected: str) -> LoadError:
        """Make the error of a setting that is something else than expected."""
        return LoadError(f"{self.where}.{key} must be {expected}, not {_short(self.values.get(key))}")

    def choice(self, key: str, default: Any, known: Iterable[Any]) -> Any:
        """Read one of some known values."""
        value, known = self._get(key, default), tuple(known)
        if not any(value == item and type(value) is type(item) for item in known):
            raise self.refuse(key, " or ".join(_short(item) for item in known))
        return value

    def integer(self, key: str, default: int) -> int:
        """Read a whole number above zero, or -1."""
        value = self._get(key, default)
        if type(value) is not int or not (value == -1 or 0 < value < 1 << 24):
            raise self.refuse(key, "a whole number above 0, or -1")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Read true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def table(self, key: str) -> "Settings | None":
        """Read an object, or None where there is none."""
        value = self.values.get(key)
        return None if value is None else Settings(value, f"{self.where}.{key}")

    def texts(self, key: str) -> tuple[str, ...]:
        """Read a list of texts; nothing: none."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):  # type: ignore[misc]
            raise self.refuse(key, "a list of texts")
        return tuple(value)  # type: ignore[arg-type]

    def block(self, key: str) -> tuple[int, int] | None:
        """Read the outputs and inputs that share a scale: [128, 128], or "128x128"; nothing: None."""
        value: Any = self.values.get(key)
        if value is None:
            return None
        parts: list[Any] = list(value) if isinstance(value, list) else []  # type: ignore[arg-type]
        if isinstance(value, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", value):
            parts = [int(part) for part in value.split("x")]
        if len(parts) != 2 or not all(type(part) is int and 0 < part < 1 << 24 for part in parts):
            raise self.refuse(key, "two whole numbers above 0")
        return parts[0], parts[1]

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def matches(pattern: str, name: str, where: str) -> bool:
    """Tell whether a pattern of a config fits the beginning of a module's name."""
    try:
        return re.match(pattern, name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise LoadError(f"{where}: {_short(pattern)} is not a regular expression") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
