"""A GGUF file as a folder that transformers and vLLM read, with equal numbers in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.text.vocabulary.gguf import build_vocabulary
from xjax_server.bench.offline.torch_peer import settings_of, weights_of

_CLASSES = {"llama": "LlamaForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}


def write_folder(model: Path, folder: Path) -> Path:
    """Write config, weights and tokenizer of a model. Raises LoadError for a family that is not known."""
    checkpoint = open_checkpoint(model)
    kind, fields = settings_of(checkpoint)
    tokenizer, specials = build_vocabulary(checkpoint.config, None)
    config: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "dtype": "float32",
        "bos_token_id": specials.bos_id,
        "eos_token_id": sorted(specials.eos_ids),
        **fields,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {name: np.ascontiguousarray(values) for name, values in weights_of(checkpoint).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
