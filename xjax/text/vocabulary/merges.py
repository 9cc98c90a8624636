"""Byte-pair merges out of tokens and their ranks, derived once and kept in the cache folder.

Knows no kinds of tokens and no text.
"""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

CACHE_VERSION = 1
Merges = npt.NDArray[np.int32]
Ranks = npt.NDArray[np.float64]


def load_merges(tokens: list[str], ranks: Ranks, cache_dir: Path | None) -> Merges:
    """Return `derive_merges(tokens, ranks)`, from `cache_dir` when it is there and whole."""
    if cache_dir is None:
        return derive_merges(tokens, ranks)
    path = cache_dir / "merges" / f"{_digest(tokens, ranks)}.bin"
    merges = _read(path, len(tokens))
    if merges is None:
        merges = derive_merges(tokens, ranks)
        # The cache only saves time: a full or read-only disk must not stop the start.
        with contextlib.suppress(OSError):
            _write(path, merges)
    return merges


def derive_merges(tokens: list[str], ranks: Ranks) -> Merges:
    """List every way to make a token out of two others, in the order of the ranks.

    ranks    [V]          float64; smaller is earlier, infinite where no merge makes or uses the token
    returns  [merges, 2]  int32 ids of the left and the right part

    Ways to make the same token: the longer left part first.
    """
    used = np.flatnonzero(ranks < np.inf).tolist()
    id_of = {tokens[token_id]: token_id for token_id in used}
    flat: list[int] = []
    for token_id in cast("list[int]", np.argsort(ranks, kind="stable")[: len(used)].tolist()):
        token = tokens[token_id]
        for cut in range(len(token) - 1, 0, -1):
            left = id_of.get(token[:cut])
            right = None if left is None else id_of.get(token[cut:])
            if left is not None and right is not None:
                flat += (left, right)
    return np.asarray(flat, dtype=np.int32).reshape(-1, 2)


# ---- on disk: a checksum, then the pairs ------------------------------------------------------


def _digest(tokens: list[str], ranks: Ranks) -> str:
    lengths = np.fromiter(map(len, tokens), dtype="<u4", count=len(tokens))
    digest = hashlib.sha256(f"merges {CACHE_VERSION} {len(tokens)}".encode())
    digest.update(lengths.tobytes())
    digest.update("".join(tokens).encode("utf-8", "surrogatepass"))
    digest.update(ranks.astype("<f8").tobytes())
    return digest.hexdigest()


def _read(path: Path, num_tokens: int) -> Merges | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < 32 or len(data) % 8 or hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    merges = np.frombuffer(data, dtype="<i4", offset=32).reshape(-1, 2)
    return merges if not merges.size or (merges.min() >= 0 and merges.max() < num_tokens) else None


def _write(path: Path, merges: Merges) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = merges.astype("<i4").tobytes()
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
