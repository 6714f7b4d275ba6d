"""Docstrings begin with a sentence or a noun phrase, not with a clause that hangs in the air."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for directory in ("swiftkv", "kernels", "tests", "benchmarks")
    for pattern in ("*.py", "*.pyi")
    for path in (ROOT / directory).rglob(pattern)
)
HEADLESS = frozenset(
    {"also", "as", "because", "else", "if", "nor", "of", "so", "that", "though", "unless", "until", "what", "whatever"}
    | {"which", "whichever", "who", "whoever", "whom", "whose"}
)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring, those of attributes and constants included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield statement.lineno, text


def headless(source: str) -> list[int]:
    """Return the lines of the docstrings that begin with a headless word."""
    return [line for line, text in docstrings(source) if text.split()[0].strip(",:").lower() in HEADLESS]


@pytest.mark.parametrize(
    ("docstring", "is_headless"),
    [
        ("Return the number of rows.", False),
        ("The number of rows.", False),
        ("What waits for the rows.", True),
        ("Of every row.", True),
        ("As if nobody else lent.", True),
        ("Whatever runs finishes.", True),
    ],
)
def test_headless_clauses_are_found(docstring: str, is_headless: bool) -> None:
    assert bool(headless(f'def f():\n    """{docstring}"""\n')) is is_headless
    assert bool(headless(f'class C:\n    x: int\n    """{docstring}"""\n')) is is_headless


def test_no_docstring_is_headless() -> None:
    """A docstring begins with a verb ("Return …") or, for data, with a noun phrase ("The number of …")."""
    found = [f"{path.relative_to(ROOT)}:{line}" for path in SOURCES for line in headless(path.read_text())]
    assert found == []
