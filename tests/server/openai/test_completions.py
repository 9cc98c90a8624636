import pytest

from tests.server.fake_backend import EOS, FakeBackend, small_front
from tests.server.openai.conftest import connect
from tests.server.openai.folding import folded_text, whole_text

FACE = "aé😀b"
HI = [73, 74]


def ask(client, prompt="hello", **fields):
    return client.completions.create(model="small", prompt=prompt, **fields)


def both(client, prompt, **fields):
    """The same request, at once and as a stream: they must say the same."""
    reply = whole_text(ask(client, prompt, **fields))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    assert folded_text(ask(client, prompt, **fields, **options)) == reply
    return reply


def test_a_reply_has_the_official_form(client):
    reply = ask(client, "hi", max_tokens=3)
    assert reply.id.startswith("cmpl-")
    assert (reply.object, reply.model) == ("text_completion", "small")
    assert 1_700_000_000 < reply.created < 10_000_000_000, "seconds"
    choice = reply.choices[0]
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "hih", "length", None)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (2, 3, 5)
    chunks = list(ask(client, "hi", max_tokens=3, stream=True))
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_sixteen_tokens_unless_told(client):
    assert ask(client, "hi").usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "texts", "num_prompt"),
    [
        ("hi", ["hihi"], 2),
        (["hi"], ["hihi"], 2),
        (["hi", "xyz"], ["hihi", "xyzx"], 5),
        (HI, ["hihi"], 2),
        ([HI, [66]], ["hihi", "aaaa"], 3),
    ],
)
def test_every_form_of_prompt(client, prompt, texts, num_prompt):
    choices, usage = both(client, prompt, max_tokens=4)
    assert [choices[i][0] for i in range(len(texts))] == texts
    assert usage["prompt_tokens"] == num_prompt
    assert usage["completion_tokens"] == 4 * len(texts)


def test_indexes_of_many_prompts_and_samples(client):
    choices, usage = both(client, ["uv", "xyz"], n=3, max_tokens=2)
    assert [choices[i][0] for i in range(6)] == ["uv"] * 3 + ["xy"] * 3
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 12)


def test_the_end_of_sequence(client):
    ids = [73, EOS, 74]
    assert both(client, ids, max_tokens=9)[0][0][:3] == ("h", "stop", None)
    assert both(client, ids, max_tokens=9)[1]["completion_tokens"] == 2
    text, reason, _, _ = both(client, ids, max_tokens=9, extra_body={"ignore_eos": True})[0][0]
    assert (text, reason) == ("hihihi", "length")
    more = {"ignore_eos": True, "skip_special_tokens": False}
    assert both(client, ids, max_tokens=4, extra_body=more)[0][0][0] == "h<|end|>ih"


def test_special_tokens_in_a_prompt_are_tokens(client, server):
    ask(client, "a<|start|>", max_tokens=1)
    assert server.backend.requests[-1].prompt_ids == (66, 1)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_logprobs(client, count):
    _, _, _, columns = both(client, FACE, max_tokens=9, logprobs=count)[0][0]
    assert columns["tokens"] == [
        "a",
        "é",
        "bytes:\\xf0",
        "bytes:\\x9f",
        "bytes:\\x98",
        "bytes:\\x80",
        "b",
        "a",
        "é",
    ]
    assert columns["token_logprobs"] == [-0.5] * 9
    # A character counts with the token that completes it.
    assert columns["text_offset"] == [0, 1, 2, 2, 2, 2, 3, 4, 5]
    names = [list(top) for top in columns["top_logprobs"]]
    assert names[0] == ["a", "<|start|>"][: max(count, 1)]


def test_offsets_leave_out_what_the_text_leaves_out(client):
    ids = [73, EOS, 74]
    more = {"ignore_eos": True}
    text, _, _, columns = both(client, ids, max_tokens=4, logprobs=0, extra_body=more)[0][0]
    assert (text, columns["text_offset"]) == ("hih", [0, 1, 1, 2])
    more["skip_special_tokens"] = False
    text, _, _, columns = both(client, ids, max_tokens=4, logprobs=0, extra_body=more)[0][0]
    assert (text, columns["text_offset"]) == ("h<|end|>ih", [0, 1, 8, 9])


def test_echo(client):
    choices, usage = both(client, ["hi", "xyz"], n=2, max_tokens=2, echo=True)
    assert [choices[i][0] for i in range(4)] == ["hihi", "hihi", "xyzxy", "xyzxy"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 8)
    assert both(client, HI, max_tokens=1, echo=True)[0][0][0] == "hih"
    assert both(client, [73, 1], max_tokens=1, echo=True)[0][0][0] == "h<|start|>h"


def test_echo_with_logprobs(client):
    for choice in both(client, FACE, n=2, max_tokens=2, echo=True, logprobs=1)[0].values():
        text, _, _, columns = choice
        assert text == FACE + "aé"
        assert len(columns["tokens"]) == 9
        assert columns["token_logprobs"] == [None, *[-0.25] * 6, -0.5, -0.5]
        assert columns["top_logprobs"][:2] == [None, {"é": -0.25}]
        assert columns["text_offset"] == [0, 1, 2, 2, 2, 2, 3, 4, 5]


def test_scoring(client, server):
    """As evaluation harnesses do: the prompt's log-probabilities and no token."""
    choices, usage = both(client, ["hello", "hi"], max_tokens=0, echo=True, logprobs=1)
    assert usage["completion_tokens"] == 0
    assert [choices[i][:3] for i in range(2)] == [("hello", "length", None), ("hi", "length", None)]
    assert choices[0][3]["tokens"] == list("hello")
    assert choices[0][3]["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert server.backend.requests[-1].sampling.prompt_logprobs == 1
    nothing, usage = both(client, "hi", max_tokens=0)
    assert nothing[0][0] == "" and usage["completion_tokens"] == 0


def test_prompt_logprobs_and_ids(client):
    reply = ask(
        client, ["hi", "xc"], max_tokens=1, extra_body={"prompt_logprobs": 0, "return_token_ids": True}
    )
    first, second = reply.choices
    assert (first.prompt_token_ids, first.token_ids) == ([73, 74], [73])
    assert first.prompt_logprobs == [None, {"74": {"logprob": -0.25, "rank": 1, "decoded_token": "i"}}]
    assert second.prompt_logprobs[1].keys() == {"68"}
    chunks = list(ask(client, "hi", max_tokens=3, stream=True, extra_body={"return_token_ids": True}))
    assert chunks[0].choices[0].prompt_token_ids == [73, 74]
    assert [i for chunk in chunks for i in chunk.choices[0].token_ids] == [73, 74, 73]


@pytest.mark.parametrize(
    "fields", [{"best_of": 1}, {"best_of": 2, "n": 2}, {"suffix": ""}, {"suffix": None}, {"user": "x"}]
)
def test_harmless_fields(client, fields):
    assert ask(client, "hi", max_tokens=2, **fields).choices[0].text == "hi"


def test_stops_over_prompts(client):
    choices, _ = both(client, ["abcd", "xbyb"], stop=["b"], max_tokens=20, n=2)
    assert [choices[i][:3] for i in range(4)] == [("a", "stop", "b")] * 2 + [("x", "stop", "b")] * 2


def beginning_front():
    """A front whose tokenizer puts <|start|> before a text."""
    front = small_front()
    front.tokenizer.prefix = (1,)
    return front


def test_what_is_put_before_a_text(special_server):
    server = special_server(FakeBackend(), front=beginning_front())
    with connect(server) as client:
        text, _, _, columns = both(client, "hi", max_tokens=1, echo=True, logprobs=0)[0][0]
        assert server.backend.requests[-1].prompt_ids == (1, 73, 74)
        assert text == "hi" and columns["tokens"][:3] == ["<|start|>", "h", "i"]
        assert columns["text_offset"] == [0, 0, 1, 2]
        # A text that begins with it does not begin twice.
        text, _, _, columns = both(client, "<|start|>hi", max_tokens=1, echo=True, logprobs=0)[0][0]
        assert server.backend.requests[-1].prompt_ids == (1, 73, 74)
        assert columns["text_offset"] == [0, 9, 10, 11]
        ask(client, "hi", max_tokens=1, extra_body={"add_special_tokens": False})
        assert server.backend.requests[-1].prompt_ids == (73, 74)


def test_equal_seeds_equal_answers(client):
    assert both(client, "xyz", seed=13, max_tokens=4)[0][0][0] == "zyxz"
    assert both(client, "xyz", seed=12, max_tokens=4)[0][0][0] == "xyzx"
