"""State of fixed size for each sequence, for layers that keep no pages.

Slots 0..R-1 belong to running rows, R takes what padding writes, R+1 is zero for ever (a new
sequence reads it), then come Q snapshot slots. A step reads one slot and writes another, so a
snapshot costs nothing but its write.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from xjax.config import RecurrentLayer


@struct.dataclass
class Recurrent:
    """Slots of one layer.

    s      [R+2+Q, H, Dk, Dv]   float32
    conv   [R+2+Q, C, W-1]      float32, the last inputs of the convolution
    """

    s: jax.Array
    conv: jax.Array


def trash_slot(num_rows: int) -> int:
    """Slot that padding writes to, for R = `num_rows`."""
    return num_rows


def zero_slot(num_rows: int) -> int:
    """Slot that is always zero, for R = `num_rows`."""
    return num_rows + 1


def abstract_recurrent(layer: RecurrentLayer, num_rows: int, num_snapshots: int) -> Recurrent:
    """Describe the slots of one layer with ShapeDtypeStructs."""
    slots = num_rows + 2 + num_snapshots
    leaf: Any = jax.ShapeDtypeStruct
    return Recurrent(
        s=leaf((slots, layer.num_heads, layer.key_dim, layer.value_dim), jnp.float32),
        conv=leaf((slots, layer.conv_channels, max(layer.conv_width - 1, 0)), jnp.float32),
    )


def slot_bytes(layers: tuple[Recurrent | None, ...]) -> int:
    """Bytes of one slot in all layers, abstract or real."""
    return sum(
        leaf.size // leaf.shape[0] * leaf.dtype.itemsize
        for layer in layers
        if layer is not None
        for leaf in (layer.s, layer.conv)
    )
