"""Every format stands for the numbers that the package which defines it makes of it, to the bit."""

import hashlib
import json

import numpy as np
import pytest

from tests.golden.quantized import (
    DATA,
    FORMATS,
    SETTINGS,
    parts_of,
    stored,
    write_matrix,
    write_safetensors,
)
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.checkpoints.quantized.methods import METHODS
from xjax.errors import LoadError

DIGESTS = json.loads(SETTINGS.read_text())["digests"]
# Codes of a format, and bytes that they may take: not more than in the file, but for 2 and 3 bits.
KINDS = {"int4": 32 * 64 // 2, "int8": 32 * 64, "float8_e4m3fn": 32 * 64}


def view_of(name, folder, **changes):
    return open_checkpoint(write_matrix(name, folder, **changes)).tensors["m.weight"]


def test_files_hold_every_format():
    keys = {key.partition("/")[0] for key in stored()[0]}
    assert {key for key in keys if not key.startswith("model ")} == FORMATS.keys() == DIGESTS.keys()
    assert DATA.stat().st_size < 450_000
    assert {form.config["quant_method"] for form in FORMATS.values()} == {method.name for method in METHODS}


@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_the_reference(name, tmp_path):
    view = view_of(name, tmp_path)
    assert view.shape == (32, 64)
    numbers = view.read()
    assert numbers.dtype == np.float32
    assert hashlib.sha256(numbers.tobytes()).hexdigest() == DIGESTS[name]
    rounded, kind = stored()[0][f"{name}/rounded"], stored()[1][f"{name}/rounded"]
    if kind == "BF16":  # to nearest, ties to even
        bits = numbers.view(np.uint32)
        bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        found = (bits >> np.uint32(16)).astype(np.uint16)
    else:
        found = numbers.astype({"F16": np.float16, "F32": np.float32}[kind])
    assert found.tobytes() == rounded.tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_codes_stay_small(name, tmp_path):
    form, view = FORMATS[name], view_of(name, tmp_path)
    codes = view.read_codes()
    kind = {0: "float8_e4m3fn", 8: "int8"}.get(form.bits, "int4")
    assert codes.kind == kind
    assert codes.codes.nbytes == KINDS[kind]
    assert (codes.order is None) == (not form.has_order)
    assert (codes.zeros is None) == form.is_symmetric
    assert view.num_bytes == sum(value.nbytes for value, _ in parts_of(name).values())


def test_reading_into_an_array(tmp_path):
    view = view_of("awq", tmp_path)
    out = np.zeros(view.shape, np.float16)
    view.read_into(out)
    np.testing.assert_array_equal(out, stored()[0]["awq/rounded"])


def test_older_places_of_the_settings(tmp_path):
    """AutoGPTQ kept them in a file of their own; compressed-tensors called them otherwise."""
    folder = write_matrix("gptq4_order", tmp_path / "gptq")
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(
        json.dumps({key: settings[key] for key in ("bits", "group_size", "desc_act")})
    )
    found = open_checkpoint(folder).tensors["m.weight"].read()
    assert hashlib.sha256(found.tobytes()).hexdigest() == DIGESTS["gptq4_order"]
    folder = write_matrix("packed4", tmp_path / "packed")
    config = json.loads((folder / "config.json").read_text())
    config = {"architectures": ["None"], "text_config": {"compression_config": config["quantization_config"]}}
    (folder / "config.json").write_text(json.dumps(config))
    found = open_checkpoint(folder).tensors["m.weight"].read()
    assert hashlib.sha256(found.tobytes()).hexdigest() == DIGESTS["packed4"]


def test_modules_with_settings_of_their_own(tmp_path):
    """GPTQModel's `dynamic`: the first pattern that fits a module's name."""
    dynamic = {
        "-:.*head.*": {},
        "+:mod.*": {"bits": 2},
        "m": {"bits": 8, "group_size": 32},
        ".*": {"bits": 3},
    }
    found = view_of("gptq8", tmp_path, bits=4, group_size=16, dynamic=dynamic).read()
    assert hashlib.sha256(found.tobytes()).hexdigest() == DIGESTS["gptq8"]


def test_schemes_by_name_pattern_and_class(tmp_path):
    config = FORMATS["packed4"].config
    scheme = config["config_groups"]["group_0"]
    wrong = {"weights": scheme["weights"] | {"num_bits": 8}}
    for target, other in (("m", "re:.*"), ("re:m$", "Linear"), ("Linear", "re:x.*")):
        groups = {"a": wrong | {"targets": [other]}, "b": scheme | {"targets": [target]}}
        found = view_of("packed4", tmp_path, config_groups=groups).read()
        assert hashlib.sha256(found.tobytes()).hexdigest() == DIGESTS["packed4"]
    groups = {
        "a": wrong | {"targets": ["Linear"]},
        "b": scheme | {"targets": ["re:m"], "format": "pack-quantized"},
    }
    with pytest.raises(LoadError, match=r"config_groups\.a: format 'mixed-precision' is not supported"):
        view_of("packed4", tmp_path, config_groups=groups, format="mixed-precision")  # group a has none


def test_scales_of_activations_are_ignored(tmp_path):
    for name in ("float8_channel", "fp8_tensor"):
        parts = {f"m.{part}": value for part, value in parts_of(name).items()}
        one = (np.ones(1, np.float32), "F32")
        folder = write_matrix(name, tmp_path / name)
        extra = {"m.input_scale": one, "self_attn.k_scale": one, "self_attn.v_scale": one}
        write_safetensors(folder / "model.safetensors", parts | extra)
        assert open_checkpoint(folder).tensors.keys() == {"m.weight"}


def test_powers_of_two_as_scales(tmp_path):
    """DeepSeek's "ue8m0": a byte is an exponent, 127 is one."""
    parts = parts_of("fp8_block")
    values, shape = parts["weight"][0], parts["weight_scale_inv"][0].shape
    exponents = np.arange(120, 120 + shape[0] * shape[1], dtype=np.uint8).reshape(shape)
    folder = write_matrix("fp8_block", tmp_path, scale_fmt="ue8m0")
    tensors = {"m.weight": (values, "F8_E4M3"), "m.weight_scale_inv": (exponents, "U8")}
    write_safetensors(folder / "model.safetensors", tensors)
    found = open_checkpoint(folder).tensors["m.weight"].read()
    ones = np.ones(shape, np.float32)
    write_safetensors(folder / "model.safetensors", tensors | {"m.weight_scale_inv": (ones, "F32")})
    plain = open_checkpoint(folder).tensors["m.weight"].read()
    wide = np.repeat(np.repeat(2.0 ** (exponents.astype(np.float64) - 127), 16, 0), 32, 1)
    np.testing.assert_array_equal(found, plain * wide)


def test_blocks_that_end_early(tmp_path):
    """An odd number of outputs and inputs: the last blocks are cut, as DeepSeek's are."""
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 126, (37, 72)).astype(np.uint8)
    scales = rng.uniform(0.1, 1, (3, 3)).astype(np.float32)
    folder = write_matrix("fp8_block", tmp_path)
    tensors = {"m.weight": (codes, "F8_E4M3"), "m.weight_scale_inv": (scales, "F32")}
    write_safetensors(folder / "model.safetensors", tensors)
    codes = open_checkpoint(folder).tensors["m.weight"].read_codes()
    found = codes.numbers()
    wide = np.repeat(np.repeat(scales, 16, 0)[:37], 32, 1)[:, :72]
    write_safetensors(
        folder / "model.safetensors", tensors | {"m.weight_scale_inv": (np.ones((3, 3), np.float32), "F32")}
    )
    plain = open_checkpoint(folder).tensors["m.weight"].read()
    np.testing.assert_array_equal(found, plain * wide)
    assert codes.scales.shape == (37, 9)
