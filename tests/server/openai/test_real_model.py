"""The default model behind the API, in this process, so that its answers and those of LLM can be compared."""

import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import openai
import pytest

from tests.server.openai.conftest import connect
from tests.server.openai.folding import folded_chat, folded_text, whole_chat, whole_text
from tests.server.running import RunningServer, until
from xjax import LLM, SamplingParams
from xjax_server.openai import routes

pytestmark = [pytest.mark.model, pytest.mark.device]

SKY = [{"role": "user", "content": "Why is the sky blue?"}]
FRANCE = "The capital of France is"
# Greedy continuations in float32, made with transformers from the same file.
SKY_TEXT = "The answer to this question lies in the intricate dance of light"
FRANCE_IDS = [7042, 30, 198, 198, 504, 2988, 314, 42]


@pytest.fixture(scope="module")
def llm(smollm2_path):
    """The model at a size that compiles quickly."""
    # Numbers and float32 activations, as those that the texts below were made with.
    with LLM(smollm2_path, max_num_seqs=4, max_model_len=256, num_pages=64, kernels="xla") as made:
        yield made


@pytest.fixture(scope="module")
def server(llm):
    """The API around it."""
    stand_in = SimpleNamespace(max_model_len=llm.max_model_len, close=lambda: None)
    running = RunningServer(stand_in, routes=routes, front=llm.front, names=("smollm2",))
    running.model = replace(running.model, backend=llm.engine, defaults=llm.generation_defaults)
    with running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    """The official client of it."""
    with connect(server) as found:
        yield found.with_options(timeout=120)


def chat(client, **fields):
    return client.chat.completions.create(**{"model": "smollm2", "messages": SKY, **fields})


def complete(client, prompt=FRANCE, **fields):
    return client.completions.create(model="smollm2", prompt=prompt, **fields)


def test_ids_equal_those_of_the_library(llm, server, client):
    params = llm.default_params().replace(max_tokens=12, temperature=0)
    mine = llm.chat(SKY, params)[0]
    reply = chat(client, max_tokens=12, temperature=0, extra_body={"return_token_ids": True})
    assert reply.prompt_token_ids == mine.prompt_token_ids
    assert reply.choices[0].token_ids == mine.outputs[0].token_ids
    assert reply.choices[0].message.content == mine.outputs[0].text == SKY_TEXT
    counted = json.loads(server.request("POST", "/tokenize", {"messages": SKY})[2])
    assert counted["tokens"] == mine.prompt_token_ids
    assert reply.usage.prompt_tokens == counted["count"] == 36
    scored = (
        chat(client, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    )
    mine = llm.chat(SKY, params.replace(logprobs=2))[0].outputs[0]
    assert b"".join(bytes(entry.bytes) for entry in scored).decode() == SKY_TEXT
    for entry, token_id, best in zip(scored, mine.token_ids, mine.logprobs, strict=True):
        assert entry.logprob == pytest.approx(best[token_id].logprob, abs=1e-5)
        assert entry.token == best[token_id].decoded_token == entry.top_logprobs[0].token
    raw = complete(client, max_tokens=8, temperature=0, extra_body={"return_token_ids": True}).choices[0]
    assert raw.token_ids == FRANCE_IDS
    assert raw.prompt_token_ids == llm.tokenizer.encode(FRANCE)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"seed": 5, "n": 2},
        {"seed": 5, "logprobs": True, "top_logprobs": 3},
        {"temperature": 0, "stop": [" dance"]},
        {"seed": 5, "frequency_penalty": 1.0, "logit_bias": {"198": -100}},
    ],
)
def test_a_stream_equals_the_reply(client, fields):
    fields = {"max_tokens": 16, **fields}
    choices, usage = whole_chat(chat(client, **fields))
    stream = chat(client, **fields, stream=True, stream_options={"include_usage": True})
    assert folded_chat(stream) == (choices, usage)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_reasons_to_end(client):
    stopped = chat(client, temperature=0, stop=" dance", max_tokens=30).choices[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", " dance")
    assert stopped.message.content == SKY_TEXT.removesuffix(" dance of light")
    assert chat(client, max_tokens=3).choices[0].finish_reason == "length"
    short = [{"role": "user", "content": "Say yes."}]
    ended = chat(client, messages=short, temperature=0, max_tokens=200).choices[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    by_id = complete(client, temperature=0, max_tokens=8, extra_body={"stop_token_ids": [FRANCE_IDS[2]]})
    assert (by_id.choices[0].finish_reason, by_id.choices[0].stop_reason) == ("stop", FRANCE_IDS[2])
    assert by_id.usage.completion_tokens == 3


def test_scoring_a_prompt(llm, client):
    """Echo with no new token gives what the model thinks of the text: the same as for ids."""
    text = FRANCE + " Paris."
    fields = {"max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    choices, usage = whole_text(complete(client, text, **fields))
    assert usage["completion_tokens"] == 0
    ((said, reason, _, columns),) = choices.values()
    assert (said, reason) == (text, "length")
    assert "".join(columns["tokens"]) == text
    assert columns["token_logprobs"][0] is None and max(columns["token_logprobs"][1:]) <= 0
    assert columns["text_offset"] == [
        text.index(token, at) for token, at in zip(columns["tokens"], columns["text_offset"], strict=True)
    ]
    by_ids = whole_text(complete(client, llm.tokenizer.encode(text), **fields))[0]
    assert by_ids == choices
    expected = llm.generate([text], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))[0]
    scores = [next(iter(entry.values())).logprob for entry in expected.prompt_logprobs[1:]]
    assert columns["token_logprobs"][1:] == pytest.approx(scores, abs=1e-4)
    stream = complete(client, text, **fields, stream=True, stream_options={"include_usage": True})
    assert folded_text(stream) == (choices, usage)
    fields |= {"max_tokens": 2, "n": 2, "seed": 3, "temperature": 1}
    stream = complete(client, text, **fields, stream=True, stream_options={"include_usage": True})
    assert folded_text(stream) == whole_text(complete(client, text, **fields))


def test_equal_seeds_equal_texts_under_load(client, server):
    def ask(seed):
        return chat(client, seed=seed, temperature=1, max_tokens=20).choices[0].message.content

    alone = {seed: ask(seed) for seed in (1, 2)}
    assert alone[1] != alone[2]
    found = {}

    def work(number):
        found[number] = ask(1 + number % 2)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(12)] == [alone[1 + number % 2] for number in range(12)]


def test_leaving_frees_pages(client, server):
    until(lambda: server.metric('xjax_pages_used{group="0"}') == 0)
    stream = chat(client, n=3, max_tokens=200, stream=True, extra_body={"ignore_eos": True})
    chunks = iter(stream)
    for _ in range(6):
        next(chunks)
    assert server.metric('xjax_pages_used{group="0"}') > 0
    assert server.metric("xjax_running_sequences") == 3
    aborted = server.metric('xjax_requests_total{outcome="abort"}')
    stream.close()
    until(lambda: server.metric('xjax_pages_used{group="0"}') == 0)
    assert server.metric('xjax_requests_total{outcome="abort"}') == aborted + 1


def test_an_engine_thread_that_dies(llm, client, server, monkeypatch):
    """The last test: nothing is served after it."""
    stream = chat(client, max_tokens=200, stream=True, extra_body={"ignore_eos": True})
    chunks = iter(stream)
    for _ in range(4):
        next(chunks)

    def fail():
        raise RuntimeError("killed")

    monkeypatch.setattr(llm.engine, "_turn", fail)
    with pytest.raises(openai.APIError, match="killed"):
        list(chunks)
    stream.close()
    assert server.request("GET", "/health")[0] == 503
    with pytest.raises(openai.InternalServerError, match="killed") as caught:
        chat(client, max_tokens=1)
    assert caught.value.status_code == 503
