"""The table of quantization methods, and the one place that knows their names.

    config.json's quantization_config -> method -> its modules as views of whole matrices

A folder's tensors come back with one "<module>.weight" where a module's parts were. What is quantized
follows from the tensors that are there; lists of modules to leave alone say nothing they do not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xjax.checkpoints.quantized import awq, compressed, float8, gptq
from xjax.checkpoints.quantized.codes import QuantizedView, Stored
from xjax.checkpoints.quantized.settings import Settings
from xjax.errors import LoadError

LEGACY_SETTINGS = "quantize_config.json"  # a file of its own, where the config names no method
SETTINGS_KEYS = ("quantization_config", "compression_config")

Find = Callable[[Settings, Mapping[str, Stored]], tuple[dict[str, QuantizedView], set[str]]]


@dataclass(frozen=True)
class Method:
    """A line of the table of methods, from which the docs are made.

    name     `quant_method` of a quantization_config
    bits     of a code, for people
    what     is read
    tested   against which packages
    """

    name: str
    bits: str
    what: str
    tested: str
    find: Find


METHODS = (
    Method(
        "gptq", "2, 3, 4, 8",
        "symmetric or not, in groups or by channel, `desc_act`, `checkpoint_format` `gptq` and `gptq_v2`, "
        "`dynamic` settings of modules",
        "gptqmodel 7.7.0", gptq.find),
    Method("awq", "4", "the `gemm` form", "autoawq 0.2.9", awq.find),
    Method(
        "compressed-tensors", "2, 4, 8; float8",
        "`pack-quantized`, `int-quantized`, `float-quantized`, `naive-quantized`; by tensor, channel, group "
        "(`g_idx` too) and block; symmetric or not; weights alone: settings of activations and of the "
        "cache are ignored",
        "compressed-tensors 0.20.1, with `g_idx` 0.9.4", compressed.find),
    Method(
        "fp8", "float8",
        "scales of blocks (`weight_scale_inv`, as DeepSeek and Qwen write them), of the tensor or its "
        "channels; weights alone: scales of activations are ignored",
        "transformers 5.24", float8.find),
)  # fmt: skip
_UNPACKED = "a bfloat16 or GGUF form of this model, or one of the methods "
# Methods that people meet, and what to say instead of a bare "unknown".
_REFUSED = {
    "bitsandbytes": "its codes depend on that package's kernels",
    "hqq": "it is not read",
    "aqlm": "its codebooks are not read",
    "quanto": "it is not read",
    "torchao": "it is not read",
    "mxfp4": "4-bit floats are not read here",
}


def gather(
    config: Mapping[str, Any], legacy: Mapping[str, Any], tensors: Mapping[str, Stored], path: Path
) -> dict[str, Any]:
    """Put a view of the whole matrix where the parts of quantized modules are.

    config    config.json
    legacy    quantize_config.json, which stands for a missing quantization_config; {}: none
    tensors   of the folder by name
    path      the folder

    Returns all tensors by name. Raises LoadError for a method that is not read and for parts that are
    missing, of wrong shapes or types.
    """
    settings = _settings(config, legacy, path)
    if settings is None:
        return dict(tensors)
    method = _method(settings)
    views, used = method.find(settings, tensors)
    rest: dict[str, Any] = {name: view for name, view in tensors.items() if name not in used}
    doubled = next((name for name in views if name in rest), None)
    if doubled is not None:
        raise LoadError(f"{rest[doubled].file}: tensor {doubled} is there beside codes of the same matrix")
    return rest | views


def _settings(config: Mapping[str, Any], legacy: Mapping[str, Any], path: Path) -> Settings | None:
    text = config.get("text_config")
    places = [(config, "config.json: "), (text, "config.json: text_config.")]
    for values, where in places:
        for key in SETTINGS_KEYS:
            if isinstance(values, Mapping) and values.get(key) is not None:  # type: ignore[union-attr]
                return Settings(values[key], f"{path / where}{key}")
    if legacy:
        return Settings({"quant_method": "gptq", **legacy}, f"{path / LEGACY_SETTINGS}: settings")
    return None


def _method(settings: Settings) -> Method:
    name: Any = settings.values.get("quant_method")
    if name is None and (settings.values.get("load_in_4bit") or settings.values.get("load_in_8bit")):
        name = "bitsandbytes"
    for method in METHODS:
        if name == method.name:
            return method
    known = ", ".join(method.name for method in METHODS)
    if not isinstance(name, str):
        raise settings.refuse("quant_method", f"one of {known}")
    reason = f", {_REFUSED[name]}" if name in _REFUSED else ""
    raise LoadError(
        f"{settings.where}: quant_method {name[:80]!r} is not supported{reason}; take {_UNPACKED}{known}"
    )
