"""What is wrong with a quantized folder is a LoadError of one line: where, and what was expected."""

import contextlib
import json

import numpy as np
import pytest

from tests.golden.quantized import FORMATS, parts_of, write_matrix, write_safetensors
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.errors import LoadError


def load(folder):
    for view in open_checkpoint(folder).tensors.values():
        view.read()


def refused(folder, words):
    with pytest.raises(LoadError, match=words) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


CASES = [(name, part) for name in FORMATS for part in parts_of(name)]
MAY_LACK = {"g_idx", "weight_g_idx"}


@pytest.mark.parametrize(("name", "part"), CASES)
def test_a_part_is_missing(name, part, tmp_path):
    folder, parts = write_matrix(name, tmp_path), parts_of(name)
    write_safetensors(
        folder / "model.safetensors", {f"m.{other}": value for other, value in parts.items() if other != part}
    )
    if part in MAY_LACK:
        load(folder)
    else:
        refused(
            folder,
            rf"model\.safetensors: tensor m\.weight(_scale_inv)? is missing|tensor m\.{part} is missing",
        )


@pytest.mark.parametrize(("name", "part"), CASES)
def test_a_part_is_cut(name, part, tmp_path):
    """A row or a column less, in any part."""
    for axis in range(parts_of(name)[part][0].ndim):
        folder, parts = write_matrix(name, tmp_path), parts_of(name)
        value, kind = parts[part]
        parts[part] = (np.take(value, range(value.shape[axis] - 1), axis=axis), kind)
        write_safetensors(folder / "model.safetensors", {f"m.{key}": value for key, value in parts.items()})
        if part in ("weight", "qweight"):  # may be right in itself; a model then asks for another shape
            with contextlib.suppress(LoadError):
                assert open_checkpoint(folder).tensors["m.weight"].shape != (32, 64)
        else:
            refused(folder, r"model\.safetensors: tensor m\.\w+ (must|has)")


@pytest.mark.parametrize(("name", "part"), CASES)
def test_a_part_of_another_type(name, part, tmp_path):
    folder, parts = write_matrix(name, tmp_path), parts_of(name)
    value, _ = parts[part]
    parts[part] = (np.zeros(value.shape, np.float64), "F64")
    write_safetensors(folder / "model.safetensors", {f"m.{key}": value for key, value in parts.items()})
    refused(folder, rf"model\.safetensors: tensor m\.{part} must be of type .*, found float64")


@pytest.mark.parametrize(
    ("name", "part"), [("gptq4_order", "g_idx"), ("gptq3", "g_idx"), ("packed4_order", "weight_g_idx")]
)
@pytest.mark.parametrize("bad", [[2], [-2], [0, 0, 0], [1 << 30]])
def test_groups_that_are_none(name, part, bad, tmp_path):
    folder, parts = write_matrix(name, tmp_path), parts_of(name)
    order = parts[part][0].copy()
    order[: len(bad)] = bad
    parts[part] = (order, parts[part][1])
    if bad == [0, 0, 0]:
        order[:] = np.where(np.arange(64) < 33, 0, 1)
    write_safetensors(folder / "model.safetensors", {f"m.{key}": value for key, value in parts.items()})
    refused(folder, rf"tensor m\.{part} must put 32 inputs into each of 2 groups")


SETTINGS = [
    ("gptq4", {"bits": 5}, r"quantization_config\.bits must be 2 or 3 or 4 or 8, not 5"),
    ("gptq4", {"bits": "4"}, r"quantization_config\.bits must be .*, not '4'"),
    ("gptq4", {"bits": None}, r"quantization_config\.bits must be .*, not None"),
    ("gptq4", {"bits": 8}, r"tensor m\.\w+ must have shape"),
    ("gptq4", {"group_size": 48}, r"tensor m\.qweight has 64 inputs of 4 bits, .* not whole groups of 48"),
    ("gptq4", {"group_size": 0}, r"group_size must be a whole number above 0, or -1, not 0"),
    ("gptq4", {"group_size": 16}, r"tensor m\.scales must have shape \(4, 32\), found \(2, 32\)"),
    ("gptq4", {"group_size": True}, r"group_size must be"),
    ("gptq4", {"checkpoint_format": "marlin"}, r"checkpoint_format must be 'gptq' or 'gptq_v2'"),
    ("gptq4", {"pack_dtype": "int8"}, r"pack_dtype must be 'int32'"),
    ("gptq4", {"dynamic": {"+:(": {}}}, r"'\(' is not a regular expression"),
    ("gptq4", {"dynamic": [1]}, r"quantization_config\.dynamic must be an object, not \[1\]"),
    ("gptq4", {"dynamic": {"m": 4}}, r"dynamic\.m must be an object, not 4"),
    ("awq", {"bits": 8}, r"bits must be 4, not 8"),
    ("awq", {"version": "gemv"}, r"version must be 'gemm'; export the model again in that form, not 'gemv'"),
    ("awq", {"group_size": 48}, r"tensor m\.qweight has 64 inputs, which are not whole groups of 48"),
    ("packed4", {"config_groups": None}, r"config_groups must be an object of schemes, not None"),
    ("packed4", {"config_groups": {"W4A16": ["Linear"]}}, r"config_groups\.W4A16 must be an object"),
    ("packed4", {"config_groups": {}}, r"tensor m\.weight_packed: no target of .* names its module"),
    ("packed4", {"format": "marlin-24"}, r"format 'marlin-24' is not supported; take one of pack-quantized"),
    ("packed4", {"format": ["x"]}, r"format \['x'\] is not supported"),
    ("packed4", {"sparsity_config": {"format": "sparse-24"}}, r"sparsity_config is not supported"),
    ("packed4", {"transform_config": {"config_groups": {}}}, r"transform_config is not supported"),
    ("fp8_block", {"weight_block_size": [128]}, r"block_size must be two whole numbers above 0, not \[128\]"),
    ("fp8_block", {"weight_block_size": "128"}, r"weight_block_size must be two whole numbers"),
    ("fp8_block", {"weight_block_size": [32, 32]}, r"scale_inv must have shape \(1, 2\), found \(2, 2\)"),
    ("fp8_block", {"weight_block_size": None}, r"scale_inv must have shape \(1, 1\), found \(2, 2\)"),
    ("fp8_block", {"scale_fmt": "e8"}, r"scale_fmt must be 'float' or 'ue8m0', not 'e8'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "words"), SETTINGS)
def test_settings(name, changes, words, tmp_path):
    refused(write_matrix(name, tmp_path, **changes), words)


WEIGHTS = [
    ({"num_bits": 3}, r"weights\.num_bits must be 2 or 4 or 8, not 3"),
    ({"type": "float"}, r"weights\.num_bits must be 8, not 4"),
    (
        {"type": "float", "num_bits": 8},
        r"weights\.type must be one that pack-quantized can hold, not 'float'",
    ),
    ({"strategy": "tensor_group"}, r"weights\.strategy must be .*, not 'tensor_group'"),
    ({"strategy": "block", "block_structure": [16, 16]}, r"strategy must be 'tensor', 'channel' or 'group'"),
    ({"group_size": None}, r"group_size must be a whole number above 0, not None"),
    ({"group_size": 24}, r"tensor m\.weight_packed has 64 inputs, which are not whole groups of 24"),
    ({"symmetric": "no"}, r"symmetric must be true or false, not 'no'"),
    ({"symmetric": False}, r"tensor m\.weight_zero_point is missing"),
]


@pytest.mark.parametrize(("changes", "words"), WEIGHTS)
def test_schemes(changes, words, tmp_path):
    scheme = FORMATS["packed4"].config["config_groups"]["group_0"]
    groups = {"group_0": scheme | {"weights": scheme["weights"] | changes}}
    refused(write_matrix("packed4", tmp_path, config_groups=groups), words)


@pytest.mark.parametrize("value", [1, "gptq", [], ["gptq"], True, 0.5])
def test_a_config_that_is_no_object(value, tmp_path):
    folder = write_matrix("gptq4", tmp_path)
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], "quantization_config": value}))
    refused(folder, r"config\.json: quantization_config must be an object")


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "aqlm", "quark", "exl3", "x" * 500])
def test_methods_that_are_not_read(method, tmp_path):
    folder = write_matrix("gptq4", tmp_path, quant_method=method)
    known = "gptq, awq, compressed-tensors, fp8"
    instead = f"take a bfloat16 or GGUF form of this model, or one of the methods {known}"
    words = rf"config\.json: quantization_config: quant_method '{method[:80]}' is not supported.*{instead}"
    refused(folder, words)


@pytest.mark.parametrize("method", [None, 3, ["gptq"], {}])
def test_methods_that_are_no_names(method, tmp_path):
    refused(write_matrix("gptq4", tmp_path, quant_method=method), r"quant_method must be one of gptq, awq")


def test_bitsandbytes_before_it_gave_its_name(tmp_path):
    folder = write_matrix("gptq4", tmp_path, quant_method=None, load_in_4bit=True)
    refused(folder, "quant_method 'bitsandbytes' is not supported, its codes depend on")


def test_shapes_that_lie(tmp_path):
    for sizes in ([-1, 64], [0, 64], [32, 1 << 62], [32, 65], [1 << 40, 1 << 40]):
        folder, parts = write_matrix("packed4", tmp_path), parts_of("packed4")
        parts["weight_shape"] = (np.array(sizes, np.int64), "I64")
        write_safetensors(folder / "model.safetensors", {f"m.{key}": value for key, value in parts.items()})
        refused(folder, r"tensor m\.weight_\w+ (must|has)")


def test_a_matrix_that_is_there_twice(tmp_path):
    folder, parts = write_matrix("gptq4", tmp_path), parts_of("gptq4")
    parts["weight"] = (np.zeros((32, 64), np.float32), "F32")
    write_safetensors(folder / "model.safetensors", {f"m.{key}": value for key, value in parts.items()})
    refused(folder, r"tensor m\.weight is there beside codes of the same matrix")
