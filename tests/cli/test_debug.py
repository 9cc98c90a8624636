"""`xjax debug template`: what it shows of a model's folder, without weights and without JAX."""

import json
import re
import subprocess
import sys

import pytest

from tests.engine.tiny_folder import make_tokenizer
from xjax_server.cli import main

KEEPS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DROPS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}"
    "</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model without weights worth the name."""
    monkeypatch.setenv("XJAX_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": KEEPS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def shown(capsys, *arguments):
    assert main(["debug", "template", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def numbers(text):
    """(in pages, the same, hit) of each case."""
    found = re.findall(
        r"in pages after turn 1: (\d+) tokens; turn 2 begins with (\d+) of them\nturn 2 hits (\d+)", text
    )
    return [tuple(map(int, item)) for item in found]


def test_nothing_parts(folder, capsys):
    text = shown(capsys, folder)
    ((pages, same, hit),) = numbers(text)
    assert same == pages and hit == same // 16 * 16
    assert "nothing parts" in text and "they part" not in text and text.startswith("# an answer\n")
    assert "  | <|user|>Which city is the capital of France" in text


def test_thoughts_that_the_template_drops(folder, capsys, tmp_path):
    (tmp_path / "drops.jinja").write_text(DROPS)
    text = shown(
        capsys, folder, "--chat-template", tmp_path / "drops.jinja", "--page-size", 4, "--thoughts", "Hm."
    )
    (pages, same, hit), (more, fewer, less) = numbers(text)
    assert same == pages and hit == pages // 4 * 4
    prompt = int(re.findall(r"turn 1: a prompt of (\d+) tokens", text)[1])
    assert fewer == prompt < more and less == prompt // 4 * 4
    assert f"they part after token {prompt}:" in text
    assert re.search(r'in pages  "<" "t" "h" "i" "n" "k" ">"', text)
    assert re.search(r'turn 2    "P" "a" "r" "i" "s" "\."', text)
    assert f"it would hit {more // 4 * 4} if" in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--template-kwargs", "{"], "--template-kwargs is not JSON"),
        (["--template-kwargs", "[1]"], "must be a JSON object"),
        (["--template-kwargs", '{"messages": 1}'], "cannot be set here"),
        (["--chat-template", "missing.jinja"], "missing.jinja"),
        (["--page-size", "0"], "--page-size"),
    ],
)
def test_what_is_wrong_is_one_line(folder, capsys, arguments, line):
    assert main(["debug", "template", str(folder), *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and line in said.err and said.err.count("\n") == 1


def test_alone_it_says_what_there_is(capsys):
    assert main(["debug"]) == 2
    assert (
        capsys.readouterr().err == "xjax: error: name what to look into: template (see `xjax debug --help`)\n"
    )


def test_a_model_without_a_template(folder, capsys):
    (folder / "tokenizer_config.json").write_text("{}")
    assert main(["debug", "template", str(folder)]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_no_jax_is_loaded(folder):
    code = (
        "import sys; from xjax_server.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code or ('jax' in sys.modules and 3))"
    )
    command = [sys.executable, "-c", code, "debug", "template", str(folder)]
    assert subprocess.run(command, capture_output=True).returncode == 0
