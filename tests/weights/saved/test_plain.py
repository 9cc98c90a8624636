"""Dataclasses through JSON and back, by the types that they declare."""

import json
import math
from dataclasses import dataclass

import pytest

from xjax.errors import LoadError
from xjax.weights.saved.plain import from_plain, to_plain


@dataclass(frozen=True)
class Inner:
    theta: float = 1e4
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    size: int
    name: str = "silu"
    is_tied: bool = False
    scale: float | None = None
    windows: tuple[int | None, ...] = ()
    pair: tuple[int, str] = (1, "a")
    inner: Inner = Inner()
    other: Inner | None = None
    either: int | str = 0


VALUES = [
    Outer(size=1),
    Outer(
        size=2, scale=0.1, windows=(None, 5), other=Inner(1 / 3, (1.0, math.inf)), either="x", is_tied=True
    ),
    Outer(size=3, scale=5e-324, inner=Inner(factors=(0.1 + 0.2, 1e300)), pair=(7, "b"), either=3),
]


@pytest.mark.parametrize("value", VALUES)
def test_there_and_back(value):
    found = from_plain(Outer, json.loads(json.dumps(to_plain(value))), "config")
    assert found == value
    assert hash(found) == hash(value)


def test_whole_numbers_are_floats_where_floats_are_declared():
    found = from_plain(Outer, {"size": 1, "scale": 2}, "config").scale
    assert (type(found), found) == (float, 2.0)


def test_missing_fields_get_their_default():
    assert from_plain(Outer, {"size": 1}, "config") == Outer(size=1)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "config: .*missing.*size"),
        ({"size": None}, "config.size: 'None' is not of the type int"),
        ({"size": True}, "config.size: 'True' is not of the type int"),
        ({"size": 1.5}, "config.size: '1.5' is not of the type int"),
        ({"size": 1, "is_tied": 1}, "config.is_tied: '1' is not of the type bool"),
        ({"size": 1, "scale": "2"}, "config.scale: '2' is not of the type float"),
        ({"size": 1, "windows": 3}, "config.windows: expected a list"),
        ({"size": 1, "windows": [1, "x"]}, r"config.windows\[1\]: 'x' is not of the type int"),
        ({"size": 1, "pair": [1]}, "config.pair: expected a list of 2, found 1"),
        ({"size": 1, "inner": None}, "config.inner: expected the fields of a Inner"),
        ({"size": 1, "inner": {"nope": 1}}, "config.inner: 'nope' is unknown to this version"),
        ({"size": 1, "either": None}, "config.either: 'None' is not of the type str"),
        ([], "config: expected the fields of a Outer"),
    ],
)
def test_what_is_not_of_its_type(value, words):
    with pytest.raises(LoadError, match=words):
        from_plain(Outer, value, "config")
