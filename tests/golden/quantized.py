"""Quantized matrices and tiny models whose reference values are in quantized.npz, and folders of them.

scripts/golden_quantized.py makes them with the packages that define the formats. Kept are the packed
tensors, what they stand for, and a model's logits; tensors that are not quantized are drawn anew.
"""

import functools
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.recipe import Case, weights

DATA = Path(__file__).parent / "quantized.npz"
SETTINGS = Path(__file__).parent / "quantized.json"


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way to write a matrix.

    config       its quantization_config
    maker        the package that writes it
    bits         of a code; 0: float8
    block        outputs and inputs that share a scale, or None
    is_old       needs an older compressed-tensors
    """

    config: dict[str, Any]
    maker: str
    bits: int = 4
    group_size: int = 32
    is_symmetric: bool = True
    has_order: bool = False
    is_v2: bool = False
    writes_order: bool = True
    block: tuple[int, int] | None = None
    scale_type: str = "float16"
    scale_name: str = "weight_scale_inv"
    is_old: bool = False


def _gptq(bits: int, **changes: Any) -> Format:
    form = Format(config={}, maker="gptq", bits=bits, **changes)
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": form.group_size, "sym": form.is_symmetric,
        "desc_act": form.has_order, "checkpoint_format": "gptq_v2" if form.is_v2 else "gptq",
        "lm_head": False, "true_sequential": True, "damp_percent": 0.01, "static_groups": False,
    }  # fmt: skip
    return Format(**{**vars(form), "config": config})


def _awq(**changes: Any) -> Format:
    form = Format(config={}, maker="awq", is_symmetric=False, **changes)
    config = {"quant_method": "awq", "bits": 4, "group_size": form.group_size, "zero_point": True,
              "version": "gemm", "modules_to_not_convert": None}  # fmt: skip
    return Format(**{**vars(form), "config": config})


def _compressed(form_name: str, strategy: str, *, kind: str = "int", **changes: Any) -> Format:
    form = Format(**({"config": {}, "maker": "compressed-tensors", "scale_type": "bfloat16"} | changes))
    weights = {"num_bits": form.bits or 8, "type": kind, "symmetric": form.is_symmetric, "strategy": strategy,
               "dynamic": False}  # fmt: skip
    if strategy == "group":
        weights["group_size"] = form.group_size
    if form.block:
        weights["block_structure"] = list(form.block)
    if form.has_order:
        weights["actorder"] = "group"
    activations = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}
    scheme = {"targets": ["Linear"], "weights": weights, "output_activations": None,
              "input_activations": None if form_name == "pack-quantized" else activations}  # fmt: skip
    config = {"quant_method": "compressed-tensors", "format": form_name, "ignore": ["lm_head"],
              "config_groups": {"group_0": scheme}, "kv_cache_scheme": None,
              "quantization_status": "compressed"}  # fmt: skip
    return Format(
        **{**vars(form), "config": config, "group_size": form.group_size if strategy == "group" else -1}
    )


def _float8(**changes: Any) -> Format:
    form = Format(config={}, maker="fp8", bits=0, **changes)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
              "weight_block_size": list(form.block) if form.block else None}  # fmt: skip
    return Format(**{**vars(form), "config": config})


_OLD = {"maker": "compressed-tensors with g_idx", "is_old": True, "has_order": True}
FORMATS = {
    "gptq4": _gptq(4),
    "gptq4_order": _gptq(4, has_order=True, is_symmetric=False),
    "gptq4_v2": _gptq(4, is_v2=True, is_symmetric=False, group_size=16),
    "gptq4_channel": _gptq(4, group_size=-1, writes_order=False),
    "gptq8": _gptq(8, is_symmetric=False),
    "gptq8_order_v2": _gptq(8, is_v2=True, is_symmetric=False, has_order=True),
    "gptq2": _gptq(2, is_symmetric=False),
    "gptq3": _gptq(3, is_symmetric=False, has_order=True),
    "gptq3_v2": _gptq(3, is_v2=True, is_symmetric=False),
    "awq": _awq(),
    "awq_16": _awq(group_size=16),
    "packed4": _compressed("pack-quantized", "group"),
    "packed4_zeros": _compressed("pack-quantized", "group", is_symmetric=False, scale_type="float16"),
    "packed4_channel_zeros": _compressed("pack-quantized", "channel", is_symmetric=False),
    "packed8": _compressed("pack-quantized", "group", bits=8),
    "packed8_zeros": _compressed("pack-quantized", "channel", bits=8, is_symmetric=False),
    "packed2": _compressed("pack-quantized", "group", bits=2),
    "packed4_order": _compressed("pack-quantized", "group", **_OLD),
    "int8": _compressed("int-quantized", "channel", bits=8),
    "int8_zeros": _compressed("int-quantized", "channel", bits=8, is_symmetric=False),
    "int4_naive": _compressed("naive-quantized", "group", bits=4),
    "float8_channel": _compressed("float-quantized", "channel", kind="float", bits=0),
    "float8_tensor": _compressed("float-quantized", "tensor", kind="float", bits=0, scale_type="float32"),
    "float8_naive_block": _compressed("naive-quantized", "block", kind="float", bits=0, block=(16, 32)),
    "fp8_block": _float8(block=(16, 32), scale_type="float32"),
    "fp8_tensor": _float8(scale_type="float32"),
    "fp8_bfloat16": _float8(block=(16, 16), scale_type="bfloat16", scale_name="weight_scale"),
}
# Formats that a whole model is written in.
MODELS = ("gptq4_order", "gptq8", "awq", "packed4_zeros", "int8", "float8_channel", "fp8_block")


@functools.cache
def stored() -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Every array of quantized.npz and the safetensors type of each."""
    with np.load(DATA) as file:
        return dict(file), json.loads(SETTINGS.read_text())["types"]


def model_case() -> Case:
    """The tiny Llama."""
    changes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 47, "tie_word_embeddings": False,
    }  # fmt: skip
    return Case("llama_quantized", changes)


def module_weights(case: Case) -> dict[str, np.ndarray]:
    """Tensors of the tiny Llama before they are quantized."""
    return weights(case)


def write_safetensors(file: Path, tensors: dict[str, tuple[np.ndarray, str]]) -> None:
    """Write arrays of bits with the types that they are meant as."""
    header, data = {}, b""
    for name, (value, kind) in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": kind,
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def parts_of(name: str) -> dict[str, tuple[np.ndarray, str]]:
    """Packed tensors of a matrix: bits and types by the names of its parts."""
    arrays, types = stored()
    own = {key: key.rpartition("/")[2] for key in arrays if key.startswith(name + "/")}
    kept = {key: part for key, part in own.items() if part not in ("rounded", "logits")}
    return {part: (arrays[key], types[key]) for key, part in kept.items()}


def write_matrix(name: str, folder: Path, *, module: str = "m", **changes: Any) -> Path:
    """Write a folder with one quantized module; `changes` are of its quantization_config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["None"], "quantization_config": FORMATS[name].config | changes}
    (folder / "config.json").write_text(json.dumps(config))
    parts = {f"{module}.{part}": value for part, value in parts_of(name).items()}
    write_safetensors(folder / "model.safetensors", parts)
    return folder


def model_tensors(name: str) -> dict[str, tuple[np.ndarray, str]]:
    """Tensors of the tiny Llama in a format, bits and types by name."""
    parts = parts_of(f"model {name}")
    plain = {key: (value, "F32") for key, value in module_weights(model_case()).items()
             if not key.endswith("proj.weight")}  # fmt: skip
    return plain | parts


def write_model(name: str, folder: Path, *, change: Any = None, **changes: Any) -> Path:
    """Write the tiny Llama in a format; `change` gets its tensors first."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_case().config | {"quantization_config": FORMATS[name].config | changes}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = model_tensors(name)
    write_safetensors(folder / "model.safetensors", change(tensors) if change else tensors)
    return folder
