"""How tensors of a file are laid into one array: pure functions over numpy arrays.

Every function works on the axis of a weight's outputs alone, the first, or with experts the second: so it
serves what lies beside a matrix (a bias, scales, zero points) as well as the matrix. No names, no files.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Fuse = Callable[[Array, Sequence[Array]], None]


def fuse_qkv(
    out: Array, parts: Sequence[Array], num_kv_heads: int, head_dim: int, pairs: int, copies: int = 1
) -> None:
    """Lay q, k and v by kv head: for each its query heads, its key, its value.

    out      [K * (H / K + 2) * D, ...]   written; K counts the copies, each for a part of the query heads
    parts    q [H * D, ...], k [K / copies * D, ...], v alike; or one array of all three
    pairs    rotated dimensions of a head whose rows alternate between both halves in q and k, as for
             rotation of neighbours; 0: none do
    """
    rest = out.shape[1:]
    fused = out.reshape(num_kv_heads, -1, head_dim, *rest)
    group, num_own = fused.shape[1] - 2, num_kv_heads // copies
    if len(parts) == 1:
        end = num_kv_heads * group * head_dim
        parts = np.split(parts[0], (end, end + num_own * head_dim))
    q = parts[0].reshape(num_kv_heads, -1, head_dim, *rest)
    k, v = (part.reshape(num_own, 1, head_dim, *rest) for part in parts[1:])
    if copies > 1:
        k, v = (np.repeat(part, copies, axis=0) for part in (k, v))
    half = pairs // 2
    for target, source in ((fused[:, :group], q), (fused[:, group:-1], k)):
        target[:, :, :half], target[:, :, half:pairs] = source[:, :, 0:pairs:2], source[:, :, 1:pairs:2]
        target[:, :, pairs:] = source[:, :, pairs:]
    fused[:, -1:] = v


def stack(out: Array, parts: Sequence[Array]) -> None:
    """Lay arrays one behind the other.

    out     [sum of rows, ...]   written
    parts   [rows, ...] each
    """
    start = 0
    for part in parts:
        out[start : start + len(part)] = part
        start += len(part)


def interleave(out: Array, parts: Sequence[Array], blocks: int) -> None:
    """Lay a gate and its other half in blocks: in each its part of the gate, then its part of the other.

    out     [2 * F, ...]   written
    parts   two [F, ...], or one [2 * F, ...] of the gate, then the other
    """
    rest = out.shape[1:]
    halves = np.split(parts[0], 2) if len(parts) == 1 else parts
    fused = out.reshape(blocks, 2, -1, *rest)
    for i, half in enumerate(halves):
        fused[:, i] = half.reshape(blocks, -1, *rest)


def repeat_heads(out: Array, parts: Sequence[Array], head_dim: int, copies: int) -> None:
    """Copy what belongs to each kv head.

    out     [K * D]            written
    parts   one [K / copies * D]
    """
    out.reshape(-1, copies, head_dim)[...] = parts[0].reshape(-1, 1, head_dim)


def stack_experts(out: Array, parts: Sequence[Array], blocks: int = 1) -> None:
    """Lay the matrices of experts one behind the other.

    out     [X, rows, ...]   written
    parts   [X, part of rows, ...] each; or [part of rows, ...] each, all of the first expert first
    blocks  those of a gate and its other half as `interleave` lays them
    """
    if blocks > 1:
        each = len(parts) // len(out)
        for i, expert in enumerate(out):
            is_each = parts[0].ndim < out.ndim
            own = parts[i * each : (i + 1) * each] if is_each else [part[i] for part in parts]
            interleave(expert, own, blocks)
        return
    if parts[0].ndim < out.ndim:
        stack(out.reshape(-1, *out.shape[2:]), parts)
        return
    start = 0
    for part in parts:
        out[:, start : start + part.shape[1]] = part
        start += part.shape[1]


def shift(out: Array, parts: Sequence[Array], offset: float) -> None:
    """Copy one array and add a number to it.

    out     [...]     written
    parts   one [...]
    """
    out[...] = parts[0] + np.float32(offset)
