"""AWQ in its "gemm" form: 4-bit codes packed along the outputs, eight a word in an order of their own.

qweight  [In, Out / 8]  int32
qzeros   [G, Out / 8]   int32
scales   [G, Out]       float
"""

from collections.abc import Mapping
from functools import partial

import numpy as np

from xjax.checkpoints.quantized.codes import (
    NUMBER_TYPES,
    Codes,
    QuantizedView,
    Stored,
    check,
    from_unsigned,
    scales_by_output,
    whole_numbers,
)
from xjax.checkpoints.quantized.modules import Parts, part, parts_by_module
from xjax.checkpoints.quantized.packing import Bytes
from xjax.checkpoints.quantized.settings import Settings
from xjax.errors import LoadError

PARTS = ("qweight", "qzeros", "scales")
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word, lowest first, the code of each output lies


def find(settings: Settings, tensors: Mapping[str, Stored]) -> tuple[dict[str, QuantizedView], set[str]]:
    """Find the quantized matrices of a folder: views by name, and the tensors they are made of."""
    form = "checkpoint_format" if "checkpoint_format" in settings.values else "version"
    if str(settings.values.get(form, "gemm")).lower() != "gemm":
        raise settings.refuse(form, "'gemm'; export the model again in that form")
    settings.choice("bits", None, (4,))
    settings.choice("zero_point", True, (True, False))
    group_size = settings.integer("group_size", 128)
    views, used = dict[str, QuantizedView](), set[str]()
    for module, parts in parts_by_module(tensors, PARTS).items():
        used |= {view.name for view in parts.values()}
        views[f"{module}.weight"] = _view(module, parts, group_size)
    return views, used


def _view(module: str, parts: Parts, group_size: int) -> QuantizedView:
    """Check the tensors of a module against each other."""
    qweight, qzeros, scales = (part(parts, module, name) for name in PARTS)
    if len(qweight.shape) != 2:
        raise LoadError(
            f"{qweight.file}: tensor {qweight.name} must have two dimensions, found {qweight.shape}"
        )
    num_in, num_out = qweight.shape[0], qweight.shape[1] * 8
    group_size = num_in if group_size == -1 else group_size
    check(qweight, (num_in, num_out // 8), ("int32",))
    if not num_in or num_in % group_size:
        raise LoadError(
            f"{qweight.file}: tensor {qweight.name} has {num_in} inputs, "
            f"which are not whole groups of {group_size}"
        )
    check(qzeros, (num_in // group_size, num_out // 8), ("int32",))
    check(scales, (num_in // group_size, num_out), NUMBER_TYPES)
    return QuantizedView(
        f"{module}.weight", (num_out, num_in), "awq", (qweight, qzeros, scales), partial(_read, dict(parts)),
    )  # fmt: skip


def _read(parts: Parts) -> Codes:
    codes, zeros = (_unpack(parts[name]) for name in ("qweight", "qzeros"))
    return from_unsigned(codes, np.ascontiguousarray(zeros.T), scales_by_output(parts["scales"]), 4)


def _unpack(view: Stored) -> Bytes:
    """Unpack words along the outputs: [In, Out / 8] int32 -> [In, Out] uint8."""
    words = whole_numbers(view)
    data = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    out = np.empty((*words.shape, 8), np.uint8)
    for output, place in enumerate(_PLACES):
        byte = data[:, :, place // 2]
        out[:, :, output] = byte >> np.uint8(4) if place % 2 else byte & np.uint8(15)
    return out.reshape(len(words), -1)
