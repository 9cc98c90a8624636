"""The engine answers as the golden logits say: windows, layer norms, experts, its context."""

import numpy as np
import pytest

from tests.golden.checkpoints import write_folder
from tests.golden.families import FAMILY_CASES
from tests.golden.recipe import CASES, GOLDEN
from tests.golden.test_families import model, rows_of
from tests.paged import run_alone
from xjax import LLM, SamplingParams
from xjax.errors import LoadError

pytestmark = pytest.mark.device

DRAWN = SamplingParams(temperature=1, seed=3, max_tokens=16, ignore_eos=True, logprobs=1)
OPTIONS = {"max_num_seqs": 2, "page_size": 4, "prefill_chunk_size": 16, "num_pages": 40, "max_model_len": 64}


@pytest.mark.parametrize("name", ["mistral_window", "gemma2_caps", "starcoder2_biases", "qwen2moe_mixed"])
def test_log_probabilities_are_those_of_the_logits(name, tmp_path):
    ids = [int(token) for token in FAMILY_CASES[name].ids]
    prompts = [ids[:29], ids[5:16]]
    with LLM(write_folder(FAMILY_CASES[name], tmp_path), skip_tokenizer_init=True, **OPTIONS) as llm:
        outputs = [result.outputs[0] for result in llm.generate(prompts, DRAWN)]
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.token_ids)
        assert len(answer) == 16 and len(set(answer)) > 3
        tokens = prompt + answer[:-1]
        logits = run_alone(rows_of(*model(name)), tokens, [len(tokens)])[len(prompt) - 1 :].astype(np.float64)
        wanted = logits[np.arange(16), answer] - np.log(np.exp(logits).sum(-1))
        found = [entry[token].logprob for entry, token in zip(output.logprobs, answer, strict=True)]
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("name", ["llama_long_dynamic", "llama_long_shortrope"])
def test_frequencies_go_by_the_longest_sequence(name, tmp_path):
    case = CASES[name]
    options = OPTIONS | {"page_size": 16, "prefill_chunk_size": 512, "num_pages": 160}
    options["max_model_len"] = case.context
    prompt = [int(token) for token in case.ids[:2090]]
    with LLM(write_folder(case, tmp_path), skip_tokenizer_init=True, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
        entry = llm.generate([prompt], params)[0].outputs[0].logprobs[0]
    with np.load(GOLDEN) as file:
        logits = file[name][len(prompt) - case.length - 1].astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum())
    assert len(entry) == 20
    for token, found in entry.items():
        assert abs(found.logprob - wanted[token]) < 1e-4


def test_dynamic_scaling_is_asked_for_by_the_context(tmp_path):
    folder = write_folder(CASES["llama_long_dynamic"], tmp_path)
    options = OPTIONS | {"page_size": 16, "num_pages": 160, "max_model_len": None}
    with LLM(folder, skip_tokenizer_init=True, **options) as llm:
        assert llm.max_model_len == 1200  # what the model was trained for
    with pytest.raises(LoadError, match="--max-model-len 2401 is above the model's context, 2400"):
        LLM(folder, skip_tokenizer_init=True, **options | {"max_model_len": 2401})
