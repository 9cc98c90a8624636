import json

import pytest

from tests.server.fake_backend import small_front


def post(server, path, status=200, **body):
    found, _, data = server.request("POST", path, body)
    assert found == status, data
    return json.loads(data)


def test_a_text(server):
    reply = post(server, "/tokenize", prompt="hi ab<|end|>")
    assert reply == {"count": 4, "max_model_len": 4096, "tokens": [73, 74, 266, 0], "token_strs": None} | {
        "tokens": small_front().encode_prompt("hi ab<|end|>")
    }
    spelled = post(server, "/tokenize", model="small", prompt="hi é", return_token_strs=True)["token_strs"]
    assert spelled == ["h", "i", "Ġ", "Ã©"]


def test_messages(server):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": [{"type": "text", "text": "é"}]},
    ]
    assert post(server, "/tokenize", messages=messages)["tokens"] == small_front().encode_chat(messages)


@pytest.mark.parametrize("text", ["", "héllo 😀", "\0", "<|start|>a<|end|>", " 123  \n\n"])
def test_back_again(server, text):
    tokens = post(server, "/tokenize", prompt=text)["tokens"]
    assert post(server, "/detokenize", tokens=tokens) == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [1, "x"]}, "tokens.1"),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
    ],
)
def test_wrong_bodies(server, path, body, param):
    assert post(server, path, 400, **body)["error"]["param"] == param


def test_an_unknown_model(server):
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        assert post(server, path, 404, model="other", **body)["error"]["code"] == "model_not_found"
