"""A model on disk, whichever form it has: its config and its tensors by name.

Life of a checkpoint: `open_checkpoint` reads headers and JSON only; a tensor's bytes are
read when its view is asked; the files stay mapped while a view of them lives. Names and
shapes are those of the files: what they mean is known to xjax.weights.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xjax.checkpoints.gguf import read_gguf
from xjax.checkpoints.metadata import read_json, read_optional_json
from xjax.checkpoints.quantized.codes import QuantizedView
from xjax.checkpoints.quantized.methods import LEGACY_SETTINGS, SETTINGS_KEYS, gather
from xjax.checkpoints.safetensors import read_safetensors
from xjax.checkpoints.saved import MANIFEST, METADATA, SavedModel, check_files, is_saved, read_manifest
from xjax.checkpoints.tensor import TensorView
from xjax.errors import LoadError

__all__ = ["Checkpoint", "QuantizedView", "TensorView", "View", "open_checkpoint"]

View = TensorView | QuantizedView

_LATER_PART = re.compile(r"-(?!00001-of-)\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An open model.

    kind               "hf": a folder as Hugging Face lays it out; "gguf": a GGUF file
    path               the folder or the (first) file
    config             config.json, or the GGUF metadata by key
    generation_config  generation_config.json, {} if there is none
    tensors            by the name in the file; of a quantized module its weight as a whole
    files              the weight files, in order
    architecture       config's first "architectures", or GGUF's general.architecture
    saved              of a model in our own form, what was converted: `kind` and `config` are those of
                       the model it was made from, and `tensors` is empty
    """

    kind: Literal["hf", "gguf"]
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, View]
    files: tuple[Path, ...]
    architecture: str
    saved: SavedModel | None = None

    @property
    def sources(self) -> tuple[Path, ...]:
        """The weight files, and those beside them that say how weights are coded."""
        beside = [self.path / name for name in (LEGACY_SETTINGS, MANIFEST)]
        return (*self.files, *(path for path in beside if path.exists()))

    @property
    def coding(self) -> Mapping[str, Any]:
        """What the config says of how weights are coded."""
        text: Any = self.config.get("text_config")
        places: dict[str, Any] = {"": self.config, "text_config.": text if isinstance(text, Mapping) else {}}
        return {
            name + key: values[key]
            for name, values in places.items()
            for key in SETTINGS_KEYS
            if key in values
        }


def _open_gguf(path: Path) -> Checkpoint:
    metadata, tensors, files = read_gguf(path)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise LoadError(f"{files[0]}: the metadata has no general.architecture")
    if not tensors:
        raise LoadError(f"{files[0]}: holds no tensors, only metadata")
    return Checkpoint("gguf", files[0], metadata, {}, tensors, files, architecture)


def _open_saved(folder: Path) -> Checkpoint:
    saved = read_manifest(folder)
    weights = saved.part_files()
    check_files(folder, saved, saved.files.keys() - weights)
    config = (
        read_gguf(folder / METADATA).metadata if saved.kind == "gguf" else read_json(folder / "config.json")
    )
    generation_config = read_optional_json(folder / "generation_config.json")
    files = tuple(folder / name for name in weights)
    return Checkpoint(saved.kind, folder, config, generation_config, {}, files, saved.architecture, saved)


def _open_folder(folder: Path) -> Checkpoint:
    if is_saved(folder):
        return _open_saved(folder)
    if not (folder / "config.json").exists():
        files = sorted(file for file in folder.glob("*.gguf") if not _LATER_PART.search(file.name))
        if len(files) == 1:
            return _open_gguf(files[0])
        found = f"several ({', '.join(file.name for file in files[:4])}): name one" if files else "neither"
        raise LoadError(f"{folder}: expected config.json and weights, or one GGUF file; found {found}")
    config = read_json(folder / "config.json")
    architectures: Any = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise LoadError(f"{folder / 'config.json'}: 'architectures' does not name a model class")
    generation_config = read_optional_json(folder / "generation_config.json")
    stored, files = read_safetensors(folder)
    legacy = read_optional_json(folder / LEGACY_SETTINGS)
    tensors = gather(config, legacy, stored, folder)
    return Checkpoint("hf", folder, config, generation_config, tensors, files, architectures[0])


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face folder, a GGUF file (of a split one, any part), or what `xjax convert` wrote.

    Raises LoadError with one line that names the file, the tensor or key, and what was expected.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise LoadError(f"{path}: no such file or folder")
    if path.suffix == ".safetensors":
        raise LoadError(f"{path}: name the folder that holds this file and its config.json")
    return _open_gguf(path)
