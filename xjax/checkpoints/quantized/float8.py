"""The method "fp8" as DeepSeek, Qwen and transformers write it: 8-bit floats, a scale for each block.

weight             [Out, In]               float8
weight_scale_inv   [Out / 128, In / 128]   float, or uint8 for powers of two ("ue8m0"); what a code
                                           is multiplied by, whatever its name says
weight_scale       [] or [1]               float, where no weight_block_size is set
"""

from collections.abc import Mapping
from functools import partial

from xjax.checkpoints.quantized.codes import NUMBER_TYPES, Codes, QuantizedView, Stored
from xjax.checkpoints.quantized.modules import Parts, part, parts_by_module
from xjax.checkpoints.quantized.scales import (
    FLOAT8_TYPES,
    check_scales,
    matrix_shape,
    read_matrix,
    read_scales,
)
from xjax.checkpoints.quantized.settings import Settings

_SCALES = ("weight_scale_inv", "weight_scale")
_ACTIVATIONS = ("input_scale", "activation_scale", "k_scale", "v_scale", "q_scale")


def find(settings: Settings, tensors: Mapping[str, Stored]) -> tuple[dict[str, QuantizedView], set[str]]:
    """Find the quantized matrices of a folder: views by name, and the tensors they are made of."""
    block = settings.block("weight_block_size")
    settings.choice("fmt", "e4m3", ("e4m3", "e5m2"))
    scale_types = NUMBER_TYPES
    if settings.choice("scale_fmt", "float", ("float", "ue8m0")) == "ue8m0":
        scale_types = (*NUMBER_TYPES, "uint8")
    views, used = dict[str, QuantizedView](), set[str]()
    for module, parts in parts_by_module(tensors, ("weight", *_SCALES, *_ACTIVATIONS)).items():
        used |= {view.name for name, view in parts.items() if name in _ACTIVATIONS}
        scaled = {name: view for name, view in parts.items() if name not in _ACTIVATIONS}
        if scaled.keys() & set(_SCALES) or ("weight" in scaled and scaled["weight"].dtype in FLOAT8_TYPES):
            used |= {view.name for view in scaled.values()}
            views[f"{module}.weight"] = _view(module, scaled, block, scale_types)
    return views, used


def _view(
    module: str, parts: Parts, block: tuple[int, int] | None, scale_types: tuple[str, ...]
) -> QuantizedView:
    """Check the tensors of a module against each other."""
    weight = part(parts, module, "weight")
    scales = part(parts, module, next((name for name in _SCALES if name in parts), _SCALES[0]))
    shape = matrix_shape(weight, FLOAT8_TYPES)
    if block is None:  # one scale, or one for each output
        block = (1, shape[1]) if scales.shape in ((shape[0],), (shape[0], 1)) else shape
    check_scales(scales, shape, block, scale_types)
    return QuantizedView(
        f"{module}.weight", shape, "fp8", (weight, scales),
        partial(_read, weight, scales, shape, block),
    )  # fmt: skip


def _read(weight: Stored, scales: Stored, shape: tuple[int, int], block: tuple[int, int]) -> Codes:
    codes, kind = read_matrix(weight)
    return Codes(codes, read_scales(scales, shape, block), None, None, kind)
