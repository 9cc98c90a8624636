"""How large things may be: the hard limits of every file, function, class and folder.

An exception is listed here by name, with its reason and its own ceiling.
"""

import ast
from collections import Counter

import pytest

from tests.sources import Source, all_sources, classes, functions, make_source

FILE_LINES, KERNEL_FILE_LINES, INIT_LINES = 500, 600, 60
FUNCTION_LINES, KERNEL_FUNCTION_LINES = 80, 150
PARAMETERS = 10
CLASS_ATTRIBUTES, CLASS_METHODS, CONFIG_FIELDS = 20, 15, 25
FOLDER_FILES = 12
FREE_FOLDERS = ("xjax/models", "xjax/text/parsers")
FORBIDDEN_NAMES = {
    "utils",
    "common",
    "misc",
    "helpers",
    "manager",
    "base",
    "impl",
    "v2",
    "new",
    "experimental",
}

# "path:name" -> (ceiling, reason)
EXCEPTIONS: dict[str, tuple[int, str]] = {}


def _is_kernel(source: Source) -> bool:
    return source.path.startswith("xjax/kernels/")


def file_sizes(source: Source) -> list[tuple[str, int, int]]:
    """(what, size, limit) of the file itself."""
    limit = INIT_LINES if source.is_package and not _is_kernel(source) else FILE_LINES
    if _is_kernel(source):
        limit = KERNEL_FILE_LINES
    return [(source.path, len(source.text.splitlines()), limit)]


def function_sizes(source: Source) -> list[tuple[str, int, int]]:
    """(what, size, limit) of each function's lines and positional parameters."""
    lines = KERNEL_FUNCTION_LINES if _is_kernel(source) else FUNCTION_LINES
    sizes = []
    for name, node in functions(source.tree):
        sizes.append((f"{source.path}:{name}", (node.end_lineno or node.lineno) - node.lineno + 1, lines))
        positional = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        count = len([arg for arg in positional if arg not in ("self", "cls")])
        sizes.append((f"{source.path}:{name}()", count, PARAMETERS))
    return sizes


def class_sizes(source: Source) -> list[tuple[str, int, int]]:
    """(what, size, limit) of each class's attributes set, public methods and, of settings, fields."""
    sizes = []
    for node in classes(source.tree):
        name = f"{source.path}:{node.name}"
        attributes = {
            target.attr
            for target in ast.walk(node)
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
            if isinstance(target.value, ast.Name) and target.value.id == "self"
        }
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
        public = {item.name for item in methods if not item.name.startswith("_")}
        sizes.append((f"{name}.attributes", len(attributes), CLASS_ATTRIBUTES))
        sizes.append((f"{name}.methods", len(public), CLASS_METHODS))
        if node.name.endswith(("Config", "Options", "Params")):
            count = len([item for item in node.body if isinstance(item, ast.AnnAssign)])
            sizes.append((f"{name}.fields", count, CONFIG_FIELDS))
    return sizes


def too_large(sources: list[Source]) -> list[str]:
    """Everything above its limit and not excepted."""
    bad = []
    for source in sources:
        for what, size, limit in (*file_sizes(source), *function_sizes(source), *class_sizes(source)):
            ceiling = EXCEPTIONS.get(what, (limit, ""))[0]
            if size > ceiling:
                bad.append(f"{what}: {size} is above {ceiling}")
    return bad


def test_sizes():
    assert too_large(all_sources()) == []


def test_exceptions_are_needed():
    sizes = {}
    for source in all_sources():
        for what, size, limit in (*file_sizes(source), *function_sizes(source), *class_sizes(source)):
            sizes[what] = (size, limit)
    stale = [what for what in EXCEPTIONS if what not in sizes or sizes[what][0] <= sizes[what][1]]
    assert stale == []


def test_folders():
    counts = Counter(source.path.rpartition("/")[0] for source in all_sources() if not source.is_package)
    bad = {f: n for f, n in counts.items() if n > FOLDER_FILES and f not in FREE_FOLDERS}
    assert bad == {}


def test_names():
    bad = [
        s.path for s in all_sources() if FORBIDDEN_NAMES & set(s.module.lower().replace("_", ".").split("."))
    ]
    assert bad == []


def test_modules_have_docstrings():
    bad = [source.path for source in all_sources() if not ast.get_docstring(source.tree)]
    assert bad == []


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 80
WIDE_FUNCTION = "def f(a, b, c, d, e, f, g, h, i, j, k): pass\n"
FAT_CLASS = "class A:\n" + "".join(f"    def m{i}(self): self.a{i} = 1\n" for i in range(21))
FAT_CONFIG = "class AConfig:\n" + "".join(f"    f{i}: int\n" for i in range(26))


@pytest.mark.parametrize(
    ("path", "text", "num_complaints"),
    [
        ("xjax/a.py", "x = 1\n" * 501, 1),
        ("xjax/kernels/a.py", "x = 1\n" * 501, 0),
        ("xjax/text/__init__.py", "x = 1\n" * 61, 1),
        ("xjax/a.py", LONG_FUNCTION, 1),
        ("xjax/kernels/a.py", LONG_FUNCTION, 0),
        ("xjax/a.py", WIDE_FUNCTION, 1),
        ("xjax/a.py", FAT_CLASS, 2),
        ("xjax/a.py", FAT_CONFIG, 1),
    ],
)
def test_limits_are_seen(path, text, num_complaints):
    assert len(too_large([make_source(path, text)])) == num_complaints
