"""transformers on torch as a subject of the benchmark: float32, sdpa, the same weights and threads.

The model is built from the very GGUF file that xjax reads, dequantized by our reader, so both
compute with equal numbers; `check` proves it. The loop is the leanest there is: one call a step,
argmax of the last position, no generate(). Needs torch and transformers, which are not dependencies.
"""

import importlib
import importlib.util
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xjax.checkpoints.checkpoint import Checkpoint, open_checkpoint
from xjax.errors import LoadError

_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# What each model type calls its norms around the feed-forward half.
_NORMS = {
    "llama": {"ffn_norm.weight": "post_attention_layernorm.weight"},
    "gemma3": {
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    },
}


def missing() -> str | None:
    """Say why the peer cannot run, None when it can."""
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed" if absent else None


def weights_of(checkpoint: Checkpoint) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Read a GGUF's tensors under the names and in the layout of transformers."""
    kind = checkpoint.architecture
    names, found = _LAYER_NAMES | _NORMS[kind], dict[str, Any]()
    for name, view in checkpoint.tensors.items():
        values = view.read()
        if name in _TOP_NAMES:
            target = _TOP_NAMES[name]
        elif name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            target = f"model.layers.{layer}.{names[rest]}"
            if kind == "llama" and rest in ("attn_q.weight", "attn_k.weight"):
                key = "head_count" if rest == "attn_q.weight" else "head_count_kv"
                values = _halves(values, int(checkpoint.config[f"llama.attention.{key}"]))
        else:
            continue  # tables that the config repeats
        # A Gemma checkpoint counts norm weights from one, the file does not.
        found[target] = values - np.float32(1) if kind == "gemma3" and "norm" in target else values
    return found


def _halves(rows: Any, num_heads: int) -> Any:
    """Undo the pairing of rotary dimensions: rows 0, 2, 4 ... of a head first, then 1, 3, 5 ..."""
    heads = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return heads.transpose(0, 2, 1, 3).reshape(rows.shape)


def settings_of(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    """Model type and config fields of transformers from GGUF metadata."""
    kind = checkpoint.architecture
    if checkpoint.kind != "gguf" or kind not in _NORMS or checkpoint.saved is not None:
        found = "what xjax convert wrote" if checkpoint.saved is not None else kind
        raise LoadError(f"the transformers peer reads GGUF files of {', '.join(_NORMS)}, not {found}")
    get: Mapping[str, Any] = {key.removeprefix(f"{kind}."): value for key, value in checkpoint.config.items()}
    heads = int(get["attention.head_count"])
    fields: dict[str, Any] = {
        "vocab_size": checkpoint.tensors["token_embd.weight"].shape[0],
        "hidden_size": int(get["embedding_length"]),
        "intermediate_size": int(get["feed_forward_length"]),
        "num_hidden_layers": int(get["block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(get["attention.head_count_kv"]),
        "head_dim": int(get.get("attention.key_length", int(get["embedding_length"]) // heads)),
        "max_position_embeddings": int(get["context_length"]),
        "rms_norm_eps": float(get["attention.layer_norm_rms_epsilon"]),
        "tie_word_embeddings": "output.weight" not in checkpoint.tensors,
    }
    theta = float(get["rope.freq_base"])
    if kind == "llama":
        return "llama", fields | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    rope = {"full_attention": theta, "sliding_attention": 10000.0}
    fields["rope_parameters"] = {
        name: {"rope_type": "default", "rope_theta": base} for name, base in rope.items()
    }
    window = int(get["attention.sliding_window"])
    return "gemma3_text", fields | {"sliding_window": window, "query_pre_attn_scalar": fields["head_dim"]}


class TorchPeer:
    """transformers' own model class in inference mode."""

    def __init__(self, model: str, *, threads: int) -> None:
        reason = missing()
        if reason is not None:
            raise LoadError(f"the transformers peer cannot run: {reason}")
        self._torch: Any = importlib.import_module("torch")
        library: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(threads)
        checkpoint = open_checkpoint(Path(model))
        kind, fields = settings_of(checkpoint)
        config = library.AutoConfig.for_model(kind, **fields)
        self._model = library.AutoModelForCausalLM.from_config(
            config, dtype=self._torch.float32, attn_implementation="sdpa"
        ).eval()
        self._load(weights_of(checkpoint))

    def _load(self, weights: dict[str, Any]) -> None:
        state = {name: self._torch.from_numpy(np.array(values)) for name, values in weights.items()}
        absent, unknown = self._model.load_state_dict(state, strict=False, assign=True)
        left = [name for name in absent if name != "lm_head.weight"] + list(unknown)
        if left:
            raise LoadError(f"the transformers peer got no weights for {', '.join(left[:3])}")
        self._model.tie_weights()

    def describe(self) -> dict[str, Any]:
        """Settings worth printing."""
        return {
            "options": {"threads": self._torch.get_num_threads(), "attention": "sdpa", "dtype": "float32"}
        }

    def _step(self, ids: Any, cache: Any) -> tuple[Any, Any]:
        out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    def _run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[list[int]], list[float]]:
        """Tokens of each row, and seconds of each call, the prompt's first."""
        torch, seconds, columns = self._torch, list[float](), list[Any]()
        with torch.inference_mode():
            ids, cache = torch.tensor([list(prompt) for prompt in prompts]), None
            for _ in range(num_tokens):
                began = time.perf_counter()
                ids, cache = self._step(ids, cache)
                columns.append(ids.tolist())
                seconds.append(time.perf_counter() - began)
        return [[column[row][0] for column in columns] for row in range(len(prompts))], seconds

    def check(self, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
        """Greedy `ids` after a prompt."""
        return {"ids": self._run([prompt], num_tokens)[0][0]}

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """`seconds` [1] of the call that takes the whole prompt."""
        return {"seconds": self._run([prompt], 1)[1]}

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
        """`seconds` of each call after the prompt's; all prompts must be equally long."""
        return {"seconds": self._run(prompts, num_tokens)[1][2:]}

    def close(self) -> None:
        """Nothing to let go of."""
