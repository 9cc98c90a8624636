"""What is written is true: array shapes in docstrings, committed tables, commands in the README."""

import ast
import io
import os
import re
import shlex
import socket
import tomllib
from collections import Counter

import pytest

import xjax
from scripts import write_docs
from tests.cli.fake_llm import FakeLLM
from tests.sources import ROOT, Source, all_sources, make_source
from xjax.checkpoints import hub
from xjax_server import lifecycle
from xjax_server.cli import main, serve

SHAPED_PARTS = {"kernels", "state", "sampling", "models"}
ARRAY_TYPES = re.compile(r"\b(Array|ndarray|NDArray|ArrayLike)\b")

# Where a broad `except` may stand, how many, and why.
BROAD_EXCEPT = {
    "xjax/engine/delivery.py": (1, "top of the output thread"),
    "xjax/engine/loop.py": (
        6,
        "top of the engine thread; what a step or the device raises ends that step, what a move of pages "
        "raises ends that move",
    ),
    "xjax/engine/transfer.py": (1, "top of the mover's thread: a save that failed is reported"),
    "xjax/engine/warmup.py": (1, "top of a compile thread: what it raises goes to who waits"),
    "xjax/text/folder.py": (1, "tokenizers raises bare Exception"),
    "xjax/weights/saved/orbax.py": (1, "orbax raises bare Exception"),
    "xjax/weights/saved/writer.py": (1, "top of the writing thread: what it raises goes to who waits"),
    "xjax_server/app.py": (1, "top of the application: the envelope instead of a trace"),
    "xjax_server/cli/app.py": (1, "top of the command line: one line instead of a trace"),
    "xjax_server/lifecycle.py": (1, "top of the loading thread: what it raises goes to who waits"),
    "xjax_server/sse.py": (1, "the same for an answer whose status is out: an event"),
}


def _is_array(annotation: ast.expr | None) -> bool:
    text = ast.unparse(annotation) if annotation is not None else ""
    return bool(ARRAY_TYPES.search(text)) and "Callable" not in text


def _shaped_names(docstring: str) -> set[str]:
    """Names at the start of lines such as `k, v   [P, K, S, D]  cache dtype`."""
    names: set[str] = set()
    for match in re.finditer(r"^[ \t]*([\w.]+(?:, *[\w.]+)*) +\[", docstring, re.MULTILINE):
        names.update(name.strip() for name in match.group(1).split(","))
    return names


def unshaped(source: Source) -> list[str]:
    """Array arguments of public functions that the docstring gives no shape line."""
    bad = []
    for node in source.tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        shaped = _shaped_names(ast.get_docstring(node) or "")
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        wanted = [arg.arg for arg in arguments if _is_array(arg.annotation)]
        bad += [f"{source.path}:{node.name}: {name}" for name in wanted if name not in shaped]
    return bad


def unshaped_fields(source: Source) -> list[str]:
    """Array fields of public classes that the class's docstring gives no shape line."""
    bad = []
    for node in source.tree.body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        shaped = _shaped_names(ast.get_docstring(node) or "")
        wanted = [
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and _is_array(item.annotation)
        ]
        bad += [f"{source.path}:{node.name}: {name}" for name in wanted if name not in shaped]
    return bad


def _passes_on(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def broad_excepts(source: Source) -> int:
    """How often a source catches everything and keeps it."""
    handlers = [node for node in ast.walk(source.tree) if isinstance(node, ast.ExceptHandler)]
    handlers = [node for node in handlers if not _passes_on(node)]
    return sum(
        node.type is None or bool(re.search(r"\b(Base)?Exception\b", ast.unparse(node.type)))
        for node in handlers
    )


def test_arrays_have_shapes():
    sources = [source for source in all_sources() if source.part in SHAPED_PARTS]
    assert [line for source in sources for line in unshaped(source) + unshaped_fields(source)] == []


def test_a_missing_shape_is_seen():
    text = 'def f(q: jax.Array, k: Array, n: int):\n    """Do.\n\n    q   [N, H]  f32\n    """\n'
    assert unshaped(make_source("xjax/kernels/a.py", text)) == ["xjax/kernels/a.py:f: k"]
    text = 'class A:\n    """Hold.\n\n    k, v   [N]\n    """\n    k: jax.Array\n    w: jax.Array | None\n'
    assert unshaped_fields(make_source("xjax/kernels/a.py", text)) == ["xjax/kernels/a.py:A: w"]


def test_broad_excepts_are_counted():
    counts = Counter({source.path: broad_excepts(source) for source in all_sources()})
    allowed = {path: number for path, (number, _) in BROAD_EXCEPT.items()}
    assert +counts == Counter(allowed)


@pytest.mark.parametrize(
    ("clause", "count"),
    [
        ("except:", 1),
        ("except Exception:", 1),
        ("except (OSError, BaseException):", 1),
        ("except OSError:", 0),
    ],
)
def test_a_broad_except_is_seen(clause, count):
    text = f"try:\n    pass\n{clause}\n    clean_up()\n"
    assert broad_excepts(make_source("xjax/a.py", text)) == count
    assert broad_excepts(make_source("xjax/a.py", text + "    raise\n")) == 0


# ---- pages and commands ----


def _code_blocks(path, language):
    text = (ROOT / path).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in blocks if name == language]


@pytest.mark.parametrize("page", sorted(write_docs.PAGES))
def test_page_is_what_the_code_makes(page):
    made = write_docs.PAGES[page]()
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == made, "run scripts/write_docs.py"


def test_every_option_is_in_the_help(capsys):
    assert main(["generate", "--help"]) == 0
    text = capsys.readouterr().out
    flags = re.findall(r"^\| `(--[a-z-]+)`", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE)
    assert len(flags) > 10
    assert [flag for flag in flags if flag not in text] == []


def test_readme_commands_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(vars(xjax), "LLM", FakeLLM)
    monkeypatch.setattr(hub, "pull", lambda *args, **options: tmp_path)
    monkeypatch.setattr(hub, "list_models", lambda *args, **options: [])
    monkeypatch.setattr("builtins.input", lambda prompt: (_ for _ in ()).throw(EOFError))
    # How a server runs is tested elsewhere; here it ends before it begins.
    monkeypatch.setattr(lifecycle, "listen", lambda *place: socket.socket())
    monkeypatch.setattr(lifecycle, "run", lambda plan, listener: listener.close() or True)
    monkeypatch.setattr(serve, "_set_up_logging", lambda level: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    lines = "".join(_code_blocks("README.md", "sh")).splitlines()
    commands = [re.split(r"&&|\|", line)[-1].strip() for line in lines]
    commands = [shlex.split(command.removeprefix(".venv/bin/")) for command in commands]
    ours = [command[1:] for command in commands if command[0] == "xjax"]
    assert len(ours) == 8
    for arguments in ours:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from the pipe\n")))
        assert main(arguments) == 0, arguments


def test_scripts_named_in_the_documents_exist():
    for page in ("README.md", "CONTRIBUTING.md"):
        for line in "".join(_code_blocks(page, "sh")).splitlines():
            word = line.split()[0]
            if word.startswith("scripts/"):
                assert os.access(ROOT / word, os.X_OK), word


def test_readme_tree_is_there():
    (tree,) = [block for block in _code_blocks("README.md", "") if block.startswith("xjax/")]
    folder, bad = "", []
    for line in tree.splitlines():
        if "----" in line:
            continue
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name
        path = name if not line.startswith(" ") else folder + name
        if not (ROOT / path).exists():
            bad.append(path)
    assert bad == []


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]*)?\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_one_line_a_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.match(r"[\w-]+", item).group() for item in project["dependencies"]]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = [
        name.strip()
        for row in re.findall(r"^\| ([\w, -]+) \|", text, re.MULTILINE)
        for name in row.split(",")
    ]
    assert sorted(set(listed) - {"package"}) == sorted(names)
