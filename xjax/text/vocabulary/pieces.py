"""SentencePiece vocabularies (pieces with scores) as byte-pair merges.

    pieces + scores ── merges (kept in the cache folder) ── tokenizers.Tokenizer

A SentencePiece model joins the neighbours whose joined piece scores best; the same comes out of
merges ranked by the score of what they make. Knows neither GGUF nor protobuf: both
readers hand over the same `Pieces`.
"""

import contextlib
import enum
import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from xjax.errors import LoadError

CACHE_VERSION = 1
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
    pairs = _load_merges(tokens, pieces, cache_dir)
    named = np.asarray(tokens, dtype=object)
    unknown = [token for token, kind in zip(tokens, pieces.kinds, strict=True) if kind == Kind.UNKNOWN]
    return models.BPE(
        vocab=dict(zip(tokens, range(len(tokens)), strict=True)),
        merges=list(zip(named[pairs[:, 0]].tolist(), named[pairs[:, 1]].tolist(), strict=True)),
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


def derive_merges(tokens: list[str], pieces: Pieces) -> npt.NDArray[np.int32]:
    """List every way to make a piece out of two others, best piece first.

    returns  [merges, 2]  int32 ids of the left and the right part

    Runs of spaces that the model defines itself are matched before anything else by
    SentencePiece, so they lead. Ways to make the same piece: longer left part first.
    """
    kinds = np.asarray(pieces.kinds)
    ranks = -np.asarray(pieces.scores, dtype=np.float64)
    ranks[kinds == Kind.USER_DEFINED] = -np.inf
    ids = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, pieces.kinds, strict=True))
        if kind in (Kind.NORMAL, Kind.UNUSED) or (kind == Kind.USER_DEFINED and not token.strip(SPACE))
    }
    flat: list[int] = []
    order = cast("list[int]", np.argsort(ranks, kind="stable").tolist())
    for token_id in order:
        token = tokens[token_id]
        if ids.get(token) != token_id:
            continue
        for cut in range(len(token) - 1, 0, -1):
            left = ids.get(token[:cut])
            right = None if left is None else ids.get(token[cut:])
            if left is not None and right is not None:
                flat.append(left)
                flat.append(right)
    return np.asarray(flat, dtype=np.int32).reshape(-1, 2)


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


# ---- the merges on disk: a checksum, then the pairs ------------------------------------------


def _load_merges(tokens: list[str], pieces: Pieces, cache_dir: Path | None) -> npt.NDArray[np.int32]:
    if cache_dir is None:
        return derive_merges(tokens, pieces)
    path = cache_dir / "merges" / f"{_digest(tokens, pieces)}.bin"
    pairs = _read_merges(path, len(tokens))
    if pairs is None:
        pairs = derive_merges(tokens, pieces)
        # The cache only saves time: a full or read-only disk must not stop the start.
        with contextlib.suppress(OSError):
            _write_merges(path, pairs)
    return pairs


def _digest(tokens: list[str], pieces: Pieces) -> str:
    lengths = np.fromiter(map(len, tokens), dtype="<u4", count=len(tokens))
    digest = hashlib.sha256(f"merges {CACHE_VERSION} {len(tokens)}".encode())
    digest.update(lengths.tobytes())
    digest.update("".join(tokens).encode("utf-8", "surrogatepass"))
    digest.update(np.asarray(pieces.kinds, dtype="<i4").tobytes())
    digest.update(np.asarray(pieces.scores, dtype="<f8").tobytes())
    return digest.hexdigest()


def _read_merges(path: Path, num_tokens: int) -> npt.NDArray[np.int32] | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < 32 or len(data) % 8 or hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    pairs = np.frombuffer(data, dtype="<i4", offset=32).reshape(-1, 2)
    return pairs if not pairs.size or (pairs.min() >= 0 and pairs.max() < num_tokens) else None


def _write_merges(path: Path, pairs: npt.NDArray[np.int32]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = pairs.astype("<i4").tobytes()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".merges-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


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
