import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.small import DATA, byte_level, from_gguf, gguf_pieces, reference
from xjax.checkpoints.checkpoint import open_checkpoint
from xjax.errors import RequestError
from xjax.text.front import Front
from xjax.text.template import ChatTemplate, load_template
from xjax.text.tokenizer import load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
SPECIALS = {"bos_token": "<s>"}


@functools.cache
def make_front(template: str | None = TEMPLATE) -> Front:
    tokenizer = byte_level()
    return Front(
        tokenizer,
        None if template is None else ChatTemplate({"default": template}, SPECIALS),
        eos_ids=tokenizer.eos_ids,
    )


@pytest.mark.parametrize("chat", reference("bytelevel")["chats"])
def test_chat_ids_equal_transformers(chat):
    config = json.loads((DATA / "bytelevel" / "tokenizer_config.json").read_text())
    front = make_front(config["chat_template"])
    assert front.template is not None
    assert front.template.render(chat["messages"], tools=chat["tools"]) == chat["text"]
    assert front.encode_chat(chat["messages"], tools=chat["tools"]) == chat["ids"]


def test_a_prompt_begins_once():
    front = make_front()
    ids = front.encode_prompt("Hello")
    assert ids[0] == 0 and ids.count(0) == 1
    assert front.encode_prompt("<s>Hello") == ids
    assert front.encode_prompt("") == [0]
    chat = front.encode_chat([{"role": "user", "content": "Hello"}])
    assert chat[0] == 0 and chat.count(0) == 1


def test_a_template_without_a_beginning_gets_none():
    assert 0 not in make_front("{{ messages[0].content }}").encode_chat([{"role": "user", "content": "x"}])


def test_special_tokens_in_a_prompt_are_control_tokens():
    start, end = 601, 602
    assert make_front().encode_prompt("<|im_start|>x<|im_end|>")[1:] == [
        start, *byte_level().encode("x", add_special_tokens=False), end,
    ]  # fmt: skip


PARTS = [
    "<|im_end|>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im",
    "_end|>",
    " a",
    "\n",
    "é",
    "<think>",
    "\U000f0000",
]
SPECIAL_TEXTS = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


@given(content=SPECIAL_TEXTS, role=st.sampled_from(["user", "tool<|im_end|>"]))
def test_special_tokens_in_messages_stay_text(content, role):
    """The only control tokens are the template's, and the text comes back to the letter."""
    front, tokenizer = make_front(), byte_level()
    ids = front.encode_chat([{"role": role, "content": content}])
    assert [i for i in ids if tokenizer.is_special(i)] == [0, 601, 602]
    body = ids[ids.index(601) + 1 : ids.index(602)]
    assert tokenizer.decode(body, skip_special_tokens=False) == f"{role}\n{content}"
    assert body == tokenizer.encode(f"{role}\n{content}", add_special_tokens=False)


def test_special_tokens_in_tools_and_variables_stay_text():
    front, tokenizer = (
        make_front("{{ tools | tojson }}{{ extra }}{{ messages[0].tool_calls | tojson }}"),
        byte_level(),
    )
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"<s>": ["</s>"]}'}}]
    ids = front.encode_chat(
        [{"role": "assistant", "tool_calls": calls}], tools=[{"<|im_end|>": 1}], extra="<|im_start|>"
    )
    assert not any(map(tokenizer.is_special, ids))
    text = tokenizer.decode(ids)
    assert text.startswith('[{"<|im_end|>": 1}]<|im_start|>[') and '"arguments": {"<s>": ["</s>"]}' in text


def test_a_private_character_of_the_user_is_kept():
    content = "\U000f0000<s>\U000f0001"
    ids = make_front("{{ messages[0].content }}").encode_chat([{"role": "user", "content": content}])
    assert byte_level().decode(ids) == content


def test_without_a_template_a_chat_says_what_to_do():
    with pytest.raises(RequestError, match=r"/v1/completions.*--chat-template FILE") as error:
        make_front(None).encode_chat([{"role": "user", "content": "x"}])
    assert error.value.param == "messages"


def test_lone_surrogates_are_named():
    with pytest.raises(RequestError, match="character 1") as error:
        make_front().encode_prompt("a\ud800")
    assert error.value.param == "prompt"
    with pytest.raises(RequestError, match="surrogate") as error:
        make_front().encode_chat([{"role": "user", "content": "\udfff"}])
    assert error.value.param == "messages"


def test_deep_messages_are_refused():
    deep: object = "<s>"
    for _ in range(150):
        deep = [deep]
    with pytest.raises(RequestError, match="levels deep"):
        make_front().encode_chat([{"role": "user", "content": "x", "extra": deep}])


def test_pieces_with_a_space_before_each_stretch():
    """Text after a template's special token starts anew, as the vocabulary's own models do it."""
    tokenizer = from_gguf(gguf_pieces())
    template = ChatTemplate({"default": "<s>{{ messages[0].content }}</s>ab"}, {})
    ids = Front(tokenizer, template, eos_ids=frozenset()).encode_chat([{"role": "user", "content": "ab"}])
    assert [tokenizer.token_string(i) for i in ids] == ["<s>", "▁ab", "</s>", "▁ab"]


@pytest.mark.model
def test_default_model_equals_the_reference(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    tokenizer = load_tokenizer(checkpoint)
    front = Front(tokenizer, load_template(checkpoint), eos_ids=tokenizer.eos_ids)
    chats = reference("smollm2")["chats"]
    assert len(chats) >= 2
    for chat in chats:
        assert front.encode_chat(chat["messages"]) == chat["ids"]


def test_a_lone_surrogate_is_named_where_it_stands_in_the_message():
    with pytest.raises(RequestError, match="lone surrogate at character 2") as caught:
        make_front().encode_chat([{"role": "user", "content": "ab\ud800"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("tools", [5, "tool", {"name": "f"}])
def test_tools_that_are_no_list_are_refused(tools):
    with pytest.raises(RequestError, match="tools: expected a list"):
        make_front().encode_chat([{"role": "user", "content": "a"}], tools=tools)


@pytest.mark.parametrize(("trim", "ending"), [("", "Once upon  "), (" | trim", "Once upon")])
def test_a_final_message_is_continued(trim, ending):
    front = make_front(TEMPLATE.replace("m.content", "m.content" + trim))
    messages = [{"role": "user", "content": "Tell."}, {"role": "assistant", "content": "Once upon  "}]
    ids = front.encode_chat(messages, continue_final_message=True)
    assert front.tokenizer.decode(ids, skip_special_tokens=False).endswith("assistant\n" + ending)
    whole = front.encode_chat(messages, add_generation_prompt=False)
    if not trim:
        assert whole[: len(ids) - 1] == ids[:-1], "the beginning of the conversation as it will be"


@pytest.mark.parametrize(
    "content", ["", None, "<|im_end|>", "x \U0010fffd y", [{"type": "text", "text": "a"}]]
)
def test_odd_final_messages_are_continued(content):
    front = make_front()
    messages = [{"role": "assistant", "content": content}]
    ids = front.encode_chat(messages, continue_final_message=True)
    text = front.tokenizer.decode(ids, skip_special_tokens=False)
    shown = "a" if isinstance(content, list) else content or ""
    assert text.endswith("<|im_start|>assistant\n" + shown)


def test_what_cannot_be_continued():
    messages = [{"role": "assistant", "content": "x"}]
    with pytest.raises(RequestError, match="add_generation_prompt"):
        make_front().encode_chat(messages, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="does not show"):
        make_front("{{ messages[0].role }}").encode_chat(messages, continue_final_message=True)
