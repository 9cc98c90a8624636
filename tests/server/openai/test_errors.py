"""What goes wrong reaches the official client as its own error classes, with message, code and param."""

import json
import threading

import openai
import pytest
from pydantic import ValidationError

from tests.server.fake_backend import FakeBackend, small_front
from tests.server.openai.conftest import connect
from tests.server.running import until
from xjax_server.openai.types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest


def user(text="hi"):
    return [{"role": "user", "content": text}]


def ask(client, text="hi", **fields):
    return client.chat.completions.create(**{"model": "small", "messages": user(text), **fields})


def complete(client, prompt="hi", **fields):
    return client.completions.create(model="small", prompt=prompt, **fields)


def test_an_unknown_model(client):
    with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
        ask(client, model="gpt-9")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        complete(client, extra_body={"model": "x" * 100_000})


def test_a_prompt_that_is_too_long(special_server):
    server = special_server(FakeBackend(max_model_len=32))
    with connect(server) as client:
        for call in (lambda: ask(client, "x" * 40), lambda: complete(client, ["ok", "x" * 40])):
            with pytest.raises(
                openai.BadRequestError, match="maximum context length is 32.* 40 tokens"
            ) as caught:
                call()
            assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError):
            complete(client, "x" * 32)
        assert complete(client, "x" * 31).usage.completion_tokens == 1
        assert server.backend.num_live == 0


def test_an_empty_prompt(client):
    for prompt in ("", ["hi", ""]):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, prompt)
        assert (caught.value.code, caught.value.param) == ("empty_prompt", "prompt")


def test_keys(special_server):
    server = special_server(FakeBackend(), api_keys=("secret",))
    with connect(server, "wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        ask(client)
    assert caught.value.code == "invalid_api_key"
    with connect(server, "secret") as client:
        assert ask(client, max_tokens=1).choices


def test_a_full_queue(special_server):
    server = special_server(FakeBackend(max_queue=1))
    server.backend.hold()
    with connect(server) as client:
        stream = ask(client, stream=True, max_tokens=2)
        for wants_stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                ask(client, stream=wants_stream)
            assert caught.value.response.headers["retry-after"] == "2"
        with pytest.raises(openai.RateLimitError):
            complete(client, ["several", "prompts"])
        server.backend.hold(False)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"


def test_several_prompts_are_taken_or_none(special_server):
    server = special_server(FakeBackend(max_queue=2))
    with connect(server) as client:
        server.backend.hold()
        with pytest.raises(openai.RateLimitError):
            complete(client, ["one", "two", "three"])
        assert server.backend.num_live == 0


def test_a_step_that_fails(special_server):
    server = special_server(FakeBackend(fail_at=3))
    with connect(server) as client:
        with pytest.raises(openai.InternalServerError, match="the step failed") as caught:
            ask(client)
        assert caught.value.status_code == 500
        pieces = []
        with pytest.raises(openai.APIError, match="the step failed"):
            for chunk in ask(client, stream=True):
                pieces.append(chunk.choices[0].delta.content or "")
        assert "".join(pieces) == "hi", "what was there before the failure is delivered"
        # The failure is that of the sample alone: the server goes on.
        assert ask(client, max_tokens=2).choices[0].message.content == "hi"
        with pytest.raises(openai.NotFoundError):
            ask(client, model="nobody")
    # A request is counted where it ended, and once.
    assert server.metric('xjax_requests_total{outcome="error"}') == 2
    assert server.service.metrics.refusals == {404: 1}


def test_waiting_too_long(special_server):
    server = special_server(FakeBackend(pace=0.05, prefill_steps=4), queue_timeout=0.05)
    with connect(server) as client, pytest.raises(openai.InternalServerError) as caught:
        ask(client)
    assert (caught.value.status_code, caught.value.code) == (503, "queue_timeout")


def test_what_took_too_long_is_not_asked_again(special_server):
    server = special_server(FakeBackend(pace=0.02), request_timeout=0.1)
    with connect(server) as client, pytest.raises(openai.InternalServerError) as caught:
        ask(client.with_options(max_retries=2))
    assert (caught.value.status_code, caught.value.code) == (503, "request_timeout")
    assert len(server.backend.requests) == 1


def test_while_the_model_loads(special_server):
    server = special_server(FakeBackend(), is_loaded=False)
    until(lambda: server.service is not None)
    with connect(server) as client:
        for call in (lambda: ask(client), lambda: complete(client), lambda: client.models.list()):
            with pytest.raises(openai.InternalServerError) as caught:
                call()
            assert (caught.value.status_code, caught.value.code) == (503, "model_loading")
            assert "retry-after" in caught.value.response.headers


@pytest.mark.parametrize("silently", [False, True])
def test_an_engine_that_dies(special_server, silently):
    server = special_server(FakeBackend(pace=0.02))
    errors = []

    def wait():
        with connect(server) as client:
            try:
                ask(client)
            except openai.APIError as error:
                errors.append(error)

    with connect(server) as client:
        stream = iter(ask(client, stream=True))
        next(stream)
        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: server.backend.num_live == 2)
        server.backend.die(silently=silently)
        with pytest.raises(openai.APIError, match="the engine has"):
            list(stream)
        waiting.join(10)
        assert [type(error) for error in errors] == [openai.InternalServerError]
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client)
        assert caught.value.status_code == 503
        assert server.request("GET", "/health")[0] != 200


def test_templates_that_fail_or_are_missing(special_server, client):
    with pytest.raises(openai.BadRequestError, match="broken") as caught:
        ask(client, "break the template")
    assert caught.value.param == "messages"
    server = special_server(FakeBackend(), front=small_front(None))
    with connect(server) as other, pytest.raises(openai.BadRequestError, match="no chat template"):
        ask(other)


def test_what_a_model_of_text_cannot_take(client):
    for part in (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
    ):
        with pytest.raises(openai.BadRequestError, match="takes text only"):
            client.chat.completions.create(model="small", messages=[{"role": "user", "content": [part]}])


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("response_format", SCHEMA),
        ("tools", [TOOL]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x", "format": "wav"}),
        ("web_search_options", {}),
        ("guided_json", {}),
        ("guided_choice", ["a"]),
        ("structured_outputs", {"regex": "a"}),
        ("grammar", "root ::= x"),
        ("bad_words", ["x"]),
        ("use_beam_search", True),
        ("chat_template", "{{ 1 }}"),
        ("echo", True),
        ("truncate_prompt_tokens", 5),
    ],
)
def test_what_is_refused_in_chats(client, field, value):
    with pytest.raises(openai.BadRequestError, match=f"{field}: not supported") as caught:
        ask(client, extra_body={field: value})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("best_of", 3),
        ("response_format", {"type": "json_object"}),
        ("prompt_embeds", "x"),
        ("logits_processors", ["x"]),
    ],
)
def test_what_is_refused_in_completions(client, field, value):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, extra_body={field: value})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", field)


CHAT_ERRORS = [
    ("temperature", "warm"),
    ("temperature", True),
    ("temperature", -0.5),
    ("temperature", 101),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("n", 0),
    ("n", 129),
    ("n", True),
    ("n", "2"),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**60),
    ("max_completion_tokens", "many"),
    ("min_tokens", -1),
    ("seed", 2**64),
    ("seed", 0.5),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"٣": 1}),
    ("logit_bias", [1]),
    ("stop", 5),
    ("stop", ""),
    ("stop", ["a"] * 65),
    ("stop", "x" * 1025),
    ("stop_token_ids", "5"),
    ("top_logprobs", 21),
    ("top_logprobs", 2),
    ("prompt_logprobs", 21),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("messages", None),
    ("messages", []),
    ("messages", "hi"),
    ("messages", {"role": "user", "content": "hi"}),
    ("chat_template_kwargs", []),
    ("model", 5),
    ("tools", {}),
    ("logprobs", 1),
]


@pytest.mark.parametrize(("field", "value"), CHAT_ERRORS)
def test_wrong_values_name_their_field(client, field, value):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body={field: value})
    assert caught.value.param == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a", 5]}, "stop.1"),
        ({"stop_token_ids": [1, True]}, "stop_token_ids.1"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": 5}]}, "messages.1.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": ["x"]}, "messages.0"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
    ],
)
def test_wrong_values_deeper_down_name_their_path(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [1, "x"]}, "prompt.1"),
        ({"prompt": ["x", 1]}, "prompt.1"),
        ({"prompt": [[1], 2]}, "prompt.1"),
        ({"prompt": [True]}, "prompt.0"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [2**31]}, "prompt.0"),
        ({"prompt": ["x"] * 513}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 11}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_wrong_values_in_completions(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, extra_body=fields)
    assert caught.value.param == param


START = b'{"model": "small", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], '


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        START + b'"user": "\xff"}',
        START + b'"user": "\\ud800"}',
        START + b'"user": "\\udc00\\ud800"}',
        START + b'"user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        START + b'"user": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        START + b'"n": 1' + b"0" * 5000 + b"}",
        START + b'"temperature": NaN}',
        START + b'"temperature": -Infinity}',
        START + b'"temperature": 1e999}',
        START + b'"n": 1e999}',
        START + b'"seed": 1' + b"0" * 400 + b"}",
        START + b'"logit_bias": {"5": NaN}}',
        START + b'"n": 1} trailing',
        START + b'"stop": "\\ud800"}',
    ],
    ids=lambda body: repr(body[-20:]),
)
def test_json_that_is_none(server, body):
    status, _, data = server.request("POST", "/v1/chat/completions", body)
    error = json.loads(data)["error"]
    assert status == 400 and error["message"] and error["type"] == "invalid_request_error"
    for path in ("/v1/completions", "/tokenize", "/detokenize"):
        status, _, data = server.request("POST", path, body)
        assert status in (200, 400)
        json.loads(data)


@pytest.mark.parametrize(
    "body",
    [
        START + b'"n": 1, "n": 1}',
        START + b'"user": "\\u0000", "stop": "\\u0000"}',
        START + b'"user": NaN, "metadata": 1e999}',
        START + b'"user": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"max_tokens": 1, "messages": [{"role": "\\u0000", "content": "\\u0000\\u2028\\ud83d\\ude00"}]}',
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": "x", "more": {"a": [NaN]}}]}',
    ],
    ids=lambda body: repr(body[-20:]),
)
def test_json_that_is_odd_and_served(server, body):
    status, _, data = server.request("POST", "/v1/chat/completions", body)
    assert status == 200, data
    json.loads(data)


@pytest.mark.parametrize(
    "kwargs",
    [
        {
            "": 1,
            "a b": 2,
            "ünï": 3,
            "loop": 4,
            "caller": 5,
            "context": 6,
            "template": 7,
            "values": 8,
            "name": 9,
        },
        {"range": 5, "namespace": None, "raise_exception": "x", "m": 1, "cls": 1, "args": 2, "kwargs": {}},
        {"bos_token": "<|end|>", "strftime_now": 1},
        {"deep": eval("[" * 90 + "]" * 90)},
    ],
)
def test_odd_variables_of_the_template(server, kwargs):
    body = {"messages": user(), "max_tokens": 1, "chat_template_kwargs": kwargs}
    assert server.request("POST", "/v1/chat/completions", body)[0] in (200, 400)


_MANY = 400
_FAULTS = [
    [-1] * _MANY, [None] * _MANY, [""] * _MANY, [[]] * _MANY, [{}] * _MANY, [[-1] * _MANY] * 3,
    {f"a{i}": 1 for i in range(_MANY)}, {str(i): "x" for i in range(_MANY)},
    [{"role": 1, "content": [{}] * _MANY, "tool_calls": [1] * _MANY}] * 3,
]  # fmt: skip


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_a_body_full_of_faults_is_left_at_the_first_ones(kind):
    """Each complaint takes a kilobyte, and a body has room for millions of faults."""
    for name in kind.model_fields:
        for value in _FAULTS:
            try:
                kind.model_validate_json(json.dumps({name: value}))
            except ValidationError as error:
                assert error.error_count() <= 5, (name, str(value)[:40])


def test_wrong_paths_and_methods(server):
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/tokenize", 405),
    ):
        found, _, data = server.request(method, path, None if method == "GET" else {})
        assert found == status
        assert json.loads(data)["error"]["message"]


def test_a_body_that_is_too_large(special_server):
    server = special_server(FakeBackend(), max_body=1000)
    with connect(server) as client, pytest.raises(openai.APIStatusError) as caught:
        ask(client, "x" * 2000)
    assert caught.value.status_code == 413


def test_nothing_is_left_behind(server):
    until(lambda: server.backend.num_live == 0)
    assert server.metric("xjax_active_requests") == 0
