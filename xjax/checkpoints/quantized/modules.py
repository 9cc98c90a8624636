"""Tensors sorted by the module they belong to: "a.b.q_proj" -> {"qweight": ..., "scales": ...}."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from xjax.checkpoints.quantized.codes import Stored
from xjax.errors import LoadError

Parts = Mapping[str, Stored]


def parts_by_module(tensors: Mapping[str, Stored], names: Iterable[str]) -> dict[str, dict[str, Stored]]:
    """Collect the tensors whose last name is one of some, by the module in front of it."""
    wanted, found = frozenset(names), defaultdict[str, dict[str, Stored]](dict)
    for name, view in tensors.items():
        module, _, last = name.rpartition(".")
        if last in wanted:
            found[module][last] = view
    return found


def part(parts: Parts, module: str, name: str) -> Stored:
    """Take a part that must be there."""
    if name not in parts:
        other = next(iter(parts.values()))
        raise LoadError(f"{other.file}: tensor {module}.{name} is missing, but {other.name} is there")
    return parts[name]
