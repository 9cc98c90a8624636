import datetime
import json
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.text.small import gguf_bytes
from xjax.checkpoints.checkpoint import Checkpoint
from xjax.errors import LoadError, RequestError
from xjax.text.template import ChatTemplate, load_template

USER = [{"role": "user", "content": "x"}]


def folder(path: Path, **files: object) -> Checkpoint:
    """A folder with files; "__" in a name stands for the dot."""
    for name, content in files.items():
        file = path / name.replace("__", ".").replace("--", "/")
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return Checkpoint("hf", path, {}, {}, MappingProxyType({}), (), "LlamaForCausalLM")


def gguf(**metadata: object) -> Checkpoint:
    return Checkpoint("gguf", Path("x.gguf"), gguf_bytes(**metadata), {}, MappingProxyType({}), (), "llama")


def render(template: ChatTemplate | None, **options) -> str:
    assert template is not None
    return template.render(USER, **options)


def test_every_place_in_order(tmp_path):
    assert load_template(folder(tmp_path)) is None
    assert render(load_template(folder(tmp_path, chat_template__json={"chat_template": "json"}))) == "json"
    assert (
        render(load_template(folder(tmp_path, tokenizer_config__json={"chat_template": "config"})))
        == "config"
    )
    assert render(load_template(folder(tmp_path, chat_template__jinja="jinja\n"))) == "jinja"
    override = tmp_path / "own.jinja"
    override.write_text("own")
    assert render(load_template(folder(tmp_path), override=override)) == "own"
    (tmp_path / "own.json").write_text('{"chat_template": "own json"}')
    assert render(load_template(folder(tmp_path), override=tmp_path / "own.json")) == "own json"


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].a }}"}]
    template = load_template(folder(tmp_path, tokenizer_config__json={"chat_template": named}))
    assert render(template) == "plain"
    assert render(template, tools=[]) == "plain"
    assert render(template, tools=[{"a": 1}]) == "1"
    only = ChatTemplate({"rag": "x"}, {})
    with pytest.raises(RequestError, match="no default chat template, only: rag"):
        only.render(USER)


def test_a_folder_of_further_templates(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    template = load_template(folder(tmp_path, chat_template__jinja="plain"))
    assert render(template) == "plain" and render(template, tools=[{}]) == "tools"


def test_gguf():
    assert load_template(gguf()) is None
    template = load_template(
        gguf(
            **{
                "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}{{ unk_token }}",
                "tokenizer.chat_template.tool_use": "tools",
            }
        )
    )
    assert render(template) == "<|start|><|end|>"
    assert render(template, tools=[{}]) == "tools"
    with pytest.raises(LoadError, match="tokenizer.chat_template is not a string"):
        load_template(gguf(**{"tokenizer.chat_template": 3}))


def test_special_tokens_of_a_folder(tmp_path):
    files = {
        "special_tokens_map__json": {"bos_token": "<old>", "unk_token": "<unk>"},
        "tokenizer_config__json": {"bos_token": {"content": "<s>"}, "eos_token": None},
        "chat_template__jinja": "{{ bos_token }}{{ unk_token }}{{ eos_token }}",
    }
    assert render(load_template(folder(tmp_path, **files))) == "<s><unk>"


def test_variables():
    source = (
        "{{ add_generation_prompt }} {{ tools is none }} {{ enable_thinking }} {{ strftime_now('%d %b %Y') }}"
    )
    template = ChatTemplate({"default": source}, {}, clock=lambda: datetime.datetime(2024, 7, 26))
    assert render(template, enable_thinking=False) == "True True False 26 Jul 2024"
    assert render(template, add_generation_prompt=False).startswith("False True  ")
    with pytest.raises(TypeError):
        template.render(USER, messages=[])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('only\n one turn') }}", "refused the messages: only one turn"),
        ("{{ messages[0].nothing.more }}", r"failed on the messages \(UndefinedError\)"),
        ("{{ messages[0]['content'] + 3 }}", r"failed on the messages \(TypeError\)"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            "was stopped: it takes",
        ),
        ("{% include 'x' %}", "TypeError|TemplateNotFound"),
    ],
)
def test_failures_are_one_line_about_the_messages(source, reason):
    with pytest.raises(RequestError, match=reason) as error:
        ChatTemplate({"default": source}, {}).render(USER)
    assert error.value.param == "messages" and "\n" not in str(error.value)


def test_messages_are_checked():
    with pytest.raises(RequestError, match="text only"):
        ChatTemplate({"default": "x"}, {}).render([{"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"chat_template__jinja": "{% if x %}"}, "'default' is not valid in line 1"),
        ({"chat_template__jinja": "{{ x | nofilter }}"}, "not valid in line 1: No filter named 'nofilter'"),
        ({"tokenizer_config__json": {"chat_template": 3}}, "neither a string nor a list"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "x"}]}}, "neither a string nor a list"),
        ({"chat_template__json": "{"}, "not valid JSON"),
    ],
)
def test_templates_that_are_none_are_named(tmp_path, files, reason):
    with pytest.raises(LoadError, match=reason):
        load_template(folder(tmp_path, **files))


def test_an_override_that_is_not_there(tmp_path):
    with pytest.raises(LoadError, match="none.jinja: the chat template cannot be read"):
        load_template(folder(tmp_path), override=tmp_path / "none.jinja")
    (tmp_path / "bad.jinja").write_bytes(b"\xff")
    with pytest.raises(LoadError, match="not UTF-8"):
        load_template(folder(tmp_path), override=tmp_path / "bad.jinja")


def test_a_huge_template_is_refused_at_once(tmp_path):
    with pytest.raises(LoadError, match="zero: larger than 4 MB, too large for a chat template"):
        load_template(folder(tmp_path), override=Path("/dev/zero"))
    text = "x" * (1 << 20)
    assert load_template(folder(tmp_path, chat_template__jinja=text))
    with pytest.raises(LoadError, match="longer than 1048576 characters"):
        load_template(folder(tmp_path, chat_template__jinja=text + "x"))


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
SILENT = [{"role": "user", "content": "None"}, CALL, {"role": "tool", "content": "42"}]


@pytest.mark.parametrize("call", [CALL, CALL | {"content": None}], ids=["absent", "null"])
@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for m in messages %}[{{ m['role'] + m['content'] }}]{% endfor %}",
            "[userNone][assistant][tool42]",
        ),
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[None][][42]"),
        ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "[None][][42]"),
        # One that knows tool calls is given what it asks for.
        (
            "{% for m in messages %}[{% if m.content is none or m.content is undefined %}"
            "{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}]{% endfor %}",
            "[None][f][42]",
        ),
    ],
)
def test_an_assistant_that_only_calls_tools_has_no_content(source, text, call):
    assert ChatTemplate({"default": source}, {}).render([SILENT[0], call, SILENT[2]]) == text


def test_a_template_that_fails_anyway_says_why():
    template = ChatTemplate({"default": "{{ raise_exception('no calls') }}"}, {})
    with pytest.raises(RequestError, match="refused the messages: no calls"):
        template.render(SILENT)


def test_developers_are_the_system_where_the_template_knows_none():
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]
    source = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
    assert ChatTemplate({"default": source}, {}).render(messages) == "[system|x][user|y]"
    aware = source + "{# developer #}"
    assert ChatTemplate({"default": aware}, {}).render(messages) == "[developer|x][user|y]"
    assert messages[0]["role"] == "developer"
