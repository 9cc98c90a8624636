"""One array out of the tensors of its plan, in parts that threads can share.

    tensor in its file:   part | part | part        some rows each
                            |      |      |         decoded, in the array's dtype
    array:                rows where the plan's `fuse` puts them

Rows that stay together are decoded right where they belong, others by way of a slab that a cache holds:
beside the array itself a part takes next to no memory. Knows no device.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from xjax.checkpoints.checkpoint import QuantizedView, TensorView, View
from xjax.weights.fuse import Array
from xjax.weights.plan import LeafPlan

Rows = npt.NDArray[np.intp]

PART = 1 << 21  # elements of a part
SLAB = 1 << 16  # elements that a cache holds


def parts_of(plan: LeafPlan, out: Array) -> Iterator[Callable[[], None]]:
    """List what fills an array: functions that may run in any order and at once.

    out   [*spec.shape]   C-contiguous; written when they run
    """
    targets = targets_of(plan)
    if targets is None:
        yield lambda: plan.fuse(out, [view.read() for view in plan.views])
        return
    rows = out.reshape(-1, out.shape[-1])
    step = max(1, PART // rows.shape[1])
    for view, target in zip(plan.views, targets, strict=True):
        if isinstance(view, QuantizedView):
            yield partial(_read_whole, view, rows, target)
            continue
        for first in range(0, len(target), step):
            yield partial(read_part, view, first, rows, target[first : first + step])


def targets_of(plan: LeafPlan) -> list[Rows] | None:
    """Where the rows of each tensor go; None where `fuse` does more than move them, or for a vector.

    A plan's `fuse` moves rows whatever they hold: it is given their numbers.
    """
    shape, views = plan.spec.shape, plan.views
    counts = [view.num_elements // view.num_columns for view in views]
    num_rows = int(np.prod(shape[:-1]))
    if len(shape) < 2 or sum(counts) != num_rows or any(view.shape[-1:] != shape[-1:] for view in views):
        return None
    ends = np.cumsum(counts)
    numbers = np.split(np.arange(num_rows), ends[:-1])
    sources = np.empty(shape[:-1], np.intp)
    plan.fuse(sources, [part.reshape(view.shape[:-1]) for part, view in zip(numbers, views, strict=True)])
    targets = np.full(num_rows, -1, np.intp)
    targets[sources.reshape(-1)] = np.arange(num_rows)
    assert targets.min() >= 0, "a row is left out"
    return np.split(targets, ends[:-1])


def _read_whole(view: View, rows: Array, target: Rows) -> None:
    """Read all rows of a tensor, each into its row of `rows` [all rows, columns]."""
    rows[target] = view.read()


def read_part(view: TensorView, first: int, rows: Array, target: Rows) -> None:
    """Read the rows of a tensor from `first` on, each into its row of `rows` [all rows, columns]."""
    if np.all(np.diff(target) == 1):
        view.read_rows(rows[target[0] : target[0] + len(target)], first)
        return
    step = max(1, SLAB // rows.shape[1])
    slab = np.empty((step, rows.shape[1]), rows.dtype)
    for start in range(0, len(target), step):
        places = target[start : start + step]
        view.read_rows(slab[: len(places)], first + start)
        rows[places] = slab[: len(places)]
