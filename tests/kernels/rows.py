"""What `xjax.kernels.rows` makes of a row, called by itself."""

import functools

import numpy as np
from numba import njit

from xjax.kernels import rows

_GATES = {"silu": rows.gate_silu, "gelu_tanh": rows.gate_gelu_tanh, "gelu": rows.gate_gelu}


@functools.cache
def _gate(kind):
    gate = _GATES[kind]

    @njit
    def call(source, target, count):
        gate(source, 0, 0, 0, target, count)

    return call


def activated(kind: str, x: np.ndarray) -> np.ndarray:
    """An activation of numbers, as float32."""
    x, out = np.ascontiguousarray(x, np.float32), np.full(len(x) + 1, 7, np.float32)
    _gate(kind)(x.ctypes.data, out.ctypes.data, len(x))
    assert out[-1] == 7, "written past the end"
    return out[:-1]
