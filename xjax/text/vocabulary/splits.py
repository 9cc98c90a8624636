"""How byte-level vocabularies cut text into words, by the name a GGUF file gives the rule.

A rule is a list of patterns applied one after the other: what a pattern matches stands alone,
what it leaves is cut by the next. This module knows no vocabulary and no file.
"""

from dataclasses import dataclass

from xjax.errors import LoadError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + _SPACES

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _LINES
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _LINES
_QWEN35 = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    + _SPACES
)
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _CASED_TAIL
_GPT4O = _CASED % (_CONTRACTION + "?", _CONTRACTION + "?") + r"|\p{N}{1,3}" + _CASED_TAIL
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
)
_LONG_DIGITS = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+|" + _LINES
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_SEED = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|" + _SPACES


@dataclass(frozen=True)
class Split:
    """One rule: its patterns, and what models that use it do by default.

    whole_words   a word that is a token stays whole, whatever the merges say
    add_bos       a prompt begins with the beginning-of-sequence token
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_RULES: tuple[tuple[Split, tuple[str, ...]], ...] = (
    (
        Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
        ("default",),
    ),
    (Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")), ("falcon",)),
    (
        Split((_GPT2,)),
        (
            "gpt-2",
            "gpt2",
            "mpt",
            "olmo",
            "jais",
            "phi-2",
            "trillion",
            "exaone4",
            "granite-docling",
            "gigachat",
            "a.x-4.0",
            "mellum",
        ),
    ),
    (
        Split((r"\p{N}", _GPT2)),
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    (
        Split((_LLAMA3,), whole_words=True, add_bos=True),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    (Split((_LLAMA3,)), ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    (
        Split((_QWEN2,)),
        (
            "qwen2",
            "stablelm2",
            "deepseek-r1-qwen",
            "hunyuan",
            "megrez",
            "grok-2",
            "kormo",
            "solar-open",
            "f2llmv2",
        ),
    ),
    (Split((_QWEN35,)), ("qwen35",)),
    (Split((_TEKKEN,), whole_words=True, add_bos=True), ("tekken",)),
    (Split((_GPT4O,)), ("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie")),
    (Split((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)), ("deepseek-v3", "hunyuan-dense", "joyai-llm")),
    (Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")), ("deepseek-coder",)),
    (Split((_SEED,)), ("seed-coder",)),
    (Split((r"\p{N}{1,3}", _LONG_DIGITS), whole_words=True), ("minicpm5",)),
    (Split((_BLOOM,)), ("bloom", "poro-chat", "gpt3-finnish")),
    (Split((_BLOOM, r"\p{N}")), ("viking",)),
)
_RULE_BY_NAME = {name: rule for rule, names in _RULES for name in names}


def split_named(name: str) -> Split:
    """Look up the rule of a `tokenizer.ggml.pre` name; LoadError lists what is known."""
    rule = _RULE_BY_NAME.get(name)
    if rule is None:
        known = ", ".join(sorted(_RULE_BY_NAME))
        raise LoadError(
            f"the vocabulary is cut into words by the rule {name!r} (tokenizer.ggml.pre), "
            f"which is not known here; known: {known}"
        )
    return rule
