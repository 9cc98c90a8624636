"""How fused weights lie for the devices that share a model, and what of a config follows from it.

    qkv       K * copies heads: more devices than kv heads hold copies of these, each for its query heads
    gate_up   a block of rows for each device: its part of the gate, then its part of the rest

Both as if each device had a small model of its own, so that no step moves rows between devices.
"""

from dataclasses import dataclass, replace
from typing import Any

from xjax.errors import LoadError


@dataclass(frozen=True)
class Layout:
    """What fused weights were laid out for.

    num_devices   how many share the model
    kv_copies     how often each kv head of the checkpoint is there; a config's `num_kv_heads` counts them
    """

    num_devices: int = 1
    kv_copies: int = 1

    def blocks(self, ffn_dim: int) -> int:
        """Runs of rows that a gate and its other half lie in; 1 where they do not divide evenly."""
        return self.num_devices if ffn_dim % self.num_devices == 0 else 1


def split_config(config: Any, num_devices: int) -> Any:
    """Change a config, as it was read, to what the model is on `num_devices` devices.

    Raises LoadError that names the numbers that would do when heads do not divide evenly.
    """
    if num_devices == 1:
        return config
    heads, kv_heads = config.num_heads, config.num_kv_heads

    def divides(count: int) -> bool:
        return heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)

    if not divides(num_devices):
        valid = ", ".join(str(count) for count in range(1, heads + 1) if divides(count))
        raise LoadError(
            f"--tensor-parallel {num_devices}: {heads} query heads and {kv_heads} kv heads cannot be shared "
            f"evenly; this model goes on {valid} devices"
        )
    copies = max(num_devices // kv_heads, 1)
    return replace(config, num_kv_heads=kv_heads * copies, layout=Layout(num_devices, copies))


def whole_config(config: Any) -> Any:
    """Undo `split_config`: the config of the same model on one device."""
    layout = config.layout
    if layout == Layout():
        return config
    return replace(config, num_kv_heads=config.num_kv_heads // layout.kv_copies, layout=Layout())
