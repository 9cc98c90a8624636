"""SentencePiece vocabularies (pieces with scores) as byte-pair merges.

    pieces + scores ── merges ── tokenizers.Tokenizer

A SentencePiece model joins the neighbours whose joined piece scores best; the same comes out of
merges ranked by the score of what they make. Knows neither GGUF nor protobuf: both
readers hand over the same `Pieces`.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from xjax.errors import LoadError
from xjax.text.vocabulary.merges import load_merges

SPACE = "▁"
_ALL_SPACES = 2**16


class Kind(enum.IntEnum):
    """What a piece is, numbered as GGUF files and SentencePiece models number it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Pieces:
    """A vocabulary in id order.

    prefix_space     a space is put before each stretch of text
    collapse_spaces  runs of spaces count as one, those at the ends as none
    charsmap         compiled character normalization of a SentencePiece model, or empty
    is_unigram       the best way to cut a whole text, not the best pair at a time
    """

    tokens: list[str]
    kinds: list[int]
    scores: Sequence[float]
    prefix_space: bool
    collapse_spaces: bool = False
    charsmap: bytes = b""
    is_unigram: bool = False


def build_pieces(pieces: Pieces, cache_dir: Path | None) -> Tokenizer:
    """Build the tokenizer of a vocabulary; its merges come from `cache_dir` when they are there."""
    tokens = pieces.tokens
    tokenizer = Tokenizer(
        _unigram(tokens, pieces) if pieces.is_unigram else _pairs(tokens, pieces, cache_dir)
    )
    tokenizer.normalizer = _normalizer(pieces)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.prefix_space or pieces.collapse_spaces:
        steps.append(decoders.Strip(" ", _ALL_SPACES if pieces.collapse_spaces else 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    add_marked(tokenizer, tokens, pieces.kinds)
    return tokenizer


def _pairs(tokens: list[str], pieces: Pieces, cache_dir: Path | None) -> models.Model:
    merges = load_merges(tokens, _ranks(pieces), cache_dir)
    left, right = (map(tokens.__getitem__, cast("list[int]", column.tolist())) for column in merges.T)
    unknown = [token for token, kind in zip(tokens, pieces.kinds, strict=True) if kind == Kind.UNKNOWN]
    return models.BPE(
        vocab=dict(zip(tokens, range(len(tokens)), strict=True)),
        merges=list(zip(left, right, strict=True)),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=Kind.BYTE in pieces.kinds,
    )


def _unigram(tokens: list[str], pieces: Pieces) -> models.Model:
    unknown = [token_id for token_id, kind in enumerate(pieces.kinds) if kind == Kind.UNKNOWN]
    # No text spells a control token or a byte: their pieces are never worth taking.
    spelled = (Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED)
    never = min(pieces.scores) - 1000.0
    scores = [
        float(score) if kind in spelled else never
        for score, kind in zip(pieces.scores, pieces.kinds, strict=True)
    ]
    return models.Unigram(
        vocab=list(zip(tokens, scores, strict=True)),
        unk_id=unknown[0] if unknown else None,
        byte_fallback=Kind.BYTE in pieces.kinds,
    )


def add_marked(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Register control tokens as special and user-defined ones as whole words of the text."""
    special: list[AddedToken] = []
    defined: list[AddedToken] = []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (Kind.CONTROL, Kind.UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == Kind.USER_DEFINED and token.strip(SPACE):
            defined.append(AddedToken(token, special=False, normalized=False))
    register(tokenizer, special)
    register(tokenizer, defined)


def register(tokenizer: Tokenizer, tokens: list[AddedToken]) -> None:
    """Add tokens, each by its own flags."""
    tokenizer.add_tokens(tokens)  # pyright: ignore[reportUnknownMemberType]


def _ranks(pieces: Pieces) -> npt.NDArray[np.float64]:
    """Order in which pieces are made [V]: best score first, infinite for what text cannot make.

    Runs of spaces that the model defines itself are matched before anything else by
    SentencePiece, so they lead.
    """
    ranks = -np.asarray(pieces.scores, dtype=np.float64)
    for token_id, (token, kind) in enumerate(zip(pieces.tokens, pieces.kinds, strict=True)):
        if kind == Kind.USER_DEFINED and not token.strip(SPACE):
            ranks[token_id] = -np.inf
        elif kind not in (Kind.NORMAL, Kind.UNUSED):
            ranks[token_id] = np.inf
    return ranks


def _normalizer(pieces: Pieces) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if pieces.charsmap:
        steps.append(normalizers.Precompiled(pieces.charsmap))
    if pieces.collapse_spaces:
        for pattern, content in ((rf"\A +|[ {SPACE}]+\z", ""), (" {2,}", " ")):
            steps.append(normalizers.Replace(Regex(pattern), content))
    if pieces.prefix_space:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def check_pieces(pieces: Pieces, source: str) -> Pieces:
    """Refuse a vocabulary that no tokenizer can be made of."""
    counts = {len(pieces.tokens), len(pieces.kinds), len(pieces.scores)}
    if len(counts) != 1 or not pieces.tokens:
        raise LoadError(
            f"{source}: {len(pieces.tokens)} tokens, {len(pieces.kinds)} token types and "
            f"{len(pieces.scores)} scores; expected as many of each and at least one"
        )
    if len(set(pieces.tokens)) != len(pieces.tokens):
        raise LoadError(f"{source}: a token occurs twice in the vocabulary")
    return pieces
