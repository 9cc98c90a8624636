"""GPTQ as AutoGPTQ and GPTQModel write it: codes packed along the inputs, zeros along the outputs.

qweight  [In * bits / 32, Out]  int32   eight 4-bit codes of an output in a word, the first lowest
qzeros   [G, Out * bits / 32]   int32   less one each, but in `checkpoint_format` "gptq_v2"
scales   [G, Out]               float
g_idx    [In]                   int32   the group of each input (desc_act), or not there
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from xjax.checkpoints.quantized.codes import (
    NUMBER_TYPES,
    Codes,
    QuantizedView,
    Stored,
    check,
    from_unsigned,
    from_words,
    inputs_by_group,
    scales_by_output,
    whole_numbers,
)
from xjax.checkpoints.quantized.modules import Parts, part, parts_by_module
from xjax.checkpoints.quantized.packing import Bytes, unpack_rows, unpack_words
from xjax.checkpoints.quantized.settings import Settings, matches
from xjax.errors import LoadError

PARTS = ("qweight", "qzeros", "scales", "g_idx")
BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class _Scheme:
    bits: int
    group_size: int  # -1: all inputs
    is_v2: bool


def find(settings: Settings, tensors: Mapping[str, Stored]) -> tuple[dict[str, QuantizedView], set[str]]:
    """Find the quantized matrices of a folder: views by name, and the tensors they are made of."""
    form = settings.choice("checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    settings.choice("pack_dtype", "int32", ("int32",))
    scheme = _Scheme(
        settings.choice("bits", None, BITS), settings.integer("group_size", -1), form == "gptq_v2"
    )
    views, used = dict[str, QuantizedView](), set[str]()
    for module, parts in parts_by_module(tensors, PARTS).items():
        used |= {view.name for view in parts.values()}
        views[f"{module}.weight"] = _view(module, parts, _scheme_of(module, scheme, settings))
    return views, used


def _scheme_of(module: str, scheme: _Scheme, settings: Settings) -> _Scheme:
    """The scheme of a module: `dynamic` gives some their own, by the first pattern that fits."""
    own = settings.table("dynamic")
    for pattern in own.values if own else ():
        assert own is not None
        if not pattern.startswith("-:") and matches(pattern.removeprefix("+:"), module, own.where):
            found = own.table(pattern)
            if found is not None:
                return replace(
                    scheme,
                    bits=found.choice("bits", scheme.bits, BITS),
                    group_size=found.integer("group_size", scheme.group_size),
                )
    return scheme


def _view(module: str, parts: Parts, scheme: _Scheme) -> QuantizedView:
    """Check the tensors of a module against each other."""
    qweight, qzeros, scales = (part(parts, module, name) for name in PARTS[:3])
    bits = scheme.bits
    for matrix in (qweight, scales):
        if len(matrix.shape) != 2:
            raise LoadError(
                f"{matrix.file}: tensor {matrix.name} must have two dimensions, found {matrix.shape}"
            )
    num_out, num_in = qweight.shape[1], qweight.shape[0] * 32 // bits
    group_size = num_in if scheme.group_size == -1 else scheme.group_size
    check(qweight, (num_in * bits // 32, num_out), ("int32",))
    if not num_in or num_in % group_size:
        raise LoadError(
            f"{qweight.file}: tensor {qweight.name} has {num_in} inputs of {bits} bits, "
            f"which are not whole groups of {group_size}"
        )
    groups = num_in // group_size
    check(scales, (groups, num_out), NUMBER_TYPES)
    check(qzeros, (groups, -(-num_out * bits // 32)), ("int32",))
    if "g_idx" in parts:
        check(parts["g_idx"], (num_in,), ("int32", "int64"))
    return QuantizedView(
        f"{module}.weight", (num_out, num_in), "gptq", tuple(parts[name] for name in PARTS if name in parts),
        partial(_read, dict(parts), scheme, num_in, group_size),
    )  # fmt: skip


def _read(parts: Parts, scheme: _Scheme, num_in: int, group_size: int) -> Codes:
    order = None
    if "g_idx" in parts:
        order = inputs_by_group(parts["g_idx"], num_in // group_size, group_size)
    scales = scales_by_output(parts["scales"])
    zeros = _zeros(whole_numbers(parts["qzeros"]), len(scales), scheme)
    words = whole_numbers(parts["qweight"])
    if order is None:
        return from_words(np.ascontiguousarray(words.T), num_in, zeros, scales, scheme.bits)
    return from_unsigned(unpack_rows(words, scheme.bits)[:num_in], zeros, scales, scheme.bits, order)


def _zeros(words: npt.NDArray[np.int32], num_out: int, scheme: _Scheme) -> Bytes:
    """Unpack the zeros.

    words    [G, Out * bits / 32]  int32
    returns  [Out, G]              uint8

    The writers subtract one from each code in whole words, with borrows between neighbours, so it is
    added to whole words too; 3-bit codes go over the ends of words and are counted singly.
    """
    bits = scheme.bits
    if not scheme.is_v2 and bits != 3:
        ones = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        words = (words.view(np.uint32) + ones).view(np.int32)
    zeros = unpack_words(words, bits)[:, :num_out].T
    if not scheme.is_v2 and bits == 3:
        zeros = (zeros + np.uint8(1)) & np.uint8(7)
    return np.ascontiguousarray(zeros)
