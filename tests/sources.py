"""The project's own source files as syntax trees, for the tests that guard its shape."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"xjax": ROOT / "xjax", "xjax_server": ROOT / "server" / "xjax_server"}


@dataclass(frozen=True)
class Source:
    """One Python file: its dotted module name, its path below the package, text and tree."""

    module: str
    path: str  # e.g. "xjax/text/output.py"
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def part(self) -> str:
        """First folder below the package, or the file's own name for files at its top."""
        pieces = self.path.split("/")
        return pieces[1] if len(pieces) > 2 else pieces[1].removesuffix(".py")


def make_source(path: str, text: str) -> Source:
    """Build a source from "xjax/text/output.py" and its text."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return Source(module, path, text)


def all_sources() -> list[Source]:
    """Read every Python file of the two packages."""
    found = []
    for package, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            path = f"{package}/{file.relative_to(folder).as_posix()}"
            found.append(make_source(path, file.read_text(encoding="utf-8")))
    return found


def functions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its dotted name, methods and inner functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    """Every class, inner ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
