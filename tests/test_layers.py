"""Who may import whom: the five import rules, over the syntax tree of every source file.

Each rule is a function from sources to complaints, so that it is tested on made-up files that
break it as well as on the real ones.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.sources import Source, all_sources, make_source

FLOOR_0 = {"errors", "config", "request", "backend"}
HOST = {"checkpoints": 1, "storage": 2, "text": 2, "grammar": 3, "cache": 3, "scheduler": 4}
DEVICE = {"kernels": 1, "state": 2, "sampling": 3, "models": 3, "weights": 4}
SERVER_MAY_IMPORT = FLOOR_0 | {"text", "checkpoints", "storage", "grammar"}
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax"}
# Third-party packages that may be imported inside a function, since they are optional or slow.
LATE_IMPORTS = {
    "aiohttp": "needed by the load client only",
    "huggingface_hub": "half a second, and needed for downloads only",
    "jax_triton": "raises when jaxlib has no GPU",
    "llvmlite": "tenths of a second, and needed for Numba's kernels only",
    "numba": "half a second, and needed for its kernels only",
    "xjax.kernels.attention.numba": "imports numba",
    "xjax.kernels.candidates.numba": "imports numba",
    "xjax.kernels.norm.numba": "imports numba",
    "xjax.kernels.chain.numba": "imports numba",
    "xjax.kernels.linear.lookup": "imports numba",
    "xjax.kernels.linear.numba": "imports numba",
    "xjax.kernels.moe.numba": "imports numba",
    "xjax.kernels.qkv.numba": "imports numba",
    "llguidance": "needed for constrained output only",
    "orbax": "seconds to import, and needed for converted checkpoints only",
    "torch": "not a dependency",
    "uvicorn": "needed by one command only",
    "xjax_server.cli.terminal.divergence": "imports tokenizers and jinja2, for one command",
}
READS_ENVIRONMENT = {
    "xjax/config.py": "the one reader of our variables",
    "xjax/engine/build.py": "sets the number of threads, which the backend takes from there alone",
    "xjax/checkpoints/fetch/attempt.py": "hands the whole of it to a child process",
    "xjax_server/bench/offline/startup.py": "hands the whole of it to a child process",
}


@dataclass(frozen=True)
class Import:
    """One imported module: who imports it, in which line, and whether inside a function."""

    source: Source
    target: str
    line: int
    is_inner: bool

    def __str__(self) -> str:
        return f"{self.source.path}:{self.line} imports {self.target}"

    @property
    def part(self) -> str | None:
        """Part of xjax that is imported, "" for xjax itself, None for anything else."""
        pieces = self.target.split(".")
        if pieces[0] != "xjax":
            return None
        return pieces[1] if len(pieces) > 1 else ""


def _targets(node: ast.AST, modules: set[str], source: Source) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        home = node.module or ""
        if node.level:
            package = source.module if source.is_package else source.module.rpartition(".")[0]
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            home = ".".join([*above, home] if home else above)
        for alias in node.names:
            full = f"{home}.{alias.name}"
            yield full if full in modules else home


def imports(sources: list[Source]) -> list[Import]:
    """Every import of every source, those in functions and under TYPE_CHECKING too."""
    modules = {source.module for source in sources}
    found = []
    for source in sources:
        tree = source.tree
        inner = {
            (node.lineno, node.col_offset)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        for node in ast.walk(tree):
            for target in _targets(node, modules, source):
                place = (node.lineno, node.col_offset)
                found.append(Import(source, target, node.lineno, place in inner))
    return found


def _is_lazy_front(source: Source) -> bool:
    return source.path == "xjax/__init__.py"


def _may_import(part: str, target: str) -> bool:
    if target in FLOOR_0 or target == part:
        return True
    if part == "engine":
        return target in HOST or target in DEVICE
    if part == "weights" and target == "checkpoints":
        return True
    for tower in (HOST, DEVICE):
        if part in tower:
            return target in tower and tower[target] < tower[part]
    return False


def rule_1_floors(sources: list[Source]) -> list[str]:
    """A file imports from lower floors of its tower, floor 0 and its own folder."""
    bad = []
    for item in imports(sources):
        if item.source.module.startswith("xjax_server") or _is_lazy_front(item.source) or item.part is None:
            continue
        if not _may_import(item.source.part, item.part):
            bad.append(str(item))
    return bad


def rule_2_no_device_library(sources: list[Source]) -> list[str]:
    """Floor 0, the host tower and the server import no jax, jaxlib or flax."""
    bad = []
    for item in imports(sources):
        is_host = item.source.module.startswith("xjax_server") or item.source.part in HOST.keys() | FLOOR_0
        if (is_host or _is_lazy_front(item.source)) and item.target.split(".")[0] in DEVICE_LIBRARIES:
            bad.append(str(item))
    return bad


def rule_3_server(sources: list[Source]) -> list[str]:
    """The server imports floor 0, four host parts and the lazy names; nothing imports the server."""
    bad = []
    for item in imports(sources):
        if item.source.module.startswith("xjax_server"):
            if item.part not in SERVER_MAY_IMPORT | {None, ""}:
                bad.append(str(item))
        elif item.target.split(".")[0] == "xjax_server":
            bad.append(str(item))
    return bad


def rule_4_no_late_import(sources: list[Source]) -> list[str]:
    """No import inside a function but of a listed package; the environment is read in one file."""
    bad = [
        str(i)
        for i in imports(sources)
        if i.is_inner and not {i.target, i.target.split(".")[0]} & LATE_IMPORTS.keys()
    ]
    for source in sources:
        if source.path in READS_ENVIRONMENT:
            continue
        for node in ast.walk(source.tree):
            is_read = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
            if is_read and isinstance(node.value, ast.Name) and node.value.id == "os":
                bad.append(f"{source.path}:{node.lineno} reads the environment")
    return bad


def rule_5_no_cycle(sources: list[Source]) -> list[str]:
    """No two folders import each other; a folder imports nothing of the folders it lies in."""
    edges: dict[tuple[str, str], Import] = {}
    modules = {source.module: source for source in sources}
    for item in imports(sources):
        target = modules.get(item.target)
        if target is None or _is_lazy_front(item.source):
            continue
        pair = (item.source.path.rpartition("/")[0], target.path.rpartition("/")[0])
        # `import xjax` for its lazy names reaches a file that itself imports nothing early.
        if pair[0] != pair[1] and not _is_lazy_front(target):
            edges.setdefault(pair, item)
    return [f"{edges[a, b]}, and {edges[b, a]}" for a, b in sorted(edges) if a < b and (b, a) in edges]


RULES = [rule_1_floors, rule_2_no_device_library, rule_3_server, rule_4_no_late_import, rule_5_no_cycle]


@pytest.mark.parametrize("rule", RULES)
def test_rule_holds(rule):
    assert rule(all_sources()) == []


def test_every_part_has_a_floor():
    parts = {source.part for source in all_sources() if source.module.startswith("xjax.")}
    assert parts <= FLOOR_0 | HOST.keys() | DEVICE.keys() | {"engine"}


BROKEN = [
    (rule_1_floors, "xjax/text/a.py", "from xjax.scheduler.plan import Plan"),
    (rule_1_floors, "xjax/text/a.py", "import xjax.state.kv"),
    (rule_1_floors, "xjax/state/a.py", "from xjax.text import tokenizer"),
    (rule_1_floors, "xjax/models/a.py", "from xjax.checkpoints.gguf import read"),
    (rule_1_floors, "xjax/sampling/a.py", "from xjax.models.llama import forward"),
    (rule_1_floors, "xjax/config.py", "from xjax.text.front import Front"),
    (rule_1_floors, "xjax/cache/a.py", "def f():\n    from ..engine import loop"),
    (rule_2_no_device_library, "xjax/cache/a.py", "import jax.numpy as jnp"),
    (rule_2_no_device_library, "xjax/request.py", "from flax import struct"),
    (rule_2_no_device_library, "xjax_server/a.py", "def f():\n    import jax"),
    (rule_3_server, "xjax_server/a.py", "from xjax.engine.llm import LLM"),
    (rule_3_server, "xjax_server/a.py", "from xjax.scheduler import plan"),
    (rule_3_server, "xjax/engine/a.py", "from xjax_server.cli import main"),
    (rule_4_no_late_import, "xjax/text/a.py", "def f():\n    import json"),
    (rule_4_no_late_import, "xjax/text/a.py", "import os\nhome = os.environ.get('HOME')"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BROKEN)
def test_rule_sees_a_broken_file(rule, path, text):
    others = [source for source in all_sources() if source.path != path]
    complaints = rule([*others, make_source(path, text)])
    assert len([line for line in complaints if line.startswith(path)]) == 1


def test_rule_5_sees_two_folders_that_import_each_other():
    one = make_source("xjax/kernels/attention/a.py", "from xjax.kernels.pages import b")
    other = make_source("xjax/kernels/pages/b.py", "def f():\n    from xjax.kernels.attention.a import g")
    assert len(rule_5_no_cycle([one, other])) == 1
    assert rule_5_no_cycle([one]) == []


@pytest.mark.parametrize(
    "module",
    [
        "xjax",
        "xjax.scheduler",
        "xjax.checkpoints",
        "xjax.text",
        "xjax_server.app",
        "xjax_server.cli",
        "xjax_server.lifecycle",
        "xjax_server.openai",
    ],
)
def test_host_import_loads_no_device_library(module):
    unwanted = {"jax", "jaxlib", "flax", "huggingface_hub"}
    code = f"import {module}, sys; print(sorted({unwanted} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    assert result.stderr == ""
