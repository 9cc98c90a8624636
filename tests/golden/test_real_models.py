"""The two real models, teacher-forced along the reference answers of transformers in float32.

The reference files hold prompts, greedy ids and the best five log-probabilities of the first
steps, made from the same GGUF files dequantized to float32.
"""

import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.paged import PagedRows, run_alone
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.models.registry import load_config
from xjax.weights.load import load_params

pytestmark = [pytest.mark.device, pytest.mark.model]

TOLERANCE = 1e-3


BACKENDS = ["xla", "numba"] if importlib.util.find_spec("numba") else ["xla"]


def _check(path: Path, reference: str, backend: str) -> None:
    checkpoint = open_checkpoint(path)
    family, config = load_config(
        checkpoint.kind, checkpoint.architecture, checkpoint.config, checkpoint.tensors
    )
    params = load_params(checkpoint, family, config, dtype=jnp.dtype("float32"))
    prompts = json.loads((Path(__file__).parent / reference).read_text(encoding="utf-8"))["prompts"]
    for prompt in prompts:
        start, ids = len(prompt["prompt_ids"]), prompt["ids"]
        tokens = prompt["prompt_ids"] + ids[:-1]
        rows = PagedRows(
            family,
            config,
            params,
            num_rows=1,
            num_tiles=2,
            tile=128,
            page_size=16,
            max_pages=64,
            can_decode=False,
            backend=backend,
        )
        chunks = [256] * (len(tokens) // 256) + [len(tokens) % 256]
        logits = run_alone(rows, tokens, [count for count in chunks if count])[start - 1 :].astype(np.float64)
        assert logits.argmax(-1).tolist() == ids, prompt["name"]
        logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        logprobs -= logits.max(-1, keepdims=True)
        for step, best in enumerate(prompt["top5"]):
            for token, wanted in best:
                assert logprobs[step, token] == pytest.approx(wanted, abs=TOLERANCE), (prompt["name"], step)


@pytest.mark.parametrize("backend", BACKENDS)
def test_smollm2(smollm2_path, backend):
    _check(smollm2_path, "smollm2_135m.json", backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gemma3(gemma_path, backend):
    _check(gemma_path, "gemma3_270m.json", backend)
