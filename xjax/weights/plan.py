"""Which tensors of a checkpoint make each array of a family's tree, and how: names, shapes, layouts.

Everything is checked here, before a byte of a tensor is read. What a tensor's bytes mean is known to
xjax.checkpoints, what an array is for to xjax.models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from xjax.checkpoints.blocks import SPLITTERS
from xjax.checkpoints.checkpoint import Checkpoint, QuantizedView, TensorView, View
from xjax.errors import LoadError
from xjax.models.family import Family
from xjax.state.mesh import ParamSpec
from xjax.weights.fuse import Fuse, fuse_qkv, interleave, repeat_heads, shift, stack, stack_experts
from xjax.weights.names import Names, names_for, text_name, unexplained

_GATED = ("feed_forward.gate_up", "feed_forward.gate_up_bias", "feed_forward.shared.gate_up")
# What models use as the weights of a product alone, and may so be codes.
_PRODUCTS = frozenset(
    {"attention.qkv", "attention.o", "head"}
    | {f"feed_forward.{part}" for part in ("gate_up", "down", "shared.gate_up", "shared.down")}
)


_WHOLE_NUMBERS = ("int", "uint", "bool")  # types that hold codes of something else, never weights


@dataclass(frozen=True)
class LeafPlan:
    """How one array is made: its spec, the tensors, and how they are put together.

    is_codes    whether all tensors are codes and may stay so
    is_packed   whether codes shall be packed: blocks, or what `is_codes` where a form is there for it
    """

    spec: ParamSpec
    views: tuple[View, ...]
    fuse: Fuse
    is_codes: bool = False
    is_packed: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors in the file."""
        return sum(view.num_bytes for view in self.views)


class Planner:
    """Finds the tensors of one checkpoint for one family and checks their shapes.

    packs   whether GGUF blocks of matrices that are only multiplied or looked up stay codes
    """

    def __init__(self, checkpoint: Checkpoint, family: Family, config: Any, *, packs: bool = False) -> None:
        self._packs = packs
        self._checkpoint, self._naming, self._config = checkpoint, family.naming, config
        self._is_gguf = checkpoint.kind == "gguf"
        changes = family.naming.gguf if self._is_gguf else family.naming.hf
        self._names: Names = names_for(checkpoint.kind, changes)
        self._views = {
            short: view for name, view in checkpoint.tensors.items() if (short := text_name(name)) is not None
        }
        self._used: set[str] = set()

    def plan(self, path: Sequence[Any], spec: ParamSpec) -> LeafPlan:
        """Plan the array at a path of the tree, a key path as jax.tree_util has it."""
        layer_id = path[1].idx if path[0].name == "layers" else None
        field = ".".join(part.name for part in (path if layer_id is None else path[2:]))
        names = self._names.of(field, layer_id, self._views)
        is_each = "{}" in names[0]  # of the experts has a tensor of its own
        numbers = range(spec.shape[0] if is_each else 1)
        views = tuple(self._find(name.format(i), spec.shape) for i in numbers for name in names)
        if field in ("feed_forward.experts.gate_up", "feed_forward.experts.down"):
            is_gated = field.endswith("gate_up")
            blocks = self._config.layout.blocks(spec.shape[1] // 2) if is_gated else 1
            shapes, fuse = _experts_recipe(spec, len(views), is_each, blocks)
        else:
            shapes, fuse = self._recipe(field, spec, len(views))
        for view, shape in zip(views, shapes, strict=True):
            if not isinstance(view, QuantizedView) and view.dtype.startswith(_WHOLE_NUMBERS):
                raise LoadError(f"{view.file}: tensor {view.name} holds {view.dtype}, no weights")
            if view.shape != shape:
                expected = f"must have shape {shape}, found {view.shape}"
                raise LoadError(f"{view.file}: tensor {view.name} {expected}")
        is_codes = field in _PRODUCTS and all(isinstance(view, QuantizedView) for view in views)
        return LeafPlan(spec, views, fuse, is_codes, self._is_packed(field, views))

    def _is_packed(self, field: str, views: Sequence[View]) -> bool:
        """Whether a field is made of blocks that can be taken apart; of a fused one some suffice."""
        if not self._packs or field not in _PRODUCTS | {"embed"}:
            return False
        if all(isinstance(view, QuantizedView) for view in views):
            return field in _PRODUCTS
        return any(view.dtype in SPLITTERS for view in views if isinstance(view, TensorView))

    def _find(self, name: str, shape: Sequence[int]) -> View:
        if name not in self._views:
            raise LoadError(f"{self._checkpoint.path}: tensor {name} is missing")
        self._used.add(name)
        view = self._views[name]
        # Some files have a matrix of one row as a vector.
        is_row = len(view.shape) == 1 and (1, *view.shape) == shape
        return replace(view, shape=tuple(shape)) if is_row else view

    def _recipe(
        self, field: str, spec: ParamSpec, num_tensors: int
    ) -> tuple[Sequence[tuple[int, ...]], Fuse]:
        """Shapes of the tensors of a field and the function that puts them together."""
        rest, naming, config = spec.shape[1:], self._naming, self._config
        copies = config.layout.kv_copies
        if field in ("attention.qkv", "attention.qkv_bias"):
            heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
            pairs = config.rope.dim if (naming.gguf_pairs if self._is_gguf else naming.hf_pairs) else 0
            fuse = partial(fuse_qkv, num_kv_heads=kv_heads, head_dim=dim, pairs=pairs, copies=copies)
            counts = (heads, kv_heads // copies, kv_heads // copies)
            if num_tensors == 1:
                return [(sum(counts) * dim, *rest)], fuse
            return [(count * dim, *rest) for count in counts], fuse
        if field in _GATED and config.parts.is_gated:
            size = spec.shape[0] // num_tensors
            blocks = config.layout.blocks(spec.shape[0] // 2)
            fuse = partial(interleave, blocks=blocks) if blocks > 1 else stack
            return [(size, *rest)] * num_tensors, fuse
        if field == "attention.k_norm" and config.parts.qk_norm == "whole" and copies > 1:
            fuse = partial(repeat_heads, head_dim=config.head_dim, copies=copies)
            return [(spec.shape[0] // copies,)], fuse
        offset = 0.0 if self._is_gguf or not field.endswith("norm") else naming.hf_norm_offset
        return [spec.shape], partial(shift, offset=offset) if offset else stack

    def check_all_used(self, *, tied: bool) -> None:
        """Refuse a checkpoint that holds tensors the model has no place for."""
        head = self._names.fields["head"] if tied else ()
        left = [name for name in unexplained(self._views, self._used, head) if not self._is_empty_bias(name)]
        if left:
            view = self._views[left[0]]
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise LoadError(
                f"{view.file}: tensor {view.name}{more} has no place in the model its config describes"
            )

    def _is_empty_bias(self, name: str) -> bool:
        """Whether this is one of the zeros that some writers of quantized modules put beside each."""
        weight = self._views.get(name.removesuffix(".bias") + ".weight")
        if not name.endswith(".bias") or not isinstance(weight, QuantizedView):
            return False
        bias = self._views[name]
        return bias.shape == weight.shape[:1] and not bias.read().any()


def _experts_recipe(
    spec: ParamSpec, num_tensors: int, is_each: bool, blocks: int
) -> tuple[Sequence[tuple[int, ...]], Fuse]:
    """The same of the experts' weights [X, Out, In]: stacks of all, or a tensor each."""
    count, rows, *rest = spec.shape
    fuse = partial(stack_experts, blocks=blocks)
    if is_each:
        return [(rows * count // num_tensors, *rest)] * num_tensors, fuse
    return [(count, rows // num_tensors, *rest)] * num_tensors, fuse
