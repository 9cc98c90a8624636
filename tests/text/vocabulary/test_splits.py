import random

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


def split(pattern: str, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# What the `pre_tokenizer` of a published tokenizer.json is made of, by the name GGUF has for it.
PUBLISHED = {
    "gpt-2": [GPT2],  # GPT-2, OLMo 2, Phi-2, EXAONE 4
    "smollm": [DIGITS, GPT2],  # SmolLM 2
    "starcoder": [DIGITS, GPT2],  # StarCoder 2
    "refact": [DIGITS, GPT2],  # Granite 3
    "command-r": [DIGITS, GPT2],  # Command R
    "llama-bpe": [split(rf"{ENDS}|{LETTERS}|\p{{N}}{{1,3}}|{TAIL}"), BYTES],  # Llama 3
    "glm4": [split(rf"{ENDS}|{LETTERS}|\p{{N}}{{1,3}}|{TAIL}"), BYTES],  # GLM-4-0414
    "dbrx": [split(rf"{ENDS}|{LETTERS}|\p{{N}}{{1,3}}|{TAIL}"), BYTES],
    "qwen2": [split(rf"{ENDS}|{LETTERS}|\p{{N}}|{TAIL}"), BYTES],  # Qwen 2, 2.5, 3
    "tekken": [split(CASED % ("", "") + r"|\p{N}|" + CASED_TAIL), BYTES],  # Mistral Nemo
    "gpt-4o": [split(CASED % (f"{ENDS}?", f"{ENDS}?") + r"|\p{N}{1,3}|" + CASED_TAIL), BYTES],  # Phi-4-mini
    "deepseek-v3": [
        split(r"\p{N}{1,3}"),
        split("[一-龥\u3040-ゟ゠-ヿ]+"),
        split(
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
            r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        BYTES,
    ],
    "minicpm5": [split(r"\p{N}{1,3}"), split(rf"{ENDS}|{LETTERS}|\p{{N}}+|{TAIL}"), BYTES],
    "bloom": [split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), BYTES],
}
TRICKY = (
    *"aZéǅßΣ汉かヿ한اπ", *"e\u0301", *"0179²Ⅷ٣", *" \t\n\r\u00a0\u3000\u200b",
    *".,!?…。，、।۔،|()[]'\"`~$+<=>^_/\\-",
    "'s", "'LL", "'Re", " the", "FooBar", "12345", "\r\n", "  ", "👩\u200d🚀",
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_cuts_are_where_the_published_tokenizer_has_them(name):
    reference, source = pre_tokenizers.Sequence(PUBLISHED[name]), random.Random(name)
    steps = [*(split(pattern) for pattern in split_named(name).patterns), BYTES]
    ours = pre_tokenizers.Sequence(steps)
    for _ in range(400):
        text = "".join(source.choices(TRICKY, k=source.randint(1, 24)))
        wanted = [place for _, place in reference.pre_tokenize_str(text)]
        assert [place for _, place in ours.pre_tokenize_str(text)] == wanted, text


# What GGUF files of the families of the registry say; a family may have several vocabularies.
NAMES_OF_FAMILIES = (
    "llama-bpe", "smollm", "tekken", "qwen2", "deepseek-r1-qwen", "gpt-4o", "glm4", "chatglm-bpe",
    "refact", "dbrx", "gpt-2", "starcoder", "default",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES_OF_FAMILIES)
def test_every_family_has_its_rule(name):
    assert split_named(name).patterns


@pytest.mark.parametrize("name", ["superbpe", "kimi-k2", "deepseek-llm", "chameleon", "Qwen2", ""])
def test_rules_that_are_not_known_are_not_guessed(name):
    with pytest.raises(LoadError, match="which is not known here"):
        split_named(name)
