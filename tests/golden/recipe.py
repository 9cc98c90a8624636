"""The tiny Llamas and Gemmas whose logits are kept in golden.npz, and how weights are made for all.

Used by scripts/golden, which runs them through transformers, and by the tests. Weights come from
numpy's generator seeded by case and tensor name, under the names of Hugging Face checkpoints, so
the file holds logits alone. Norms and biases are random, so that leaving one out shows.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden.npz"
HIDDEN = Path(__file__).parent / "hidden.npz"
ROUNDED = Path(__file__).parent / "bfloat16.json"
# Cases of which hidden states after the last norm are kept, those of every position.
HIDDEN_CASES = ("llama_tied", "gemma_soft_cap")

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 61, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 61, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "attention_bias": False, "query_pre_attn_scalar": 24, "sliding_window": 9, "sliding_window_pattern": 6,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_LONG_ROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.0, 2.0, 6.0, 16.0],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A tiny model and its prompt.

    length    tokens of the prompt     last   how many positions' logits are kept, from the end
    context   the engine's longest sequence, where frequencies go by it; None: the model's own
    """

    name: str
    changes: dict[str, Any]
    length: int = 44
    last: int = 44
    context: int | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The config.json of the case."""
        return {**(_GEMMA if self.name.startswith("gemma") else _LLAMA), **self.changes}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by its Hugging Face name."""
        return shapes(self.config)

    @property
    def norms_count_from_one(self) -> bool:
        """Whether the family adds one to its norm weights."""
        return self.name.startswith("gemma")

    @property
    def ids(self) -> np.ndarray:
        """The prompt, [length] int32."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        return rng.integers(0, self.config["vocab_size"], self.length).astype(np.int32)


CASES = {
    case.name: case
    for case in (
        Case("llama_tied", {}),
        Case("llama_mha_biases", {
            "num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True,
            "tie_word_embeddings": False}),
        Case("llama_mqa8_wide", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16}),
        Case("llama_linear", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        Case("llama_llama3", {"rope_scaling": _LLAMA3_ROPE, "head_dim": 16}),
        Case("llama_dynamic", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        Case("llama_parameters", {
            "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        Case("llama_long", {"num_hidden_layers": 1}, 2100, 24),
        Case("llama_long_llama3", {"num_hidden_layers": 1, "rope_scaling": _LLAMA3_ROPE}, 2100, 24),
        Case("llama_long_linear", {
            "num_hidden_layers": 1, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 2100, 24),
        Case("llama_long_dynamic", {
            "num_hidden_layers": 1, "max_position_embeddings": 1200,
            "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 2100, 24, context=2100),
        Case("llama_long_untruncated", {
            "num_hidden_layers": 1, "head_dim": 16, "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1500,
                "truncate": False}}, 2100, 24),
        Case("llama_long_longrope", {
            "num_hidden_layers": 1, "original_max_position_embeddings": 2000,
            "rope_scaling": _LONG_ROPE}, 2100, 24),
        Case("llama_long_shortrope", {
            "num_hidden_layers": 1, "original_max_position_embeddings": 2200,
            "rope_scaling": _LONG_ROPE | {"original_max_position_embeddings": 8}}, 2100, 24, context=2200),
        Case("gemma_tied", {}),
        Case("gemma_layer_types", {
            "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "tie_word_embeddings": False, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        Case("gemma_soft_cap", {
            "num_hidden_layers": 2, "sliding_window_pattern": 2, "final_logit_softcapping": 3.0}),
        Case("gemma_long", {
            "num_hidden_layers": 2, "sliding_window_pattern": 2, "sliding_window": 100}, 2100, 24),
    )
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint, by its Hugging Face name."""
    dim, ffn, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads, vocab = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["vocab_size"],
    )
    is_gemma = config["model_type"] == "gemma3_text"
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, dim),
        "model.norm.weight": (dim,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, dim)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if is_gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for i in range(config["num_hidden_layers"]):
        layer = {f"{name}.weight": (dim,) for name in norms}
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            layer[f"self_attn.{name}_proj.weight"] = (count * size, dim)
            if config["attention_bias"]:
                layer[f"self_attn.{name}_proj.bias"] = (count * size,)
        layer["self_attn.o_proj.weight"] = (dim, heads * size)
        if config["attention_bias"]:
            layer["self_attn.o_proj.bias"] = (dim,)
        if is_gemma:
            layer |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
        for name, shape in (("gate", (ffn, dim)), ("up", (ffn, dim)), ("down", (dim, ffn))):
            layer[f"mlp.{name}_proj.weight"] = shape
            if config.get("mlp_bias"):
                layer[f"mlp.{name}_proj.bias"] = shape[:1]
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return found


def weights(case: Case) -> dict[str, np.ndarray]:
    """Every tensor of a case, float32, by its Hugging Face name."""
    return {name: _draw(case, name, shape) for name, shape in case.shapes.items()}


def _draw(case: Case, name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng([zlib.crc32(case.name.encode()), zlib.crc32(name.encode())])
    values = rng.standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 0.4 * values + (0.0 if case.norms_count_from_one else 1.0)
    elif name.endswith(".bias"):
        values = 0.5 * values
    else:
        values = values * (2.0 / np.sqrt(shape[-1]))
    return values.astype(np.float32)
