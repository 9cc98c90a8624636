"""Write the reference values of quantized folders, by the packages that define the formats.

scripts/golden_quantized.py         every case but those of an older compressed-tensors
scripts/golden_quantized.py --old   those: with compressed-tensors 0.9.4, which still knew g_idx

Needs torch, transformers, gptqmodel, autoawq (both may be unpacked sources on PYTHONPATH) and
compressed-tensors. A random matrix is quantized and packed by a package; kept are the tensors it
made, a digest of what it makes of them with scales widened to float32, and what it makes of them as
they are.
The same is done to every matrix of a tiny Llama, whose logits transformers computes.
"""

import hashlib
import importlib.metadata
import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from tests.golden.quantized import DATA, FORMATS, MODELS, SETTINGS, Format, model_case, module_weights

_BITS_OF = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int32: "I32",
          torch.int64: "I64", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3",
          torch.float8_e5m2: "F8_E5M2"}  # fmt: skip
Result = tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]


def scales_and_zeros(
    form: Format, w: torch.Tensor, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of the format's type and zeros of each output and group of inputs, [Out, G]."""
    kind, top = getattr(torch, form.scale_type), 2**form.bits - 1
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        part = w[:, groups == group]
        if form.is_symmetric:
            scales.append(part.abs().amax(1) * 2 / top)
            zeros.append(torch.full((len(w),), (top + 1) // 2))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales.append((high - low) / top)
            zeros.append(torch.round(-low / scales[-1]).clamp(0, top).long())
    found = torch.stack(zeros, 1)
    if not form.is_symmetric:  # both ends occur
        found[0], found[1] = 0, top
    return torch.stack(scales, 1).to(kind), found


def order_of(form: Format, num_in: int, rng: np.random.Generator) -> torch.Tensor:
    """The group of each input."""
    group = form.group_size if form.group_size > 0 else num_in
    groups = np.arange(num_in) // group
    return torch.tensor(rng.permutation(groups) if form.has_order else groups)


def gptq(form: Format, w: torch.Tensor, groups: torch.Tensor) -> Result:
    """Pack with GPTQModel."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    scales, zeros = scales_and_zeros(form, w, groups)
    num_out, num_in = w.shape
    module = TorchLinear(
        bits=form.bits, group_size=form.group_size, sym=form.is_symmetric, desc_act=form.has_order,
        in_features=num_in, out_features=num_out, bias=False,
    ).eval()  # fmt: skip
    linear = torch.nn.Linear(num_in, num_out, bias=False)
    linear.weight.data = w
    module.pack_original(linear, scales, zeros, groups.to(torch.int32))
    rounded = module.dequantize_weight().T.contiguous()
    stored = module.scales
    module.scales = stored.float()
    numbers = module.dequantize_weight().T.contiguous()
    if not form.is_v2:
        config = types.SimpleNamespace(bits=form.bits, pack_dtype=torch.int32)
        convert_gptq_v2_to_v1_format_module(module, config)
    parts = {"qweight": module.qweight, "qzeros": module.qzeros, "scales": stored}
    return parts | ({"g_idx": module.g_idx} if form.writes_order else {}), numbers, rounded


def awq(form: Format, w: torch.Tensor, groups: torch.Tensor) -> Result:
    """Pack with AutoAWQ."""
    sys.modules.setdefault("datasets", types.SimpleNamespace(load_dataset=None))  # only to calibrate
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    scales, zeros = scales_and_zeros(form, w, groups)
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    codes = torch.round(w / scales.float()[:, groups] + zeros[:, groups]).clamp(0, 15)
    linear.weight.data = (codes - zeros[:, groups]) * scales.float()[
        :, groups
    ]  # so that it packs these codes
    module = WQLinear_GEMM.from_linear(
        linear, 4, form.group_size, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
    )
    size = form.group_size if form.group_size > 0 else w.shape[1]
    found = [dequantize_gemm(module.qweight, module.qzeros, s, 4, size).T.contiguous()
             for s in (module.scales.float(), module.scales)]  # fmt: skip
    return {name: getattr(module, name) for name in ("qweight", "qzeros", "scales")}, found[0], found[1]


def _compressor_scheme(form: Format) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = form.config["config_groups"]["group_0"]["weights"]
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def compressed(form: Format, w: torch.Tensor, groups: torch.Tensor) -> Result:
    """Compress with compressed-tensors."""
    from compressed_tensors.compressors.base import BaseCompressor

    scheme, weights = _compressor_scheme(form), form.config["config_groups"]["group_0"]["weights"]
    kind, num_out, num_in = getattr(torch, form.scale_type), *w.shape
    state = {"weight": w}
    if form.block:
        rows, columns = form.block
        grid = w.reshape(num_out // rows, rows, num_in // columns, columns).abs().amax((1, 3))
        state["weight_scale"] = (grid / 448).to(kind)
    elif weights["strategy"] == "tensor":
        state["weight_scale"] = (w.abs().max() / (448 if form.bits == 0 else 127)).to(kind).reshape(1)
    elif form.bits == 0:
        state["weight_scale"] = (w.abs().amax(1, keepdim=True) / 448).to(kind)
    else:
        state["weight_scale"], zeros = scales_and_zeros(form, w, groups)
        if not form.is_symmetric:
            state["weight_zero_point"] = (zeros - 2 ** (form.bits - 1)).to(torch.int8)
    maker = BaseCompressor.get_value_from_registry(form.config["format"])
    parts = maker.compress(state, scheme)
    rounded = maker.decompress(parts, scheme)["weight"]
    wide = parts | {"weight_scale": parts["weight_scale"].float()}
    return parts, maker.decompress(wide, scheme)["weight"], rounded


def compressed_order(form: Format, w: torch.Tensor, groups: torch.Tensor) -> Result:
    """Compress with a compressed-tensors that knew g_idx."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import pack_to_int32
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

    scales, zeros = scales_and_zeros(form, w, groups)
    args, order = _compressor_scheme(form).weights, groups.to(torch.int32)
    zeros = None if form.is_symmetric else (zeros - 2 ** (form.bits - 1)).to(torch.int8)
    codes = quantize(w, scales.float(), zeros, args, dtype=torch.int8, g_idx=order)
    found = [dequantize(codes, s, zeros, args, g_idx=order) for s in (scales.float(), scales)]
    parts = {"weight_packed": pack_to_int32(codes, form.bits), "weight_scale": scales,
             "weight_shape": torch.tensor(w.shape), "weight_g_idx": order}  # fmt: skip
    if zeros is not None:
        parts["weight_zero_point"] = zeros
    return parts, found[0], found[1]


def float8(form: Format, w: torch.Tensor, groups: torch.Tensor) -> Result:
    """Quantize and dequantize as transformers does."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rows, columns = form.block or w.shape
    num_out, num_in = w.shape
    grid = w.reshape(num_out // rows, rows, num_in // columns, columns).abs().amax((1, 3))
    scales = (grid / 448).to(getattr(torch, form.scale_type))
    wide = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    codes = (w / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = scales if form.block else scales.reshape(())
    back = Fp8Dequantize(None)
    numbers = back._dequantize_one(codes, scales.reshape(grid.shape), torch.float32)
    rounded = back._dequantize_one(codes, scales.reshape(grid.shape), torch.bfloat16)
    return {"weight": codes, form.scale_name: scales}, numbers, rounded


MAKERS = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed, "fp8": float8,
          "compressed-tensors with g_idx": compressed_order}  # fmt: skip


def kept(value: torch.Tensor) -> np.ndarray:
    """The bits of a tensor in a type that numpy has."""
    value = value.detach().contiguous()
    return value.view(_BITS_OF.get(value.dtype, value.dtype)).numpy()


def write_tensors(old: bool, arrays: dict[str, np.ndarray], settings: dict[str, Any]) -> None:
    """Quantize one matrix in every format."""
    kinds = settings["types"]
    for name, form in FORMATS.items():
        if form.is_old != old:
            continue
        rng = np.random.default_rng(list(name.encode()))
        w = torch.tensor(rng.standard_normal((32, 64)), dtype=torch.float32)
        parts, numbers, rounded = MAKERS[form.maker](form, w, order_of(form, 64, rng))
        assert numbers.dtype == torch.float32 and numbers.shape == w.shape
        error = float((numbers - w).abs().mean())
        print(f"{name:28} mean error {error:.4f}")
        settings["digests"][name] = hashlib.sha256(kept(numbers).tobytes()).hexdigest()
        for part, value in (parts | {"rounded": rounded}).items():
            arrays[f"{name}/{part}"], kinds[f"{name}/{part}"] = kept(value), _NAMES[value.dtype]


def write_models(arrays: dict[str, np.ndarray], kinds: dict[str, str]) -> None:
    """Quantize every matrix of a tiny Llama in some formats and keep its logits."""
    import transformers

    case = model_case()
    for name in MODELS:
        form, rng = FORMATS[name], np.random.default_rng(7)
        tensors = {key: torch.tensor(value) for key, value in module_weights(case).items()}
        order: dict[int, torch.Tensor] = {}  # as one package has it: inputs that are shared have one order
        for key, w in list(tensors.items()):
            if not key.endswith("proj.weight"):
                continue
            size = w.shape[1] + (0 if "down" in key or "o_proj" in key else 1000 * ("mlp" in key))
            groups = order.setdefault(size, order_of(form, w.shape[1], rng))
            parts, tensors[key], _ = MAKERS[form.maker](form, w, groups)
            module = key.removesuffix(".weight")
            for part, value in parts.items():
                place = f"model {name}/{module}.{part}"
                arrays[place], kinds[place] = kept(value), _NAMES[value.dtype]
        config = transformers.LlamaConfig(**case.config, attn_implementation="eager")
        model = transformers.LlamaForCausalLM(config).eval()
        found = model.load_state_dict(tensors, strict=False)
        assert not found.unexpected_keys, found
        with torch.no_grad():
            logits = model(torch.tensor(case.ids[None].astype(np.int64))).logits[0]
        print(f"{name:28} logits' deviation {float(logits.std()):.2f}")
        arrays[f"model {name}/logits"], kinds[f"model {name}/logits"] = kept(logits), "F32"


def main() -> None:
    """Write tests/golden/quantized.npz and .json."""
    warnings.simplefilter("ignore")
    old = "--old" in sys.argv[1:]
    arrays: dict[str, np.ndarray] = {}
    settings: dict[str, Any] = {"versions": {}, "types": {}, "digests": {}}
    if DATA.exists():
        settings = json.loads(SETTINGS.read_text())
        with np.load(DATA) as file:
            arrays = dict(file)
    stale = [key for key in arrays if key.startswith("model ") or FORMATS.get(key.split("/")[0]) is None]
    for key in stale if not old else []:
        del arrays[key]
    write_tensors(old, arrays, settings)
    if not old:
        write_models(arrays, settings["types"])
    settings["types"] = {key: settings["types"][key] for key in sorted(arrays)}
    import compressed_tensors

    own = {"compressed-tensors, g_idx" if old else "compressed-tensors": compressed_tensors.__version__}
    if not old:
        own |= {"gptqmodel": "7.7.0", "autoawq": "0.2.9"}
        own |= {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    settings["versions"] |= own
    SETTINGS.write_text(json.dumps(settings, indent=0, sort_keys=True) + "\n")
    np.savez_compressed(DATA, **{key: arrays[key] for key in sorted(arrays)})


if __name__ == "__main__":
    main()
