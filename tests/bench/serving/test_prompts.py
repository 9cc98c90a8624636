"""Prompts: exact lengths, a shared beginning, and nothing that was sent before."""

import asyncio
import json

import pytest

from xjax.errors import RequestError
from xjax_server.bench.serving.prompts import FIRST_ID, FilePrompts, IdPrompts, Shape, TextPrompts

SHAPE = Shape(input_len=40, output_len=8, shared_prefix=16)


def test_ids_have_the_length_and_the_range():
    prompts = IdPrompts(SHAPE, seed=0, vocab_size=500)
    found = [prompts.ids("a", i) for i in range(20)]
    assert {len(ids) for ids in found} == {40}
    assert min(map(min, found)) >= FIRST_ID - 50 and max(map(max, found)) < 500
    assert prompts.fields("a", 3) == {"prompt": found[3], "max_tokens": 8}


def test_only_the_shared_beginning_is_shared():
    prompts = IdPrompts(SHAPE, seed=0, vocab_size=30_000)
    found = [prompts.ids("a", i) for i in range(20)]
    assert len({tuple(ids[:16]) for ids in found}) == 1
    assert len({tuple(ids[16:20]) for ids in found}) == 20


def test_a_nonce_makes_everything_new():
    prompts = IdPrompts(SHAPE, seed=0, vocab_size=30_000)
    assert prompts.ids("a", 0) == prompts.ids("a", 0)
    assert prompts.ids("a", 0)[:16] != prompts.ids("b", 0)[:16]
    assert prompts.ids("a", 0)[16:] != prompts.ids("b", 0)[16:]
    assert prompts.ids("a", 0) != IdPrompts(SHAPE, seed=1, vocab_size=30_000).ids("a", 0)


def _words(fields):
    return (fields["messages"][0]["content"] if "messages" in fields else fields["prompt"]).split()


@pytest.mark.parametrize("is_chat", [True, False])
def test_text_is_fitted_by_what_the_server_counts(is_chat):
    prompts, asked = TextPrompts(SHAPE, seed=0, is_chat=is_chat), []

    async def count(fields):
        asked.append(_words(fields))
        return len(_words(fields)) + 11  # a template around it

    asyncio.run(prompts.fit(count))
    assert len(_words(prompts.fields("a", 0))) == 40 - 11
    assert len(asked) == 2 and asked[0] != asked[1]
    found = [_words(prompts.fields("a", i)) for i in range(5)]
    # 16 of the shared tokens are the template's 11 and 5 words.
    assert len({tuple(words[:5]) for words in found}) == 1
    assert len({tuple(words[5:9]) for words in found}) == 5
    assert found[0] != _words(prompts.fields("b", 0))


def test_a_template_longer_than_the_prompt_is_refused():
    async def count(fields):
        return len(_words(fields)) + 60

    with pytest.raises(RequestError, match="takes about 60"):
        asyncio.run(TextPrompts(SHAPE, seed=0, is_chat=True).fit(count))


def test_words_that_are_no_single_tokens_end_somewhere():
    async def count(fields):
        return 3 * len(_words(fields))

    prompts = TextPrompts(Shape(input_len=30), seed=0, is_chat=False)
    with pytest.raises(RequestError, match="too short"):
        asyncio.run(prompts.fit(count))


@pytest.mark.parametrize(
    "lengths", [{"input_len": 0}, {"output_len": 0}, {"shared_prefix": 128}, {"shared_prefix": -1}]
)
def test_lengths_are_checked(lengths):
    with pytest.raises(RequestError):
        Shape(**lengths)


def _file(tmp_path, *items):
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(item if isinstance(item, str) else json.dumps(item) for item in items))
    return path


def test_requests_of_a_file(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = _file(tmp_path, {"prompt": "p", "max_tokens": 3}, "", {"messages": messages})
    chat, plain = (FilePrompts(path, SHAPE, is_chat=is_chat) for is_chat in (True, False))
    assert chat.fields("n", 0) == {"messages": [{"role": "user", "content": "[n 0] p"}], "max_tokens": 3}
    assert chat.fields("n", 3)["messages"][0] == {"role": "system", "content": "[n 3] s"}
    assert chat.fields("n", 3)["messages"][1] == messages[1]
    assert plain.fields("n", 1) == {"prompt": "[n 1] s\nu", "max_tokens": 8}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":1: not JSON"),
        ("[1]", ":1: expected a JSON object"),
        ('{"prompt": 1}', ':1: expected "prompt" with text'),
        ('{"messages": [{"role": "user"}]}', "messages"),
        ("", "has no requests"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    with pytest.raises(RequestError, match=message):
        FilePrompts(_file(tmp_path, line), SHAPE, is_chat=True)
    with pytest.raises(RequestError, match="cannot be read"):
        FilePrompts(tmp_path / "none", SHAPE, is_chat=True)
