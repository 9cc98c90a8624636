import pytest
from tokenizers import Regex, pre_tokenizers

from xjax.errors import LoadError
from xjax.text.vocabulary.splits import _RULE_BY_NAME, split_named


def cut(name: str, text: str) -> list[str]:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split_named(name).patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "It's 123  x\n\ny", ["It", "'s", " 123", " ", " x", "\n", "\n", "y"]),
        ("smollm", "It's 123", ["It", "'s", " ", "1", "2", "3"]),
        ("default", "a, b$ 12345", ["a", ",", " b", "$", " ", "123", "45"]),
        ("llama-bpe", "IT'S 12345\n\n\nx_y", ["IT", "'S", " ", "123", "45", "\n\n\n", "x", "_y"]),
        ("qwen2", "a1234 !!\n", ["a", "1", "2", "3", "4", " !!\n"]),
        ("qwen35", "e\u0301t\u0301", ["e\u0301t\u0301"]),
        ("tekken", "fooBarBAZ12/\n", ["foo", "Bar", "BAZ", "1", "2", "/\n"]),
        ("gpt-4o", "Don't1234", ["Don't", "123", "4"]),
        ("deepseek-v3", "x=1234汉字ab", ["x", "=", "123", "4", "汉字", "ab"]),
        ("falcon", "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
        ("deepseek-coder", "a b,1\n", ["a", " b", ",", "1", "\n"]),
        ("seed-coder", "a!\n12", ["a", "!", "\n", "1", "2"]),
    ],
)
def test_cuts(name, text, pieces):
    assert cut(name, text) == pieces


@pytest.mark.parametrize("name", sorted(_RULE_BY_NAME))
def test_every_rule_keeps_every_character(name):
    text = "".join(map(chr, range(0x250))) + " 汉字 かな 한국 👩‍🚀 e\u0301  \r\n\n 1234 IT'll x"
    assert "".join(cut(name, text)) == text


def test_an_unknown_rule_lists_the_known_ones():
    with pytest.raises(LoadError, match=r"'nope'.*default.*qwen2"):
        split_named("nope")
