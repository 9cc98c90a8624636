"""How a family's checkpoints differ from what `weights.names` expects. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TensorNames = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Naming:
    """Where the tensors of a family are, and how they lie.

    hf, gguf               names by field that differ; one name for a fused field: it is fused in the file;
                           "{}" stands for the number of an expert, each of which has a tensor then
    hf_norm_offset         added to norm weights of a Hugging Face folder
    hf_pairs, gguf_pairs   q and k rows lie in neighbouring pairs, for rotation of neighbours
    """

    hf: Mapping[str, TensorNames] = field(default_factory=dict[str, TensorNames])
    gguf: Mapping[str, TensorNames] = field(default_factory=dict[str, TensorNames])
    hf_norm_offset: float = 0.0
    hf_pairs: bool = False
    gguf_pairs: bool = False
