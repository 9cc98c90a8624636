import pytest

from xjax.errors import LoadError
from xjax.text.vocabulary.pieces import Kind, Pieces, build_pieces, check_pieces


def spelled(tokens, scores, kinds, text):
    pieces = Pieces(tokens, kinds, scores, prefix_space=False)
    return build_pieces(pieces, None).encode(text).tokens


def test_the_best_score_is_merged_first():
    tokens = ["<unk>", "a", "b", "c", "bc", "ab"]
    kinds = [2, 1, 1, 1, 1, 1]
    assert spelled(tokens, [0, 0, 0, 0, -2, -1], kinds, "abc") == ["ab", "c"]
    assert spelled(tokens, [0, 0, 0, 0, -1, -2], kinds, "abc") == ["a", "bc"]


@pytest.mark.parametrize("kind", [Kind.CONTROL, Kind.BYTE, Kind.UNKNOWN])
def test_pieces_that_text_cannot_make(kind):
    inner = build_pieces(Pieces(["a", "b", "ab"], [1, 1, kind], [0, 0, -1], prefix_space=False), None)
    inner.encode_special_tokens = True
    assert inner.encode("ab").tokens == ["a", "b"]


def test_runs_of_spaces_come_first():
    tokens = ["▁", "a", "▁a", "▁▁"]
    assert spelled(tokens, [0, 0, -1, -1000], [1, 1, 1, Kind.USER_DEFINED], "  a a") == ["▁▁", "a", "▁a"]


def test_sizes_are_compared():
    with pytest.raises(LoadError, match="x: 2 tokens, 1 token types and 2 scores"):
        check_pieces(Pieces(["a", "b"], [1], [0, 0], prefix_space=False), "x")
