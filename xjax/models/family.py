"""What a model module offers as its `FAMILY`: how its files are read, and the functions that run it.

Most families are decoders and only say how their files differ; the others bring functions of their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from xjax.config import CacheSpec
from xjax.models import decoder
from xjax.models.layers import Params
from xjax.models.naming import Naming
from xjax.state.mesh import abstract_params, init_params, param_shardings


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A kind of model; `config` is what its readers return, hashable.

    naming             how its tensors are called and lie
    config_from_hf     from the values of a config.json
    config_from_gguf   from GGUF metadata and the tensors by name
    cache_spec         what each layer keeps between steps, of a config
    for_length         a config settled for sequences of at most so many tokens
    specs              a ParamSpec for every parameter, of a config
    forward            runs a step: see `decoder.forward`
    logits             scores every word: see `decoder.logits`
    """

    config_from_hf: Callable[[Mapping[str, Any]], Any]
    config_from_gguf: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    naming: Naming = field(default_factory=Naming)
    cache_spec: Callable[[Any], CacheSpec] = decoder.cache_spec
    for_length: Callable[[Any, int], Any] = decoder.for_length
    specs: Callable[[Any], Params] = decoder.specs
    forward: Callable[..., Any] = decoder.forward
    logits: Callable[..., jax.Array] = decoder.logits

    @property
    def name(self) -> str:
        """Name of the module that the family is."""
        return self.config_from_hf.__module__.rpartition(".")[2]

    def abstract(self, config: Any, dtype: jnp.dtype) -> Params:
        """Describe the parameters with ShapeDtypeStructs."""
        return abstract_params(self.specs(config), dtype)

    def shardings(self, config: Any, mesh: Mesh) -> Params:
        """Give each parameter its sharding."""
        return param_shardings(self.specs(config), mesh)

    def init(self, key: jax.Array, config: Any, dtype: jnp.dtype) -> Params:
        """Draw random parameters.

        key   []   a jax.random key
        """
        return init_params(key, self.specs(config), dtype)
