"""Small tokenizers that the tests of the text front share."""

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from xjax.text.folder import load_folder
from xjax.text.tokenizer import Tokenizer
from xjax.text.vocabulary.gguf import build_vocabulary

DATA = Path(__file__).parent / "data"


@functools.cache
def byte_level() -> Tokenizer:
    """The trained byte-level folder of scripts/golden_text.py."""
    return Tokenizer(*load_folder(DATA / "bytelevel", None))


@functools.cache
def reference(name: str) -> dict[str, Any]:
    """Reference values that scripts/golden_text.py wrote."""
    return json.loads((DATA / f"{name}_ids.json").read_text())


def gguf_pieces(**changes: Any) -> dict[str, Any]:
    """Metadata of a little SentencePiece vocabulary: bytes, letters, some words, a space mark."""
    words = ["▁", "a", "b", "c", "d", "é", "▁a", "ab", "▁ab", "cd", "abcd", "▁abcd"]
    runs = ["  ", "   "]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *runs, "<tag>", *words]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 4, 4, 4, *[1] * len(words)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-1000.0] * 3 + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


def gguf_bytes(**changes: Any) -> dict[str, Any]:
    """Metadata of a little byte-level vocabulary: every byte, some pairs, two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ["Ġ a", "a b", "Ġa b", "1 2", "12 3", "Ã ©", "Ċ Ċ"]
    joined = [pair.replace(" ", "") for pair in pairs]
    tokens = ["<|end|>", "<|start|>", *alphabet, *joined]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": pairs,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


def from_gguf(metadata: dict[str, Any], cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of some metadata."""
    return Tokenizer(*build_vocabulary(metadata, cache_dir))
