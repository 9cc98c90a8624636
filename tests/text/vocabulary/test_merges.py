import numpy as np
import pytest

from tests.text.small import from_gguf, gguf_pieces
from xjax.text.vocabulary import merges
from xjax.text.vocabulary.merges import derive_merges


def merges_of(tokens, ranks):
    return [
        (tokens[left], tokens[right]) for left, right in derive_merges(tokens, np.asarray(ranks, np.float64))
    ]


def test_merges_follow_the_ranks():
    tokens = ["a", "b", "c", "bc", "ab", "abc"]
    assert merges_of(tokens, [0, 0, 0, 2, 1, 3]) == [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]
    assert merges_of(tokens, [0, 0, 0, 1, -np.inf, 3])[0] == ("a", "b")


def test_tokens_left_out_are_neither_made_nor_used():
    assert merges_of(["a", "b", "abb"], [0, 0, 1]) == []
    assert merges_of(["a", "b", "ab"], [0, np.inf, 1]) == []
    assert merges_of(["a", "b", "ab"], [0, 0, np.inf]) == []


def stored(tmp_path):
    return list((tmp_path / "merges").iterdir())


def test_merges_are_derived_once(tmp_path, monkeypatch):
    first = from_gguf(gguf_pieces(), tmp_path)
    assert len(stored(tmp_path)) == 1
    monkeypatch.setattr(merges, "derive_merges", None)  # calling it again would raise
    assert from_gguf(gguf_pieces(), tmp_path).encode("ab cd") == first.encode("ab cd")


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d[:40], lambda d: b"", lambda d: d[:-1] + b"\x01"]
)
def test_damaged_merges_are_derived_again(tmp_path, damage):
    expected = from_gguf(gguf_pieces(), tmp_path).encode("ab cd abcd")
    (file,) = stored(tmp_path)
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert from_gguf(gguf_pieces(), tmp_path).encode("ab cd abcd") == expected
    assert file.read_bytes() == good


def test_other_scores_are_another_entry(tmp_path):
    from_gguf(gguf_pieces(), tmp_path)
    scores = gguf_pieces()["tokenizer.ggml.scores"]
    from_gguf(gguf_pieces(**{"tokenizer.ggml.scores": [*scores[:-1], 0.5]}), tmp_path)
    assert len(stored(tmp_path)) == 2


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert from_gguf(gguf_pieces(), blocked / "below").encode("ab")
