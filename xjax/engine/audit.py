"""Start-up audit of a compiled step: the state must be updated in place.

Aliasing alone is not enough: a leaf that is read after its write is copied first, so the compiled
text is searched for copies of anything shaped like a state leaf, too. A step that fails the audit
is refused with the leaf's name.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xjax.errors import LoadError

_ALIAS = re.compile(r"\{(\d*)\}:\s*\((\d+),")
_COPY = re.compile(r"=\s*(\w+)\[([\d,]*)\]\S*\s+copy(?:-start)?\(")
_SMALL = 64 << 10  # copies of leaves below this many bytes are not worth a refusal

_HLO_DTYPES = {
    "float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "s32", "int8": "s8",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2",
}  # fmt: skip


@dataclass(frozen=True)
class AuditReport:
    """What the audit saw of one program, in bytes."""

    aliased: int
    temporary: int


def audit_donation(
    compiled: jax.stages.Compiled, *, donated: object, first_argument: int, name: str, max_temporary: int
) -> AuditReport:
    """Check that a compiled program updates `donated` in place.

    donated          the abstract pytree that was donated; of what has a sharding each device's part is meant
    first_argument   number of flat arguments in front of its leaves
    Raises LoadError naming the program and the leaf.
    """
    leaves = jax.tree_util.tree_flatten_with_path(donated)[0]
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    shapes = [_shard_shape(leaf) for _, leaf in leaves]
    sizes = [math.prod(shape) * leaf.dtype.itemsize for shape, (_, leaf) in zip(shapes, leaves, strict=True)]
    text = compiled.as_text() or ""
    aliased = _aliased_arguments(text)
    for i, (leaf_name, size) in enumerate(zip(names, sizes, strict=True)):
        if size and first_argument + i not in aliased:
            raise LoadError(
                f"step {name}: state leaf {leaf_name} is copied instead of updated in place (not aliased)"
            )
    shaped = {}
    for leaf_name, size, shape, (_, leaf) in zip(names, sizes, shapes, leaves, strict=True):
        if size >= _SMALL:
            shaped[(_hlo_dtype(leaf.dtype), ",".join(str(dim) for dim in shape))] = leaf_name
    for dtype, dims in _COPY.findall(text):
        if (dtype, dims) in shaped:
            raise LoadError(
                f"step {name}: the compiler copies a buffer like state leaf {shaped[dtype, dims]}"
            )
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise LoadError(f"step {name}: the compiler does not tell what memory it uses")
    report = AuditReport(analysis.alias_size_in_bytes, analysis.temp_size_in_bytes)
    if report.aliased < sum(sizes):
        raise LoadError(
            f"step {name}: {report.aliased} bytes are updated in place, the state has {sum(sizes)}"
        )
    if report.temporary > max_temporary:
        raise LoadError(
            f"step {name}: {report.temporary} bytes of temporaries, expected at most {max_temporary}"
        )
    return report


def _shard_shape(leaf: Any) -> tuple[int, ...]:
    """Shape of a leaf in the compiled text, which is the program of one device."""
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def _hlo_dtype(dtype: np.dtype) -> str:
    return _HLO_DTYPES[dtype.name]


def _aliased_arguments(text: str) -> set[int]:
    """Numbers of the flat arguments that an output shares its buffer with."""
    start = text.find("input_output_alias={")
    if start < 0:
        return set()
    depth, stop = 0, start
    for stop in range(text.index("{", start), len(text)):
        depth += {"{": 1, "}": -1}.get(text[stop], 0)
        if depth == 0:
            break
    return {int(argument) for _, argument in _ALIAS.findall(text[start : stop + 1])}


def pointers(tree: object) -> Sequence[int]:
    """Buffer addresses of every leaf, to see that a step kept them. Takes no view of any."""
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]
