"""Random Llama-shaped models of any size, written piece by piece in the forms that are loaded.

Values are random but sane, names and shapes those of a real model; no meaning. GGUF files have a
vocabulary, in which every text is its bytes, so that other programs read them too. A tensor repeats a
few megabytes of random blocks, so that writing takes as long as the disk does.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from xjax.checkpoints.dequantize import BLOCK_TYPES, num_bytes
from xjax.checkpoints.gguf import TENSOR_TYPES as GGUF_TYPES
from xjax.checkpoints.safetensors import INDEX_NAME, TENSOR_TYPES

# What a case is called: the form, and how matrices are stored.
FOLDERS = {"safetensors-bf16": "bfloat16", "safetensors-f16": "float16", "safetensors-f32": "float32"}
SHARDED = {"safetensors-bf16-sharded": "bfloat16"}
GGUFS = {f"gguf-{name}": name for name in ("float16", "bfloat16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k")}
FORMATS = (*FOLDERS, *SHARDED, *GGUFS)
_TILE = 8 << 20
_NUM_SHARDS = 4
_ALIGNMENT = 32
_THETA = 500_000.0
_SPECIAL = ("<unk>", "<s>", "</s>")
# Kinds of pieces as the format numbers them.
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_HALVES = {"q8_0": (0,), "q4_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}

Tensors = Sequence[tuple[str, tuple[int, ...], str]]  # name, shape, stored as


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model; the defaults make 1.24 billion parameters."""

    layers: int = 16
    embed: int = 2048
    ffn: int = 8192
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128_256
    tied: bool = True


def write_model(folder: Path, form: str, shape: Shape) -> Path:
    """Write a model of one of `FORMATS`, or find it there; the path to load it from."""
    folder /= "-".join(str(value) for value in vars(shape).values())
    if form in GGUFS:
        path = folder / f"{form}.gguf"
        if not path.exists():
            _write_gguf(path, _gguf_tensors(shape, GGUFS[form]), shape)
        return path
    path = folder / form
    if not path.exists():
        stored = {**FOLDERS, **SHARDED}[form]
        _write_folder(path, _hf_tensors(shape, stored), shape, _NUM_SHARDS if form in SHARDED else 1)
    return path


def files_of(path: Path) -> list[Path]:
    """Files that hold the tensors of a model that `write_model` wrote."""
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def _matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    head = shape.embed // shape.heads
    return {
        "q": (shape.heads * head, shape.embed),
        "k": (shape.kv_heads * head, shape.embed),
        "v": (shape.kv_heads * head, shape.embed),
        "o": (shape.embed, shape.heads * head),
        "gate": (shape.ffn, shape.embed),
        "up": (shape.ffn, shape.embed),
        "down": (shape.embed, shape.ffn),
    }


def _hf_tensors(shape: Shape, stored: str) -> Tensors:
    found: list[tuple[str, tuple[int, ...], str]] = []
    for layer in range(shape.layers):
        for name, sizes in _matrices(shape).items():
            part = "self_attn" if name in "qkvo" else "mlp"
            found.append((f"model.layers.{layer}.{part}.{name}_proj.weight", sizes, stored))
        for name in ("input_layernorm", "post_attention_layernorm"):
            found.append((f"model.layers.{layer}.{name}.weight", (shape.embed,), stored))
    return [
        ("model.embed_tokens.weight", (shape.vocab, shape.embed), stored),
        *found,
        ("model.norm.weight", (shape.embed,), stored),
        *([] if shape.tied else [("lm_head.weight", (shape.vocab, shape.embed), stored)]),
    ]


def _gguf_tensors(shape: Shape, stored: str) -> Tensors:
    names = {"o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
    found: list[tuple[str, tuple[int, ...], str]] = []
    for layer in range(shape.layers):
        for name, sizes in _matrices(shape).items():
            found.append((f"blk.{layer}.{names.get(name, f'attn_{name}')}.weight", sizes, stored))
        for name in ("attn_norm", "ffn_norm"):
            found.append((f"blk.{layer}.{name}.weight", (shape.embed,), "float32"))
    return [
        ("token_embd.weight", (shape.vocab, shape.embed), stored),
        *found,
        ("output_norm.weight", (shape.embed,), "float32"),
        *([] if shape.tied else [("output.weight", (shape.vocab, shape.embed), stored)]),
    ]


def _tile(stored: str) -> npt.NDArray[np.uint8]:
    """Some megabytes of whole random blocks."""
    source, block = np.random.default_rng(0), BLOCK_TYPES[stored]
    count = _TILE // block.num_bytes
    if block.block_size == 1:
        values = source.standard_normal(count, np.float32) * np.float32(0.02)
        if stored == "bfloat16":
            return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        return values.astype(stored).view(np.uint8)
    blocks = source.integers(0, 256, (count, block.num_bytes), np.uint8)
    for start in _HALVES[stored]:
        scales = source.uniform(0.0001, 0.001, count).astype("<f2")
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def _write_tensor(file: BinaryIO, size: int, tile: npt.NDArray[np.uint8]) -> None:
    while size:
        file.write(tile[:size].data)
        size -= min(size, len(tile))


def _tiles(tensors: Tensors) -> dict[str, npt.NDArray[np.uint8]]:
    return {stored: _tile(stored) for stored in {stored for _, _, stored in tensors}}


def _write_folder(path: Path, tensors: Tensors, shape: Shape, num_shards: int) -> None:
    part = path.with_name(f"{path.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.embed,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape.tied,
    }
    (part / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weight_map: dict[str, str] = {}
    for number in range(num_shards):
        name = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors" if num_shards > 1 else ""
        own = tensors[number * len(tensors) // num_shards : (number + 1) * len(tensors) // num_shards]
        _write_safetensors(part / (name or "model.safetensors"), own)
        weight_map |= {tensor: name for tensor, _, _ in own}
    if num_shards > 1:
        (part / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    part.rename(path)


def _write_safetensors(path: Path, tensors: Tensors) -> None:
    codes = {name: code for code, name in TENSOR_TYPES.items()}
    header: dict[str, object] = {}
    start = 0
    for name, sizes, stored in tensors:
        end = start + num_bytes(stored, sizes)
        header[name] = {"dtype": codes[stored], "shape": sizes, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    tiles = _tiles(tensors)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, sizes, stored in tensors:
            _write_tensor(file, num_bytes(stored, sizes), tiles[stored])


def _write_gguf(path: Path, tensors: Tensors, shape: Shape) -> None:
    codes, tiles = {name: code for code, name in GGUF_TYPES.items()}, _tiles(tensors)
    entries = list(_gguf_entries(shape))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries)
    offset = 0
    for name, sizes, stored in tensors:
        dims = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes[::-1])
        head += _string(name) + dims + struct.pack("<IQ", codes[stored], offset)
        offset += num_bytes(stored, sizes) + -num_bytes(stored, sizes) % _ALIGNMENT
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(head + bytes(-len(head) % _ALIGNMENT))
        for _, sizes, stored in tensors:
            size = num_bytes(stored, sizes)
            _write_tensor(file, size, tiles[stored])
            file.write(bytes(-size % _ALIGNMENT))
    part.rename(path)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _gguf_entries(shape: Shape) -> Iterator[bytes]:
    yield _string("general.architecture") + struct.pack("<I", 8) + _string("llama")
    numbers = {
        "block_count": shape.layers,
        "embedding_length": shape.embed,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "context_length": 4096,
    }
    for key, value in numbers.items():
        yield _string(f"llama.{key}") + struct.pack("<II", 4, value)
    for key, value in (("attention.layer_norm_rms_epsilon", 1e-5), ("rope.freq_base", _THETA)):
        yield _string(f"llama.{key}") + struct.pack("<If", 6, value)
    yield from _vocabulary_entries(shape.vocab)


def _vocabulary_entries(size: int) -> Iterator[bytes]:
    """Pieces of the "llama" kind: special ones, every byte, and words that nothing is joined to."""
    start = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256
    num_words = max(0, size - len(start))
    tokens = [*start, *(f"\u2581word{number}" for number in range(num_words))][:size]
    kinds = (kinds + [_NORMAL] * num_words)[:size]
    scores = [-float(i) for i in range(size)]
    yield _string("tokenizer.ggml.model") + struct.pack("<I", 8) + _string("llama")
    yield _array("tokenizer.ggml.tokens", 8, size, b"".join(map(_string, tokens)))
    yield _array("tokenizer.ggml.scores", 6, size, np.array(scores, "<f4").tobytes())
    yield _array("tokenizer.ggml.token_type", 5, size, np.array(kinds, "<i4").tobytes())
    for name, token_id in (("bos", 1), ("eos", 2), ("unknown", 0)):
        yield _string(f"tokenizer.ggml.{name}_token_id") + struct.pack("<II", 4, token_id)


def _array(key: str, kind: int, count: int, data: bytes) -> bytes:
    return _string(key) + struct.pack("<IIQ", 9, kind, count) + data
