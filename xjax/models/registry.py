"""The one place where architecture strings occur: from a checkpoint's word to a model family.

A family is a module of this folder with a `FAMILY`. To add one, write the module and a line of
`_FAMILIES`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from xjax.errors import LoadError
from xjax.models import (
    gemma2,
    gemma3,
    glm4,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    starcoder2,
)  # fmt: skip
from xjax.models.family import Family


@dataclass(frozen=True)
class Entry:
    """A line of the table of supported models.

    title   for people        module   its own, whose docstring says what is special about it
    hf      `architectures` of config.json
    gguf    `general.architecture` of a GGUF
    """

    title: str
    module: ModuleType
    hf: tuple[str, ...]
    gguf: tuple[str, ...]

    @property
    def family(self) -> Family:
        """What the module offers."""
        return self.module.FAMILY


_FAMILIES = (
    Entry("Llama 2, Llama 3, SmolLM2, Yi", llama, ("LlamaForCausalLM",), ("llama",)),
    Entry("Mistral, Ministral", mistral, ("MistralForCausalLM", "MinistralForCausalLM"), ()),
    Entry("Qwen 2, Qwen 2.5", qwen2, ("Qwen2ForCausalLM",), ("qwen2",)),
    Entry("Qwen 3", qwen3, ("Qwen3ForCausalLM",), ("qwen3",)),
    Entry("Qwen 1.5 MoE, Qwen 2 MoE", qwen2_moe, ("Qwen2MoeForCausalLM",), ("qwen2moe",)),
    Entry("Qwen 3 MoE", qwen3_moe, ("Qwen3MoeForCausalLM",), ("qwen3moe",)),
    Entry("Mixtral", mixtral, ("MixtralForCausalLM",), ()),
    Entry("Gemma 2", gemma2, ("Gemma2ForCausalLM",), ("gemma2",)),
    Entry("Gemma 3 (text)", gemma3, ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), ("gemma3",)),
    Entry("Phi-3, Phi-4-mini", phi3, ("Phi3ForCausalLM",), ("phi3",)),
    Entry("GLM-4-0414", glm4, ("Glm4ForCausalLM",), ("glm4",)),
    Entry("Granite 3", granite, ("GraniteForCausalLM",), ("granite",)),
    Entry("OLMo 2", olmo2, ("Olmo2ForCausalLM",), ("olmo2",)),
    Entry("OLMo 3", olmo3, ("Olmo3ForCausalLM",), ()),
    Entry("StarCoder2", starcoder2, ("Starcoder2ForCausalLM",), ("starcoder2",)),
)


def supported() -> tuple[Entry, ...]:
    """Return the table of supported models, from which the docs are made."""
    return _FAMILIES


def family_for(architecture: str) -> Family:
    """Find the family of an architecture string; raises LoadError that lists the known ones."""
    for entry in _FAMILIES:
        if architecture in entry.hf or architecture in entry.gguf:
            return entry.family
    known = ", ".join(name for entry in _FAMILIES for name in (*entry.hf, *entry.gguf))
    raise LoadError(f"architecture {architecture!r} is not supported; known: {known}")


def load_config(
    kind: str, architecture: str, config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> tuple[Family, Any]:
    """Find the family of a checkpoint and read its Config.

    kind      "hf" or "gguf"
    config    config.json, or the metadata of a GGUF
    tensors   the checkpoint's tensors by name
    """
    family = family_for(architecture)
    if kind == "gguf":
        return family, family.config_from_gguf(config, tensors)
    return family, family.config_from_hf(config)
