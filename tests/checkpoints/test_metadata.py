"""End-of-sequence ids and sampling defaults from every source that states them."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from xjax.checkpoints.metadata import eos_ids, generation_defaults, read_json, read_optional_json
from xjax.errors import LoadError


@dataclass(frozen=True)
class _Stated:
    config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    path: Path = Path("model")


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({}, {}, set()),
        ({"eos_token_id": 2}, {}, {2}),
        ({"eos_token_id": None}, {"eos_token_id": [1, 106]}, {1, 106}),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 7}, {1, 2, 7}),
        ({"text_config": {"eos_token_id": 5}}, {}, {5}),
        ({"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 106}, {}, {1, 106}),
        ({"tokenizer.ggml.eom_token_id": 128008}, {}, {128008}),
        ({"eos_token_id": -1}, {}, set()),
    ],
)
def test_eos_is_the_union_of_all_sources(
    config: dict[str, Any], generation_config: dict[str, Any], expected: set[int]
) -> None:
    assert eos_ids(_Stated(config, generation_config)) == expected


@pytest.mark.parametrize("value", ["</s>", 1.5, True, [1, "2"]])
def test_an_eos_that_is_no_id_is_refused(value: Any) -> None:
    with pytest.raises(LoadError, match="model: eos_token_id: .* is not a token id"):
        eos_ids(_Stated({"eos_token_id": value}))


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "max_length": 20}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, {"top_k": 64, "top_p": 0.95}),
        (
            {"temperature": None, "min_p": 0.1, "repetition_penalty": 1.1},
            {"min_p": 0.1, "repetition_penalty": 1.1},
        ),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.2}, {"temperature": 0.0, "repetition_penalty": 1.2}),
    ],
)
def test_sampling_defaults(stated: dict[str, Any], expected: dict[str, float]) -> None:
    assert generation_defaults(_Stated({}, stated)) == expected


def test_sampling_defaults_of_a_gguf_file() -> None:
    config = {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 40,
        "general.sampling.penalty_repeat": 1.5,
    }
    assert generation_defaults(_Stated(config)) == {
        "temperature": 0.5,
        "top_k": 40,
        "repetition_penalty": 1.5,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.5), ("top_k", -2),
     ("min_p", float("nan")), ("repetition_penalty", 0), ("temperature", True), ("top_p", [0.5])],
)  # fmt: skip
def test_senseless_defaults_are_refused(name: str, value: Any) -> None:
    with pytest.raises(LoadError, match=f"model: generation setting {name}: "):
        generation_defaults(_Stated({}, {name: value}))


def test_reading_json(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert read_optional_json(path) == {}
    with pytest.raises(LoadError, match="x.json: cannot be read: No such file"):
        read_json(path)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(LoadError, match="pipe.json: cannot be read: not a regular file"):
        read_optional_json(tmp_path / "pipe.json")
    path.write_text('{"a": [1, {"b": "é"}]}', encoding="utf-8")
    assert read_json(path) == {"a": [1, {"b": "é"}]}
    path.write_text('{\n"a" 1}')
    with pytest.raises(LoadError, match="x.json: not valid JSON: .* in line 2"):
        read_optional_json(path)
