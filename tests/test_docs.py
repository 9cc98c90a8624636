"""What is written is true: array shapes in docstrings, committed tables, commands in the README."""

import ast
import re
from collections import Counter

import pytest

from tests.sources import Source, all_sources, make_source

SHAPED_PARTS = {"kernels", "state", "sampling", "models"}
ARRAY_TYPES = re.compile(r"\b(Array|ndarray|NDArray|ArrayLike)\b")

# Where a broad `except` may stand, how many, and why.
BROAD_EXCEPT = {
    "xjax_server/cli/app.py": (1, "top of the command line: one line instead of a trace"),
}


def _is_array(annotation: ast.expr | None) -> bool:
    return annotation is not None and bool(ARRAY_TYPES.search(ast.unparse(annotation)))


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


def broad_excepts(source: Source) -> int:
    """How often a source catches everything."""
    handlers = [node for node in ast.walk(source.tree) if isinstance(node, ast.ExceptHandler)]
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
    text = f"try:\n    pass\n{clause}\n    pass\n"
    assert broad_excepts(make_source("xjax/a.py", text)) == count
