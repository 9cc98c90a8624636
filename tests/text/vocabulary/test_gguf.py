import numpy as np
import pytest

from tests.text.small import from_gguf, gguf_bytes, gguf_pieces
from xjax.errors import LoadError


def spelled(tokenizer, text, **options):
    return [tokenizer.token_string(i) for i in tokenizer.encode(text, **options)]


def test_pieces():
    tokenizer = from_gguf(gguf_pieces())
    assert spelled(tokenizer, "ab cd") == ["<s>", "▁ab", "▁", "cd"]
    assert spelled(tokenizer, "abcd") == ["<s>", "▁abcd"]
    assert spelled(tokenizer, "x<tag>a") == ["<s>", "▁", "<0x78>", "<tag>", "▁a"]
    assert spelled(tokenizer, "<s>", add_special_tokens=False)[1:] == ["<0x3C>", "<0x73>", "<0x3E>"]
    assert spelled(tokenizer, "€", add_special_tokens=False) == ["▁", "<0xE2>", "<0x82>", "<0xAC>"]


def test_pieces_without_a_space_before():
    tokenizer = from_gguf(
        gguf_pieces(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    )
    assert spelled(tokenizer, "ab  ab   ab") == ["ab", "▁▁", "ab", "▁▁▁", "ab"]


def test_arrays_may_be_numpy():
    changes = {
        "tokenizer.ggml.token_type": np.asarray(gguf_pieces()["tokenizer.ggml.token_type"], np.int32),
        "tokenizer.ggml.scores": np.asarray(gguf_pieces()["tokenizer.ggml.scores"], np.float32),
    }
    assert spelled(from_gguf(gguf_pieces(**changes)), "ab cd") == ["<s>", "▁ab", "▁", "cd"]


def test_bytes():
    tokenizer = from_gguf(gguf_bytes())
    assert spelled(tokenizer, "ab ab 123é\n\n") == ["ab", "Ġab", "Ġ", "123", "Ã©", "ĊĊ"]
    assert tokenizer.prefix == ()
    digits = from_gguf(gguf_bytes(**{"tokenizer.ggml.pre": "smollm"}))
    assert spelled(digits, "123") == ["1", "2", "3"]


def test_a_rule_may_begin_prompts_and_keep_words_whole():
    tokenizer = from_gguf(gguf_bytes(**{"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.merges": ["1 2"]}))
    assert spelled(tokenizer, "123") == ["<|start|>", "123"]


@pytest.mark.parametrize("key", ["eos_token_id", "eot_token_id", "eom_token_id"])
def test_ends_by_id(key):
    metadata = gguf_bytes(**{"tokenizer.ggml.eos_token_id": None, f"tokenizer.ggml.{key}": 7})
    assert from_gguf(metadata).eos_ids >= {7}


def test_ends_of_turns_by_name():
    """<|end|> is a control token of that vocabulary and ends turns; as plain text it would not."""
    assert from_gguf(gguf_bytes(**{"tokenizer.ggml.eos_token_id": 5})).eos_ids == {0, 5}
    kinds = [1, *gguf_bytes()["tokenizer.ggml.token_type"][1:]]
    plain = gguf_bytes(**{"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.token_type": kinds})
    assert from_gguf(plain).eos_ids == {5}


def test_ids_that_a_file_of_pieces_leaves_out():
    unsaid = {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": None}
    tokenizer = from_gguf(gguf_pieces(**unsaid))
    assert tokenizer.prefix == (1,)
    assert tokenizer.eos_ids == {2}
    kinds = [2, 1, 1, *gguf_pieces()["tokenizer.ggml.token_type"][3:]]  # plain pieces lie there
    assert from_gguf(gguf_pieces(**unsaid, **{"tokenizer.ggml.token_type": kinds})).prefix == ()


def test_ends_around_a_prompt():
    tokenizer = from_gguf(gguf_pieces(**{"tokenizer.ggml.add_eos_token": True}))
    assert spelled(tokenizer, "a") == ["<s>", "▁a", "</s>"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "no vocabulary"),
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'; known: gpt2, llama"),
        *(({"tokenizer.ggml.model": kind}, f"kind '{kind}'") for kind in ("t5", "rwkv", "plamo2", "none")),
        ({"tokenizer.ggml.model": "llama"}, "no tokenizer.ggml.tokens"),
        (gguf_bytes(**{"tokenizer.ggml.pre": "martian"}), r"rule 'martian'.*known: .*smollm"),
        (gguf_bytes(**{"tokenizer.ggml.merges": None}), "no tokenizer.ggml.merges"),
        (gguf_bytes(**{"tokenizer.ggml.merges": ["ab"]}), "'ab' is not two tokens"),
        (gguf_bytes(**{"tokenizer.ggml.merges": ["a c"]}), "'a c' is not two tokens that make a third"),
        (gguf_bytes(**{"tokenizer.ggml.token_type": [1, 2]}), "2 token types"),
        (gguf_bytes(**{"tokenizer.ggml.eos_token_id": 9999}), "eos_token_id is 9999"),
        (gguf_pieces(**{"tokenizer.ggml.scores": None}), "0 scores"),
        (gguf_pieces(**{"tokenizer.ggml.tokens": ["a"] * 274}), "a token occurs twice"),
        (gguf_bytes(**{"tokenizer.ggml.tokens": [b"\xff"]}), "not UTF-8"),
    ],
)
def test_what_cannot_be_loaded_is_named(metadata, message):
    with pytest.raises(LoadError, match=message):
        from_gguf(metadata)
