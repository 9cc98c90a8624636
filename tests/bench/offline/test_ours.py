"""What a tree of parameters weighs, whatever holds its codes."""

from dataclasses import dataclass

import numpy as np
import pytest

from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.engine.build import load_model
from xjax_server.bench.loading.files import Shape, write_model
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


@pytest.mark.device
@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_take_their_codes(tmp_path, tied):
    shape = Shape(layers=2, embed=256, ffn=512, heads=4, kv_heads=2, vocab=320, tied=tied)
    checkpoint = open_checkpoint(write_model(tmp_path, "gguf-q4_k", shape))
    params = load_model(checkpoint, dtype="float32", kernels="numba").params
    stored = {name: view for name, view in checkpoint.tensors.items() if "rope" not in name}
    numbers, size = count_weights(params)
    assert numbers == sum(int(np.prod(view.shape)) for view in stored.values())
    # A record has the codes of the file and as many bytes of scales, or a few more.
    assert 1 <= size / sum(view.num_bytes for view in stored.values()) < 1.1
    assert count_weights(params.embed)[0] == 320 * 256
