"""The vocabulary inside a GGUF file, rebuilt as a `tokenizers.Tokenizer`.

Two kinds: "gpt2" (byte-level pairs, merges in the file) and "llama" (SentencePiece pieces with
scores, see pieces.py). Knows the metadata keys, not the file they came from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from xjax.errors import LoadError
from xjax.text.vocabulary.pieces import SPACE, Kind, Pieces, add_marked, build_pieces, check_pieces
from xjax.text.vocabulary.splits import Split, split_named

KINDS = ("gpt2", "llama")
# A control token of one of these names ends a turn in files that do not say so by id.
_TURN_ENDS = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<|end|>",
        "<|end_of_turn|>",
        "<|eot|>",
        "<EOT>",
    )
)

# Ids that the "llama" kind means where a file names none.
_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Specials:
    """Which ids a vocabulary puts around a prompt, and which end an answer."""

    bos_id: int | None
    eos_ids: frozenset[int]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


def build_vocabulary(metadata: Mapping[str, Any], cache_dir: Path | None) -> tuple[Tokenizer, Specials]:
    """Rebuild the tokenizer that a GGUF file's metadata describes; LoadError when it cannot be."""
    name = metadata.get("tokenizer.ggml.model")
    if name is None:
        raise LoadError(
            "the GGUF file has no vocabulary (no tokenizer.ggml.model); give a model that has one"
        )
    if name not in KINDS:
        raise LoadError(f"the GGUF file's vocabulary is of the kind {name!r}; known: {', '.join(KINDS)}")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    kinds = _numbers(metadata, "tokenizer.ggml.token_type") or [int(Kind.NORMAL)] * len(tokens)
    if name == "llama":
        # Files spell the model's own runs of spaces as they read; pieces have a mark for the space.
        spelled = [
            SPACE * len(token) if kind == Kind.USER_DEFINED and not token.strip(" ") else token
            for token, kind in zip(tokens, kinds, strict=False)
        ]
        pieces = Pieces(
            spelled,
            kinds,
            _numbers(metadata, "tokenizer.ggml.scores"),
            prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        )
        tokenizer = build_pieces(check_pieces(pieces, "tokenizer.ggml"), cache_dir)
        unsaid = {
            f"tokenizer.ggml.{key}": token_id
            for key, token_id in _LLAMA_IDS.items()
            if token_id < len(kinds) and kinds[token_id] == Kind.CONTROL
        }
        metadata = {**unsaid, **metadata}
        return tokenizer, _specials(metadata, tokens, kinds, add_bos=True)
    split = split_named(_text(metadata.get("tokenizer.ggml.pre", "default")))
    tokenizer = _byte_level(metadata, tokens, kinds, split)
    return tokenizer, _specials(metadata, tokens, kinds, add_bos=split.add_bos)


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], split: Split) -> Tokenizer:
    check_pieces(Pieces(tokens, kinds, [0.0] * len(tokens), prefix_space=False), "tokenizer.ggml")
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    merges: list[tuple[str, str]] = []
    for line in _strings(metadata, "tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise LoadError(f"tokenizer.ggml.merges: {line!r} is not two tokens that make a third")
        merges.append((left, right))
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_words)
    tokenizer = Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    add_marked(tokenizer, tokens, kinds)
    return tokenizer


def _specials(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], *, add_bos: bool) -> Specials:
    def token_id(key: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if not 0 <= int(value) < len(tokens):
            raise LoadError(f"tokenizer.ggml.{key} is {value}, but the vocabulary has {len(tokens)} tokens")
        return int(value)

    bos_id, eos_id = token_id("bos_token_id"), token_id("eos_token_id")
    ends = {eos_id, token_id("eot_token_id"), token_id("eom_token_id")}
    ends |= {i for i, token in enumerate(tokens) if kinds[i] == Kind.CONTROL and token in _TURN_ENDS}
    with_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    with_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    return Specials(
        bos_id=bos_id,
        eos_ids=frozenset(end for end in ends if end is not None),
        prefix=(bos_id,) if with_bos and bos_id is not None else (),
        suffix=(eos_id,) if with_eos and eos_id is not None else (),
    )


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if values is None:
        raise LoadError(f"the GGUF file has no {key}, which its vocabulary needs")
    try:
        return [_text(value) for value in values]
    except UnicodeDecodeError as error:
        raise LoadError(f"{key} holds a string that is not UTF-8: {error.object!r}") from error


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8")


def _numbers(metadata: Mapping[str, Any], key: str) -> list[Any]:
    values = metadata.get(key)
    return [] if values is None else values.tolist() if hasattr(values, "tolist") else list(values)
