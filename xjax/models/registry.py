"""The one place where architecture strings occur: from a checkpoint's word to a model family.

A family is a module of this folder that offers what `Family` lists. To add one, write the module
and a line of `_FAMILIES`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from xjax.config import CacheSpec
from xjax.errors import LoadError
from xjax.models import gemma2, gemma3, glm4, granite, llama, mistral, olmo2, phi3, qwen2, qwen3, starcoder2
from xjax.models.layers import Params
from xjax.models.naming import Naming
from xjax.state.batch import Batch
from xjax.state.kv import EngineState


class Family(Protocol):
    """What a model module offers; `config` is its own frozen Config."""

    NAMING: Naming

    def config_from_hf(self, values: Mapping[str, Any]) -> Any:
        """Read a config.json."""
        ...

    def config_from_gguf(self, values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
        """Read GGUF metadata, given the tensors by name."""
        ...

    def cache_spec(self, config: Any) -> CacheSpec:
        """Say what each layer keeps between steps."""
        ...

    def specs(self, config: Any) -> Params:
        """Describe every parameter with a ParamSpec."""
        ...

    def abstract(self, config: Any, dtype: jnp.dtype) -> Params:
        """Describe the parameters with ShapeDtypeStructs."""
        ...

    def shardings(self, config: Any, mesh: Mesh) -> Params:
        """Give each parameter its sharding."""
        ...

    def init(self, key: jax.Array, config: Any, dtype: jnp.dtype) -> Params:
        """Draw random parameters from a jax.random key."""
        ...

    def forward(
        self,
        params: Params,
        config: Any,
        state: EngineState,
        batch: Batch,
        *,
        wanted: jax.Array | None = None,
        trace: bool = False,
    ) -> Any:
        """Run a step: hidden [N, E], or [J, E] of the `wanted` tokens, and the new state."""
        ...

    def logits(self, params: Params, config: Any, hidden: jax.Array, *, backend: str = "xla") -> jax.Array:
        """Score every word: hidden [J, E] -> [J, V] float32."""
        ...


@dataclass(frozen=True)
class Entry:
    """A line of the table of supported models.

    title   for people        family   its module
    hf      `architectures` of config.json
    gguf    `general.architecture` of a GGUF
    """

    title: str
    family: Family
    hf: tuple[str, ...]
    gguf: tuple[str, ...]


_FAMILIES = (
    Entry("Llama 2, Llama 3, SmolLM2, Yi", llama, ("LlamaForCausalLM",), ("llama",)),
    Entry("Mistral, Ministral", mistral, ("MistralForCausalLM", "MinistralForCausalLM"), ()),
    Entry("Qwen 2, Qwen 2.5", qwen2, ("Qwen2ForCausalLM",), ("qwen2",)),
    Entry("Qwen 3", qwen3, ("Qwen3ForCausalLM",), ("qwen3",)),
    Entry("Gemma 2", gemma2, ("Gemma2ForCausalLM",), ("gemma2",)),
    Entry("Gemma 3 (text)", gemma3, ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), ("gemma3",)),
    Entry("Phi-3, Phi-4-mini", phi3, ("Phi3ForCausalLM",), ("phi3",)),
    Entry("GLM-4-0414", glm4, ("Glm4ForCausalLM",), ("glm4",)),
    Entry("Granite 3", granite, ("GraniteForCausalLM",), ("granite",)),
    Entry("OLMo 2", olmo2, ("Olmo2ForCausalLM",), ("olmo2",)),
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
