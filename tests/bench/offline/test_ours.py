"""What a tree of parameters weighs, whatever holds its codes."""

from dataclasses import dataclass

import numpy as np

from xjax_server.bench.offline.ours import count_weights


@dataclass
class Codes:
    """Two to a byte, a scale for 32."""

    codes: np.ndarray
    scales: np.ndarray
    minimum: np.ndarray | None
    kind: str
    shape: tuple[int, int]


@dataclass
class Form:
    """How codes lie; it can tell shapes, and is no matrix."""

    name: str = "q4_1"

    def shape(self, num_out: int) -> tuple[int, int]:
        return num_out, 4


@dataclass
class Records:
    """Codes with their scales, in records."""

    data: np.ndarray
    form: Form
    shape: tuple[int, int]


@dataclass
class Layer:
    qkv: Codes
    norm: np.ndarray
    rest: dict


def test_codes_count_as_numbers_and_their_parts_as_bytes():
    codes = Codes(np.zeros((8, 32), np.uint8), np.zeros((8, 2), np.float16), None, "int4", (8, 64))
    assert count_weights(codes) == (512, 256 + 32)
    layer = Layer(codes, np.zeros(64, np.float32), {"bias": np.zeros(3, np.float32), "none": None})
    assert count_weights((layer, [layer])) == (2 * (512 + 64 + 3), 2 * (288 + 256 + 12))
    assert count_weights(None) == (0, 0)
    assert count_weights(Records(np.zeros((4, 40), np.uint8), Form(), (64, 32))) == (2048, 160)
