"""The source of the package: the text of each module, parsed once, and what it holds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "hookline"
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITION = (*FUNCTION, ast.ClassDef)
parsed = cache(ast.parse)


def module_of(path: Path, src: Path = SRC) -> str:
    """The dotted name of a file's module."""
    parts = ("hookline", *path.relative_to(src).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def texts() -> dict[str, str]:
    """The text of each module."""
    return {module_of(path): path.read_text("utf-8") for path in sorted(SRC.rglob("*.py"))}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All that a node holds but expressions: no definition is in one."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


@cache
def functions(text: str, module: str) -> list[tuple[str, ast.FunctionDef]]:
    """Every function of a file, with its dotted name."""

    def inside(node: ast.AST, place: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            name = f"{place}.{child.name}" if isinstance(child, DEFINITION) else place
            if isinstance(child, FUNCTION):
                yield name, child
            yield from inside(child, name)

    return list(inside(parsed(text), module))
