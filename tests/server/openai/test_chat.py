import asyncio
import json

import openai
import pytest

from tests.server.fake_backend import FakeBackend
from tests.server.openai.conftest import connect
from tests.server.openai.folding import folded_chat, whole_chat

FACE = "aé😀b"  # 1, 2 (one token), 4 and 1 bytes: 7 tokens


def user(text):
    return [{"role": "user", "content": text}]


def ask(client, text="hello", **fields):
    return client.chat.completions.create(model="small", messages=user(text), **fields)


def both(client, text, **fields):
    """The same request, at once and as a stream: they must say the same."""
    reply = whole_chat(ask(client, text, **fields))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    assert folded_chat(ask(client, text, **fields, **options)) == reply
    return reply


def test_a_reply_has_the_official_form(client):
    reply = ask(client, "hi", max_tokens=4)
    assert reply.id.startswith("chatcmpl-") and reply._request_id == reply.id
    assert reply.object == "chat.completion"
    assert reply.model == "small"
    assert 1_700_000_000 < reply.created < 10_000_000_000, "seconds"
    assert reply.system_fingerprint.startswith("fp_")
    choice = reply.choices[0]
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (choice.message.role, choice.message.content, choice.message.refusal) == (
        "assistant",
        "hihi",
        None,
    )
    assert reply.usage.to_dict() == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stream_has_the_official_form(client):
    chunks = list(ask(client, "hi", max_tokens=3, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
    first, *middle, last = chunks
    assert first.choices[0].delta.to_dict() == {"role": "assistant", "content": "", "refusal": None}
    assert {(chunk.choices[0].delta.role, chunk.choices[0].finish_reason) for chunk in middle} == {
        (None, None)
    }
    assert last.choices[0].delta.to_dict() == {} and last.choices[0].finish_reason == "length"
    assert all("usage" not in chunk.to_dict() for chunk in chunks)


def test_usage_comes_last_and_once(client):
    options = {"include_usage": True}
    *before, last = list(ask(client, "hi", max_tokens=3, n=2, stream=True, stream_options=options))
    assert all("usage" in chunk.to_dict() and chunk.usage is None for chunk in before)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (2, 6, 8)


def test_running_usage_grows(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(client, "hi", max_tokens=5, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == 5


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 2, "n": 2},
        {"stop": ["b"]},
        {"stop": "ab", "include_stop_str_in_output": True},
        {"stop_token_ids": [70]},
        {"seed": 13},
        {"max_completion_tokens": 6},
    ],
)
def test_a_stream_equals_the_reply(client, fields):
    extra = {
        name: fields.pop(name) for name in ("include_stop_str_in_output", "stop_token_ids") if name in fields
    }
    both(client, FACE * 2 + "zab", **{"max_tokens": 30, **fields}, extra_body=extra)


@pytest.mark.parametrize("length", range(1, 16))
def test_characters_come_whole(client, length):
    choices, usage = both(client, FACE, max_tokens=length)
    text = choices[0][0]
    assert usage["completion_tokens"] == length
    # Only the very end of an answer that was cut inside of a character may be broken.
    assert (FACE * 3).startswith(text.rstrip("\ufffd"))
    pieces = [c.choices[0].delta.content or "" for c in ask(client, FACE, max_tokens=length, stream=True)]
    assert all("\ufffd" not in piece for piece in pieces[:-2])


def test_stops_at_every_split(client):
    text = "ab 123é😀 ab"
    answer = text * 2
    for start in range(len(text)):
        for end in range(start + 1, min(start + 5, len(text)) + 1):
            stop = text[start:end]
            choices, usage = both(client, text, stop=[stop], max_tokens=60)
            assert choices[0] == (answer[: answer.index(stop)], "stop", stop, None)
            kept = ask(
                client, text, stop=stop, max_tokens=60, extra_body={"include_stop_str_in_output": True}
            )
            assert kept.choices[0].message.content == answer[: answer.index(stop) + len(stop)]
            assert kept.usage.to_dict() == usage


def test_the_first_of_several_stops_counts(client):
    choices, usage = both(client, "uvwxyz", stop=["yz", "wx", "zz"], max_tokens=50)
    assert choices[0] == ("uv", "stop", "wx", None)
    assert usage["completion_tokens"] == 4, "up to the token that completed the stop"


def test_token_ids_that_stop(client):
    choices, usage = both(client, "hic", extra_body={"stop_token_ids": [68]}, max_tokens=9)
    assert choices[0] == ("hi", "stop", 68, None)
    assert usage["completion_tokens"] == 3
    choices, _ = both(client, "hic", extra_body={"stop_token_ids": [68], "min_tokens": 0}, max_tokens=2)
    assert choices[0][:3] == ("hi", "length", None)


def test_logprobs_have_a_tokens_bytes(client):
    ((text, _, _, entries),) = both(client, FACE, logprobs=True, top_logprobs=2, max_tokens=7)[0].values()
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text == FACE
    assert [entry["token"] for entry in entries] == ["a", "é", "\\xf0", "\\x9f", "\\x98", "\\x80", "b"]
    for entry in entries:
        assert entry["logprob"] == -0.5
        assert [top["token"] for top in entry["top_logprobs"]] == [entry["token"], "<|start|>"]


def test_logprobs_without_the_best(client):
    entries = ask(client, "hi", logprobs=True, max_tokens=2).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in entries] == [[], []]


def test_prompt_logprobs_and_ids(client):
    reply = ask(client, "hi", max_tokens=2, extra_body={"prompt_logprobs": 1, "return_token_ids": True})
    assert reply.prompt_token_ids == [73, 74]
    assert reply.choices[0].token_ids == [73, 74]
    assert reply.prompt_logprobs == [None, {"74": {"logprob": -0.25, "rank": 1, "decoded_token": "i"}}]
    chunks = list(ask(client, "hi", max_tokens=3, stream=True, extra_body={"return_token_ids": True}))
    assert chunks[0].prompt_token_ids == [73, 74]
    ids = [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", None) or []]
    assert ids == [73, 74, 73]


def test_what_the_backend_gets(client, server):
    ask(
        client,
        "hi",
        max_tokens=900,
        max_completion_tokens=3,
        n=2,
        temperature=0.25,
        top_p=0.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"70": 5, "71": -100},
        seed=2**63,
        stop=["x", "y"],
        logprobs=True,
        top_logprobs=4,
        extra_body={
            "top_k": 7,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [9],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "prompt_logprobs": 3,
            "priority": 5,
        },
    )
    request = server.backend.requests[-1]
    sampling = request.sampling
    assert request.priority == -5, "lower runs first on the wire, larger in the engine"
    assert (sampling.max_tokens, sampling.min_tokens, sampling.n, sampling.seed) == (3, 2, 2, 2**63)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 7, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        0.5,
        -0.5,
        1.5,
    )
    assert sampling.logit_bias == {70: 5.0, 71: -100.0}
    assert (sampling.stop, sampling.stop_token_ids) == (("x", "y"), (9,))
    assert (sampling.logprobs, sampling.prompt_logprobs) == (4, 3)
    assert (sampling.ignore_eos, sampling.skip_special_tokens, sampling.include_stop_str_in_output) == (
        True,
        False,
        True,
    )


def test_the_models_defaults_come_first(special_server):
    defaults = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}
    server = special_server(FakeBackend(), defaults=defaults)
    with connect(server) as client:
        ask(client, max_tokens=1, temperature=0)
    sampling = server.backend.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0, 20, 1.25)
    assert sampling.max_tokens == 1


def test_answers_end_at_the_context_when_nothing_is_said(special_server):
    server = special_server(FakeBackend(max_model_len=64))
    with connect(server) as client:
        for more in ({}, {"max_tokens": 32_000}, {"max_completion_tokens": 10**9}):
            reply = ask(client, "a" * 60, **more)
            assert reply.choices[0].finish_reason == "length"
            assert reply.usage.completion_tokens == 4


def test_nulls_and_unknown_fields_are_as_if_absent(client):
    plain = whole_chat(ask(client, "hi", max_tokens=3))
    nulls = dict.fromkeys(
        ("n", "stop", "temperature", "top_p", "logit_bias", "seed", "tools", "tool_choice", "response_format",
         "stream", "stream_options", "logprobs", "top_logprobs", "functions", "user", "metadata", "audio",
         "modalities", "max_completion_tokens", "guided_json", "chat_template_kwargs", "priority")
    )  # fmt: skip
    assert whole_chat(ask(client, "hi", max_tokens=3, extra_body=nulls)) == plain
    unknown = {"user": 5, "metadata": [1], "store": "x", "service_tier": {}, "no_such_field": {"a": [None]}}
    assert whole_chat(ask(client, "hi", max_tokens=3, extra_body=unknown)) == plain
    harmless = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
    }
    assert whole_chat(ask(client, "hi", max_tokens=3, extra_body=harmless)) == plain


def test_numbers_as_some_languages_write_them(client):
    assert ask(client, "hi", max_tokens=2.0, extra_body={"n": 1.0, "top_k": 5.0}).usage.completion_tokens == 2


@pytest.mark.parametrize("name", [None, "", "small", "org/small"])
def test_names(server, name):
    body = {"model": name, "messages": user("hi"), "max_tokens": 1}
    if name is None:
        del body["model"]
    status, _, data = server.request("POST", "/v1/chat/completions", body)
    assert status == 200
    assert f'"model":"{name or "small"}"'.encode() in data


def test_parts_of_text_are_joined(client):
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    messages = [{"role": "user", "content": parts}]
    assert (
        client.chat.completions.create(model="small", messages=messages, max_tokens=4)
        .choices[0]
        .message.content
        == "ab\ncd"
    )


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.name }}"
    "{% if 'refusal' in m %}REFUSAL{% endif %}"
    "{% for c in m.tool_calls %}|{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}]"
    "{% endfor %}{{ mood }}{{ reasoning_effort }}{% if tools %}TOOLS{% endif %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def test_what_the_template_gets(special_server):
    from tests.server.fake_backend import small_front

    server = special_server(FakeBackend(), front=small_front(TEMPLATE))
    history = [
        {"role": "user", "content": "hi", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "audio": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}

    def rendered(**fields):
        with connect(server) as client:
            client.chat.completions.create(model="small", messages=history, max_tokens=1, **fields)
        return server.model.front.tokenizer.decode(server.backend.requests[-1].prompt_ids)

    plain = '[user|hi|ann][assistant|||f{"x": 1}][tool|42|]'
    assert rendered() == plain + ">"
    assert rendered(extra_body={"chat_template_kwargs": {"mood": "glad"}}) == plain + "glad>"
    assert rendered(reasoning_effort="low") == plain + "low>"
    assert rendered(extra_body={"add_generation_prompt": False}) == plain
    assert rendered(tools=[tool], tool_choice="none") == plain + ">"
    history = [history[0], {"role": "assistant", "content": "well, "}]
    assert rendered(extra_body={"continue_final_message": True}) == "[user|hi|ann][assistant|well, "


def test_special_tokens_in_a_message_stay_text(client, server):
    reply = ask(client, "<|end|>", max_tokens=40)
    assert reply.choices[0].finish_reason == "length"
    assert 0 not in server.backend.requests[-1].prompt_ids
    assert reply.choices[0].message.content.startswith("<|end|><|end|>")


def test_an_event_is_one_line_whoever_splits_it(server):
    """Many clients read lines as str.splitlines makes them."""
    text = "a\u2028b\u2029c\x85d\x0be\x1cf\r\ng"
    body = {"messages": user(text), "stream": True, "max_tokens": len(text.encode()), "logprobs": True}
    lines = server.request("POST", "/v1/chat/completions", body)[2].decode().splitlines()
    assert all(line.startswith("data: ") for line in lines if line)
    choices = [c for line in lines if "{" in line for c in json.loads(line[6:])["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == text


def test_many_clients_at_once(server):
    """Streams and replies of many prompts side by side: each client gets its own."""
    texts = [f"client {number} é😀 " for number in range(48)]

    async def one(client, number):
        fields = {"messages": user(texts[number]), "max_tokens": 40, "model": "small"}
        if number % 2:
            return (await client.chat.completions.create(**fields)).choices[0].message.content
        stream = await client.chat.completions.create(**fields, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them():
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        async with client:
            return await asyncio.gather(*(one(client, number) for number in range(len(texts))))

    for text, found in zip(texts, asyncio.run(all_of_them()), strict=True):
        assert (text * 3).startswith(found.rstrip("\ufffd")) and len(found) > len(text)
