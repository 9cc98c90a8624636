"""GGUF files whose matrices are random blocks of given types, with numbers of a sensible size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.golden.checkpoints import write_gguf
from tests.golden.families import FAMILY_CASES, FamilyCase
from tests.golden.gguf_families import write_family
from tests.golden.recipe import Case

# Bytes at which a block's float16 scales and minimums begin, and the largest number with scale 1.
_FIELDS = {
    "q8_0": ((0,), 127), "q4_0": ((0,), 8), "q4_1": ((0, 2), 15), "q5_0": ((0,), 16), "q5_1": ((0, 2), 31),
    "q4_k": ((0, 2), 945), "q5_k": ((0, 2), 1953), "q6_k": ((208,), 4096), "q3_k": ((108,), 128),
    "iq4_nl": ((0,), 127), "iq4_xs": ((0,), 4064),
}  # fmt: skip


def random_blocks(dtype: str, shape: tuple[int, int], rng: np.random.Generator, peak: float) -> np.ndarray:
    """Bytes of a matrix whose numbers are at most about `peak`: [rows, bytes] uint8."""
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype.upper()]]
    starts, largest = _FIELDS[dtype]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block_size, num_bytes), np.uint8)
    for i, start in enumerate(starts):
        sizes = rng.uniform(0.5, 1, len(blocks)) * peak / largest
        if len(starts) == 2 and "k" not in dtype and i == 1:  # added, not taken away, and not times a step
            sizes = -sizes * largest / 2
        if len(starts) == 2 and "k" in dtype and i == 1:
            sizes = sizes * (largest / 63 / 2)
        blocks[:, start : start + 2] = sizes.astype("<f2")[:, None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def fill(monkeypatch: Any, types: Sequence[str], seed: int = 0) -> list[str]:
    """Let files that are written from now on have blocks for matrices, whose types take turns.

    Returns the list of types that were used. Matrices whose rows are not whole blocks stay numbers.
    """
    rng, used, add = np.random.default_rng(seed), [], gguf.GGUFWriter.add_tensor

    def add_blocks(writer: Any, name: str, values: np.ndarray, **options: Any) -> None:
        is_matrix = values.ndim == 2 and len(values) > 1 and "ffn_gate_inp" not in name
        for i in range(len(types) if is_matrix else 0):
            dtype = types[(len(used) + i) % len(types)]
            kind = gguf.GGMLQuantizationType[dtype.upper()]
            if values.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
                used.append(dtype)
                blocks = random_blocks(dtype, values.shape, rng, 2.5 * float(values.std()))
                add(writer, name, blocks, raw_dtype=kind)
                return
        add(writer, name, values, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_blocks)
    return used


# As many columns as blocks of 256 need.
_WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8,
    "num_key_value_heads": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512,
}  # fmt: skip
WIDE = ("llama_tied", "gemma_tied", "qwen2_tied", "phi3_plain", "glm4_biases", "granite_biases", "olmo2_gqa",
        "starcoder2_biases", "qwen2moe_shared")  # fmt: skip


@dataclass(frozen=True)
class _WideFamily(FamilyCase):
    """A family's case with wider matrices under the same names."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._shape(name, shape) for name, shape in super().shapes.items()}

    def _shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Every dimension is replaced by what it is in a wide model, as the tensor's name tells."""
        config = self.config
        embed, ffn = config["hidden_size"], config["intermediate_size"]
        dim, kv_heads = embed // config["num_attention_heads"], config["num_key_value_heads"]
        if "experts" in name:
            ffn = config["moe_intermediate_size"]
        if "shared_expert" in name:
            ffn = config["shared_expert_intermediate_size"]
        stem = name.rpartition(".")[0].rpartition(".")[2]
        rows = {
            "k_proj": kv_heads * dim, "k_norm": kv_heads * dim, "v_proj": kv_heads * dim,
            "qkv_proj": embed + 2 * kv_heads * dim, "gate_proj": ffn, "up_proj": ffn, "c_fc": ffn,
            "gate_up_proj": 2 * ffn, "shared_expert_gate": 1, "gate": shape[0],
            "embed_tokens": shape[0], "lm_head": shape[0],
        }.get(stem, embed)  # fmt: skip
        return (rows, ffn if stem in ("down_proj", "c_proj") else embed)[: len(shape)]


def write_wide(name: str, path: Path, **changes: Any) -> Path:
    """Write one of the models of `WIDE`, with changes to its config."""
    if name.startswith(("llama", "gemma")):
        return write_gguf(Case(name, _WIDE | changes), path)
    changes = {key: value for key, value in _WIDE.items() if key != "head_dim"} | changes
    if name.startswith("glm4"):
        changes["head_dim"] = _WIDE["head_dim"]
    return write_family(_WideFamily(name, FAMILY_CASES[name].changes | changes), path)
