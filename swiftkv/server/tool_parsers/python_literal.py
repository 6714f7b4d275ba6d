"""Reads the arguments of a call that is written as Python: `city="Köln", days=[1, 2]`."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import msgspec

_JSON_NAMES = {"true": True, "false": False, "null": None}
_ESCAPED = re.compile(r"""\br(['"])(?:\\.|(?!\1).)*\1|\\(.)""", re.DOTALL)
_ESCAPES = "\\'\"abfnrtvxuUN01234567\n"


class PythonValue:
    """Finds the end of one value, from its first character on: the comma or the bracket that follows."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._quote = ""  # the text that ends the string in progress
        self._is_escaped = self._is_empty = False
        self._num_quotes = 0  # that have come one after the other within a string in triple quotes
        self._may_triple = ""  # the quote of an empty string that has just ended

    def push(self, text: str) -> int:
        """Take a piece; return how many of its characters belong to the value."""
        for position, char in enumerate(text):
            if self._quote:
                self._take_in_string(char)
            elif char in "\"'":
                self._quote = char * 3 if self._may_triple == char else char
                self._is_empty, self._num_quotes = True, 0
                self._may_triple = ""
            elif not self._depth and char in ",)":
                self.is_done = True
                return position
            else:
                self._may_triple = ""
                self._depth = max(0, self._depth + (char in "([{") - (char in ")]}"))
        return len(text)

    def _take_in_string(self, char: str) -> None:
        is_quote = char == self._quote[0] and not self._is_escaped
        self._is_escaped = char == "\\" and not self._is_escaped
        self._num_quotes = self._num_quotes + 1 if is_quote else 0
        if self._num_quotes == len(self._quote):
            self._may_triple = char if self._is_empty and len(self._quote) == 1 else ""
            self._quote = ""
        self._is_empty = False


def literal_json(text: str) -> str:
    """Return a value as JSON: one that is written as JSON or as a literal of Python, or else its text as a string."""
    text = text.strip()
    try:
        msgspec.json.decode(text)
        return text
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        pass
    try:
        written = json.dumps(_value(ast.parse(_with_known_escapes(text), mode="eval").body), ensure_ascii=False)
        msgspec.json.decode(written)  # neither infinite nor half a character
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)
    return written


def _value(node: ast.expr) -> Any:
    """Return the value of a literal.

    Raises:
        ValueError: JSON has no such value.
    """
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):  # a bool is an int
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str() as key):
            return key
        case ast.Constant(value=int() as key):
            return json.dumps(key)
    raise ValueError("not the key of an object")


def _with_known_escapes(text: str) -> str:
    """Return a literal in which a backslash that escapes nothing is one that Python does not warn about."""

    def known(match: re.Match[str]) -> str:
        return match[0] if match[2] is None or match[2] in _ESCAPES else rf"\\{match[2]}"

    return _ESCAPED.sub(known, text)
