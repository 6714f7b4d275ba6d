"""Docstrings begin with a sentence or a noun phrase, not with a clause that hangs in the air."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
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
    {"also", "as", "because", "else", "how", "if", "nor", "of", "so", "that", "though", "unless", "until", "what"}
    | {"whatever", "which", "whichever", "who", "whoever", "whom", "whose", "why"}
)
ARTICLES = frozenset({"a", "all", "an", "each", "every", "one", "some", "the"})


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


def astray(source: str) -> list[int]:
    """Return the lines of texts that document nothing: they follow a statement that defines nothing."""
    found = []
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for before, statement in pairwise(body if isinstance(body, list) else []):
            if not isinstance(before, ast.Assign | ast.AnnAssign):
                match statement:
                    case ast.Expr(value=ast.Constant(value=str())):
                        found.append(statement.lineno)
    return found


def without_a_verb(source: str) -> list[int]:
    """Return the lines of the docstrings of functions that begin with an article: a noun phrase says not what is done.

    Properties are data, and what is said of `__init__` may be about its arguments.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name == "__init__":
            continue
        if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        text = ast.get_docstring(node)
        if text is not None and text.split()[0].lower() in ARTICLES:
            found.append(node.body[0].lineno)
    return found


def places(find: Callable[[str], list[int]], files: Iterable[Path]) -> list[str]:
    """Return the files and lines that `find` finds in their sources."""
    return [f"{file.relative_to(ROOT)}:{line}" for file in files for line in find(file.read_text())]


@pytest.mark.parametrize(
    ("docstring", "is_headless"),
    [
        ("Return the number of rows.", False),
        ("The number of rows.", False),
        ("What waits for the rows.", True),
        ("Of every row.", True),
        ("As if nobody else lent.", True),
        ("Whatever runs finishes.", True),
        ("How many rows there are.", True),
    ],
)
def test_headless_clauses_are_found(docstring: str, is_headless: bool) -> None:
    assert bool(headless(f'def f():\n    """{docstring}"""\n')) is is_headless
    assert bool(headless(f'class C:\n    x: int\n    """{docstring}"""\n')) is is_headless


def test_no_docstring_is_headless() -> None:
    """A docstring begins with a verb ("Return …") or, for data, with a noun phrase ("The number of …")."""
    assert places(headless, SOURCES) == []


@pytest.mark.parametrize(
    ("source", "is_astray"),
    [
        ('ROWS = 3\n"""The number of rows."""', False),
        ('rows: int\n"""The number of rows."""', False),
        ('import rows\n"""The number of rows."""', True),
    ],
)
def test_docstrings_of_nothing_are_found(source: str, is_astray: bool) -> None:
    assert bool(astray(source)) is is_astray


def test_every_docstring_documents_something() -> None:
    assert places(astray, SOURCES) == []


@pytest.mark.parametrize(
    ("function", "is_without"),
    [
        ("def rows(): ...", False),
        ('def rows():\n    """Return the rows."""', False),
        ('def rows():\n    """The rows."""', True),
        ('async def rows():\n    """All rows."""', True),
        ('@property\ndef rows():\n    """The rows."""', False),
        ('@functools.cached_property\ndef rows():\n    """The rows."""', False),
        ('def __init__(self, rows):\n    """The rows are those of a step."""', False),
    ],
)
def test_functions_without_a_verb_are_found(function: str, is_without: bool) -> None:
    assert bool(without_a_verb(function)) is is_without


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    programs = [path for path in SOURCES if not path.is_relative_to(ROOT / "tests")]
    assert places(without_a_verb, programs) == []
