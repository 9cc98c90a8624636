"""Block types against the gguf package's reference decoder, on random bytes, to the bit."""

import time

import gguf
import gguf.quants
import numpy as np
import pytest

from xjax.checkpoints.dequantize import BLOCK_TYPES, SLAB, dequantize, dequantize_into, num_bytes
from xjax.errors import LoadError

PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
TYPES = sorted(kind.name for kind in gguf.quants._type_traits) + ["F32", "F16"]


def _same_bits(ours: np.ndarray, reference: np.ndarray) -> None:
    assert ours.dtype == reference.dtype == np.float32
    assert ours.shape == reference.shape
    nan = np.isnan(reference)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours.view(np.uint32)[~nan], reference.view(np.uint32)[~nan])


def _reference(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, kind)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("blocks", [(1, 1), (3, 7), (37, 1), (5, 3, 2)])
def test_equals_the_reference_on_random_bytes(name: str, blocks: tuple[int, ...]) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    dtype = PLAIN.get(name, name.lower())
    shape = (*blocks[:-1], blocks[-1] * block_size)
    assert num_bytes(dtype, shape) == np.prod(blocks) * type_size
    data = np.random.default_rng(len(name)).integers(0, 256, (*blocks[:-1], blocks[-1] * type_size), np.uint8)
    _same_bits(dequantize(data.reshape(-1), dtype, shape), _reference(data, kind).reshape(shape))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "IQ2_S", "TQ1_0"])
def test_more_than_one_slab(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    count = SLAB // block_size * 2 + 3
    data = np.random.default_rng(0).integers(0, 256, count * type_size, np.uint8)
    _same_bits(dequantize(data, name.lower(), (count * block_size,)), _reference(data, kind))


def test_unaligned_bytes() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1 + 4 * 10, np.uint8)[1:]
    _same_bits(dequantize(data, "float32", (10,)), np.frombuffer(data.tobytes(), np.float32))
    _same_bits(dequantize(data, "bfloat16", (20,)), _reference(data.copy(), gguf.GGMLQuantizationType.BF16))


def test_every_type_of_the_format_has_its_size() -> None:
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
    for kind, (block_size, type_size) in gguf.GGML_QUANT_SIZES.items():
        name = names.get(kind.name, kind.name.lower())
        name = f"int{name[1:]}" if kind.name in ("I8", "I16", "I32", "I64") else name
        assert (BLOCK_TYPES[name].block_size, BLOCK_TYPES[name].num_bytes) == (block_size, type_size)


def test_a_type_without_decoder_and_a_broken_row_are_refused() -> None:
    with pytest.raises(LoadError, match="q8_1"):
        dequantize(np.zeros(40, np.uint8), "q8_1", (32,))
    with pytest.raises(LoadError, match="33 elements"):
        num_bytes("q4_1", (2, 33))


@pytest.mark.parametrize("dtype", ["q4_1", "q6_k", "float32", "bfloat16"])
def test_decoding_into_an_array_gives_the_same(dtype: str) -> None:
    block = BLOCK_TYPES[dtype]
    count = SLAB // block.block_size + 5
    data = np.random.default_rng(0).integers(0, 256, count * block.num_bytes, np.uint8)
    shape = (count, block.block_size)
    expected = dequantize(data, dtype, shape)
    single, half = np.empty(shape, np.float32), np.empty(shape, np.float16)
    dequantize_into(data, dtype, single)
    _same_bits(single, expected)
    with np.errstate(all="ignore"):
        dequantize_into(data, dtype, half)
        np.testing.assert_array_equal(half, expected.astype(np.float16))


@pytest.mark.parametrize("dtype", ["q4_1", "q4_k", "q6_k", "q8_0"])
def test_speed(dtype: str) -> None:
    block, elements = BLOCK_TYPES[dtype], 1 << 22
    data = np.random.default_rng(0).integers(0, 256, elements // block.block_size * block.num_bytes, np.uint8)
    times: list[float] = []
    for _ in range(3):
        start = time.process_time()
        dequantize(data, dtype, (elements,))
        times.append(time.process_time() - start)
    assert elements * 4 / min(times) > 200e6  # a tenth of what an idle machine does


def test_every_float16() -> None:
    """Subnormals, both zeros, infinities and NaN too, each beside numbers of every size."""
    every = np.arange(1 << 16, dtype=np.uint16)
    finite = every[np.isfinite(every.view(np.float16))]
    for bits in (every, finite):
        found = dequantize(bits.view(np.uint8), "float16", bits.shape)
        _same_bits(found, bits.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values_of_the_wanted_type_are_copied(dtype: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, 8 * SLAB + 8, np.uint8)
    out = np.empty(len(data) // np.dtype(dtype).itemsize, dtype)
    dequantize_into(data, dtype, out)
    assert out.tobytes() == data.tobytes()
