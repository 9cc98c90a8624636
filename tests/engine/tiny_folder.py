"""Writes a tiny Llama as a Hugging Face folder: safetensors, a tokenizer of ASCII characters, a template."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

E, HEADS, KV_HEADS, D, F, LAYERS = 32, 4, 2, 16, 64, 2
CONTEXT = 256
SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> tokenizers.Tokenizer:
    """One token a character, so that every longer string lies over several."""
    characters = ["Ġ" if code == 32 else chr(code) for code in range(32, 127)]
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *characters])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return inner


def write_folder(folder: Path, *, tokenizer: bool = True) -> Path:
    """Fill a folder; the weights are those of a fixed seed, steep enough for texts that wander."""
    rng = np.random.default_rng(11)
    vocab = len(SPECIALS) + 95
    folder.mkdir(parents=True, exist_ok=True)

    def matrix(rows, columns, scale):
        return (scale * rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": rng.standard_normal((vocab, E)).astype(np.float32) * 0.5}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        tensors |= {
            f"{at}.input_layernorm.weight": np.ones(E, np.float32),
            f"{at}.post_attention_layernorm.weight": np.ones(E, np.float32),
            f"{at}.self_attn.q_proj.weight": matrix(HEADS * D, E, 2),
            f"{at}.self_attn.k_proj.weight": matrix(KV_HEADS * D, E, 2),
            f"{at}.self_attn.v_proj.weight": matrix(KV_HEADS * D, E, 2),
            f"{at}.self_attn.o_proj.weight": matrix(E, HEADS * D, 1.6),
            f"{at}.mlp.gate_proj.weight": matrix(F, E, 1),
            f"{at}.mlp.up_proj.weight": matrix(F, E, 1),
            f"{at}.mlp.down_proj.weight": matrix(E, F, 1),
        }
    tensors["model.norm.weight"] = np.ones(E, np.float32)
    head = rng.standard_normal((vocab, E)).astype(np.float32)
    head[: len(SPECIALS)] *= 0.02  # special tokens are rare
    tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": E,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": D, "intermediate_size": F, "vocab_size": vocab, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
        "eos_token_id": 1, "bos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generation = {"temperature": 0.7, "top_k": 5, "eos_token_id": [1, 3], "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer:
        make_tokenizer().save(str(folder / "tokenizer.json"))
        settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
