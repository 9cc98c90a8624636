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


def fuse_qkv(out: Array, parts: Sequence[Array], num_kv_heads: int, head_dim: int, pairs: int) -> None:
    """Lay q, k and v by kv head: for each its query heads, its key, its value.

    out     [K * (H / K + 2) * D, ...]   written
    parts   q [H * D, ...], k [K * D, ...], v [K * D, ...]; or one array of all three
    pairs   rotated dimensions of a head whose rows alternate between both halves in q and k, as for
            rotation of neighbours; 0: none do
    """
    rest = out.shape[1:]
    fused = out.reshape(num_kv_heads, -1, head_dim, *rest)
    group = fused.shape[1] - 2
    if len(parts) == 1:
        ends = (num_kv_heads * group * head_dim, num_kv_heads * (group + 1) * head_dim)
        parts = np.split(parts[0], ends)
    q, k, v = (part.reshape(num_kv_heads, -1, head_dim, *rest) for part in parts)
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


def stack_experts(out: Array, parts: Sequence[Array]) -> None:
    """Lay the matrices of experts one behind the other.

    out     [X, rows, ...]   written
    parts   [X, part of rows, ...] each; or [part of rows, ...] each, all of the first expert first
    """
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
