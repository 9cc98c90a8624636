"""The compressed-tensors method: schemes for groups of modules, each in one of several forms.

    pack-quantized                     weight_packed      [Out, In * bits / 32]     int32
                                       weight_shape       [2]                       int64
                                       weight_zero_point  [Out * bits / 32, In / g] int32, or int8 unpacked
                                       weight_g_idx       [In]                      int32, -1: not used
    int-, float-, naive-quantized      weight             [Out, In]                 int8 or float8
                                       weight_zero_point  as the scales             int8
    all                                weight_scale       of the strategy: a tensor, channels, groups, blocks

What a scheme says of activations and of the cache is not followed: weights alone are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from xjax.checkpoints.quantized.codes import (
    Codes,
    QuantizedView,
    Stored,
    check,
    from_words,
    inputs_by_group,
    whole_numbers,
)
from xjax.checkpoints.quantized.modules import Parts, part, parts_by_module
from xjax.checkpoints.quantized.packing import unpack_words
from xjax.checkpoints.quantized.scales import (
    FLOAT8_TYPES,
    by_group,
    check_scales,
    matrix_shape,
    narrowed,
    read_matrix,
    read_scales,
)
from xjax.checkpoints.quantized.settings import Settings, matches
from xjax.errors import LoadError

FORMS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_OWN_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
_ACTIVATIONS = tuple(
    f"{what}_{kind}" for what in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point")
)
_BYTE_TYPES = ("int8", *FLOAT8_TYPES)


@dataclass(frozen=True)
class _Scheme:
    """How the weights of some modules are stored; `block`: inputs that share a scale, and outputs."""

    form: str
    bits: int
    is_symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int] | None

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Outputs and inputs of a matrix that share a scale."""
        if self.strategy == "block" and self.block is not None:
            return self.block
        return {"tensor": shape, "channel": (1, shape[1])}.get(self.strategy, (1, self.group_size))


def find(settings: Settings, tensors: Mapping[str, Stored]) -> tuple[dict[str, QuantizedView], set[str]]:
    """Find the quantized matrices of a folder: views by name, and the tensors they are made of."""
    for key in ("sparsity_config", "transform_config"):
        extra = settings.table(key)
        if extra is not None and extra.values and extra.values.get("format") != "dense":
            raise LoadError(f"{settings.where}.{key} is not supported; take a model without it")
    schemes = _schemes(settings)
    views, used = dict[str, QuantizedView](), set[str]()
    for module, parts in parts_by_module(tensors, ("weight", *_OWN_PARTS, *_ACTIVATIONS)).items():
        used |= {view.name for name, view in parts.items() if name in _ACTIVATIONS}
        own = {name: view for name, view in parts.items() if name not in _ACTIVATIONS}
        is_coded = "weight" in own and own["weight"].dtype in _BYTE_TYPES
        if not is_coded and not own.keys() & set(_OWN_PARTS):
            continue
        used |= {view.name for view in own.values()}
        scheme = _scheme_of(module, schemes, settings.where)
        if scheme is None:
            view = next(iter(own.values()))
            raise LoadError(
                f"{view.file}: tensor {view.name}: no target of {settings.where} names its module"
            )
        make = _packed if scheme.form == FORMS[0] else _plain
        views[f"{module}.weight"] = make(module, own, scheme)
    return views, used


def _schemes(settings: Settings) -> dict[str, _Scheme]:
    """Schemes by the target that they are for; a target without weights is left out."""
    groups, found = settings.table("config_groups"), dict[str, _Scheme]()
    if groups is None:
        raise settings.refuse("config_groups", "an object of schemes")
    for name in groups.values:
        group = groups.table(name)
        weights = None if group is None else group.table("weights")
        if group is not None and weights is not None:
            form = group.values.get("format") or settings.values.get("format")
            if form not in FORMS:
                raise LoadError(
                    f"{group.where}: format {form!r} is not supported; take one of {', '.join(FORMS)}"
                )
            found |= dict.fromkeys(group.texts("targets"), _scheme(weights, form))
    return found


def _scheme(weights: Settings, form: str) -> _Scheme:
    kind = weights.choice("type", "int", ("int", "float"))
    bits = weights.choice("num_bits", 8, (8,) if kind == "float" else (2, 4, 8))
    group_size, block = weights.integer("group_size", -1), weights.block("block_structure")
    default = "group" if group_size > 0 else "block" if block else "tensor"
    strategy = weights.choice("strategy", default, ("tensor", "channel", "group", "block"))
    if (kind == "float") != (form == "float-quantized") and form != "naive-quantized":
        raise weights.refuse("type", f"one that {form} can hold")
    if strategy == "block" and form == "pack-quantized":
        raise weights.refuse("strategy", "'tensor', 'channel' or 'group' for packed codes")
    if strategy == "block" and block is None:
        raise weights.refuse("block_structure", "two whole numbers above 0")
    if strategy == "group" and group_size < 1:
        raise weights.refuse("group_size", "a whole number above 0")
    return _Scheme(form, bits, weights.flag("symmetric", True), strategy, group_size, block)


def _scheme_of(module: str, schemes: Mapping[str, _Scheme], where: str) -> _Scheme | None:
    """The scheme of a module: by its name, by a pattern, or by its class."""
    if module in schemes:
        return schemes[module]
    for target, scheme in schemes.items():
        if target.startswith("re:") and matches(target[3:], module, where):
            return scheme
    return schemes.get("Embedding" if module.endswith("embed_tokens") else "Linear")


def _in_order(parts: Parts) -> tuple[Stored, ...]:
    return tuple(parts[name] for name in ("weight", *_OWN_PARTS) if name in parts)


def _check_groups(view: Stored, num_in: int, scheme: _Scheme) -> None:
    if scheme.strategy == "group" and num_in % scheme.group_size:
        raise LoadError(
            f"{view.file}: tensor {view.name} has {num_in} inputs, "
            f"which are not whole groups of {scheme.group_size}"
        )


def _packed(module: str, parts: Parts, scheme: _Scheme) -> QuantizedView:
    """Check the tensors of a packed module against each other."""
    packed, scales = part(parts, module, "weight_packed"), part(parts, module, "weight_scale")
    stated = check(part(parts, module, "weight_shape"), (2,), ("int64", "int32"))
    num_out, num_in = (int(size) for size in whole_numbers(stated))
    if not 0 < num_in < 1 << 32 or not 0 < num_out < 1 << 32:
        raise LoadError(f"{stated.file}: tensor {stated.name} must hold two sizes, found {num_out}, {num_in}")
    shape = (num_out, num_in)
    check(packed, (num_out, -(-num_in * scheme.bits // 32)), ("int32",))
    _check_groups(packed, num_in, scheme)
    check_scales(scales, shape, scheme.block_of(shape))
    zeros = parts.get("weight_zero_point")
    if zeros is None and not scheme.is_symmetric:
        part(parts, module, "weight_zero_point")
    if zeros is not None and zeros.dtype == "int8":
        check_scales(zeros, shape, scheme.block_of(shape), ("int8",))
    elif zeros is not None:
        groups = num_in // scheme.block_of(shape)[1]
        check(zeros, (-(-num_out * scheme.bits // 32), groups), ("int32",))
    if "weight_g_idx" in parts:
        check(parts["weight_g_idx"], (num_in,), ("int32", "int64"))
    return QuantizedView(
        f"{module}.weight", shape, "compressed-tensors", _in_order(parts),
        partial(_read_packed, dict(parts), shape, scheme),
    )  # fmt: skip


def _read_packed(parts: Parts, shape: tuple[int, int], scheme: _Scheme) -> Codes:
    block = scheme.block_of(shape)
    order, zeros = None, None
    if "weight_g_idx" in parts and scheme.strategy == "group":
        groups = shape[1] // scheme.group_size
        order = inputs_by_group(parts["weight_g_idx"], groups, scheme.group_size, unset=-1)
    if "weight_zero_point" in parts:
        zeros = _unsigned_zeros(parts["weight_zero_point"], shape, scheme)
    scales = read_scales(parts["weight_scale"], shape, block)
    words = np.ascontiguousarray(whole_numbers(parts["weight_packed"]))
    return from_words(words, shape[1], zeros, scales, scheme.bits, order)


def _unsigned_zeros(view: Stored, shape: tuple[int, int], scheme: _Scheme) -> npt.NDArray[Any]:
    """Zeros of each output and group, [Out, In / g] uint8, counted from the lowest code."""
    if view.dtype == "int8":
        middle = np.uint8(1 << (scheme.bits - 1))
        return by_group(whole_numbers(view).view(np.uint8) + middle, shape, scheme.block_of(shape))
    words = np.ascontiguousarray(whole_numbers(view).T)  # packed along the outputs
    return np.ascontiguousarray(unpack_words(words, scheme.bits)[:, : shape[0]].T)


def _plain(module: str, parts: Parts, scheme: _Scheme) -> QuantizedView:
    """Check the tensors of a module whose codes take a byte each against each other."""
    weight, scales = part(parts, module, "weight"), part(parts, module, "weight_scale")
    shape = matrix_shape(weight, _BYTE_TYPES)
    _check_groups(weight, shape[1], scheme)
    check_scales(scales, shape, scheme.block_of(shape))
    zeros = parts.get("weight_zero_point")
    if zeros is not None and weight.dtype != "int8" and zeros.raw().any():
        raise LoadError(f"{zeros.file}: tensor {zeros.name} must hold zeros alone beside {weight.dtype}")
    if zeros is None and not scheme.is_symmetric:
        part(parts, module, "weight_zero_point")
    if zeros is not None and weight.dtype == "int8":
        check_scales(zeros, shape, scheme.block_of(shape), ("int8",))
    if "weight_g_idx" in parts:
        check(parts["weight_g_idx"], (shape[1],), ("int32", "int64"))
    return QuantizedView(
        f"{module}.weight", shape, "compressed-tensors", _in_order(parts),
        partial(_read_plain, dict(parts), shape, scheme),
    )  # fmt: skip


def _read_plain(parts: Parts, shape: tuple[int, int], scheme: _Scheme) -> Codes:
    block = scheme.block_of(shape)
    values, kind = read_matrix(parts["weight"])
    zeros, order = None, None
    if "weight_zero_point" in parts and kind == "int8":
        zeros = by_group(whole_numbers(parts["weight_zero_point"]), shape, block)
        zeros = zeros if zeros.any() else None
    if "weight_g_idx" in parts and scheme.strategy == "group":
        groups = shape[1] // scheme.group_size
        order = inputs_by_group(parts["weight_g_idx"], groups, scheme.group_size, unset=-1)
    if order is not None:
        values = values[:, order]
    scales = read_scales(parts["weight_scale"], shape, block)
    return narrowed(Codes(values, scales, zeros, order, kind), scheme.bits)
