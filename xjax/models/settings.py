"""Reading a model's settings out of config.json or GGUF metadata, with errors that name the key."""

from collections.abc import Callable, Mapping
from typing import Any

from xjax.errors import LoadError

# No model is larger in anything that is counted; what is would only take memory before it fails.
_MAX_COUNT = 1 << 24
_MAX_LAYERS = 4096
_MAX_HEAD_DIM = 1 << 14
_LEAST_NUMBER, _MAX_NUMBER = 1.2e-38, 3.4e38  # of float32
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh", "gelu": "gelu",
}  # fmt: skip


class Settings:
    """A mapping of settings from a named source; what is missing or of a wrong kind is a LoadError.

    source   how the source is called in errors, "config.json" or "GGUF metadata"
    prefix   put in front of every key, e.g. "llama."
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values, self.source, self.prefix = values, source, prefix

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = _MAX_COUNT) -> int:
        """Read a whole number from `low` to `high`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            name = self.prefix + key
            raise LoadError(
                f"{self.source}: {name} must be an integer from {low} to {high}, not {short(value)}"
            )
        return value

    def optional_integer(self, key: str) -> int | None:
        """Read a whole number of at least 1, or None where there is none."""
        return None if self.values.get(self.prefix + key) is None else self.integer(key)

    def num_layers(self, key: str, default: int | None = None) -> int:
        """Read how many layers there are."""
        return self.integer(key, default, high=_MAX_LAYERS)

    def head_dim(self, key: str, default: int | None = None) -> int:
        """Read the size of a head, of which rotary embedding takes pairs."""
        size = self.integer(key, default, high=_MAX_HEAD_DIM)
        if size % 2:
            raise LoadError(
                f"{self.source}: {self.prefix}{key} must be even for rotary embedding, not {size}"
            )
        return size

    def number(self, key: str, default: float | None = None) -> float:
        """Read a positive number."""
        value = self._get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _LEAST_NUMBER <= value <= _MAX_NUMBER:
            wanted = "must be a number above 0 within float32"
            raise LoadError(f"{self.source}: {self.prefix}{key} {wanted}, not {short(value)}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Read a positive number, or None where there is none."""
        return None if self.values.get(self.prefix + key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """Read true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise LoadError(f"{self.source}: {self.prefix}{key} must be true or false, not {short(value)}")
        return value

    def table(self, key: str) -> Mapping[str, Any] | None:
        """Read a nested mapping, or None where there is none."""
        value = self.values.get(self.prefix + key)
        if value is not None and not isinstance(value, Mapping):
            raise LoadError(f"{self.source}: {self.prefix}{key} must be an object, not {short(value)}")
        return value

    def windows(
        self, num_layers: int, window: int | None, *, default: Callable[[int], int | None]
    ) -> tuple[int | None, ...]:
        """Read which layers have the window, from `layer_types` or, without it, by a family's rule."""
        kinds = self.values.get(self.prefix + "layer_types")
        if kinds is None:
            return tuple(default(i) for i in range(num_layers))
        known = ("sliding_attention", "full_attention")
        is_list = isinstance(kinds, list) and len(kinds) == num_layers
        if not is_list or not all(kind in known for kind in kinds):
            text = " or ".join(known)
            raise LoadError(f"{self.source}: layer_types must name {text} {num_layers} times")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def windows_of_all(self, num_layers: int) -> tuple[int | None, ...]:
        """Read the windows of a family in which every layer has the window, where there is one."""
        given = self.values.get(self.prefix + "sliding_window")
        window = None if given is None else self.integer("sliding_window")
        return self.windows(num_layers, window, default=lambda i: window)

    def activation(self, *keys: str, default: str) -> str:
        """Read the feed-forward activation from the first key that is there."""
        key = next((key for key in keys if self.values.get(key) is not None), None)
        name = default if key is None else self.values[key]
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            known = ", ".join(sorted(_ACTIVATIONS))
            raise LoadError(
                f"{self.source}: {key}, the activation, must be one of {known}, not {short(name)}"
            )
        return _ACTIVATIONS[name]

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(self.prefix + key)
        if value is not None:
            return value
        if default is None:
            raise LoadError(f"{self.source}: {self.prefix}{key} is missing")
        return default


def short(value: object) -> str:
    """A value of unknown size as it goes into a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_heads(source: str, num_heads: int, num_kv_heads: int) -> None:
    """Refuse head counts that no attention can have."""
    if num_heads % num_kv_heads:
        raise LoadError(f"{source}: {num_heads} heads cannot share {num_kv_heads} kv heads evenly")
