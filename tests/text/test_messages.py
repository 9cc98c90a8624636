import pytest

from xjax.errors import RequestError
from xjax.text.messages import check_messages


def user(content):
    return [{"role": "user", "content": content}]


def test_text_parts_are_joined_and_nothing_is_trimmed():
    parts = [{"type": "text", "text": " a "}, {"type": "text", "text": "b\n"}]
    assert check_messages(user(parts)) == user(" a \nb\n")
    assert check_messages(user(" \n")) == user(" \n")


def test_arguments_of_tool_calls_become_objects():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    (message,) = check_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    assert call["function"]["arguments"] == '{"a": [1]}'  # the caller's object is left alone
    broken = {"function": {"name": "f", "arguments": "{not json"}}
    (message,) = check_messages([{"role": "assistant", "tool_calls": [broken]}])
    assert message["tool_calls"][0]["function"]["arguments"] == "{not json"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one"),
        ("hello", "list"),
        ({"role": "user"}, "list"),
        (["x"], "number 0 is a str"),
        ([{"content": "x"}], "no role"),
        ([{"role": 3, "content": "x"}], "no role"),
        ([{"role": "user"}], "no content"),
        (user(None), "no content"),
        (user(7), "a int"),
        (user([7]), "a int"),
        (
            user([{"type": "image_url", "image_url": {"url": "data:"}}]),
            "'image_url'; this model takes text only",
        ),
        (user([{"type": "input_audio"}]), "takes text only"),
        (user([{"type": "text"}]), "text is null"),
        ([{"role": "assistant", "tool_calls": "f"}], "expected a list"),
        ([{"role": "assistant", "tool_calls": [3]}], "a int"),
    ],
)
def test_what_is_no_chat_is_named(messages, reason):
    with pytest.raises(RequestError, match=reason) as error:
        check_messages(messages)
    assert error.value.param == "messages" and "\n" not in str(error.value)
