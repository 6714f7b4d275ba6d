"""The interface of parsers of tool calls: each takes a model's text in pieces and tells text from calls."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

MAX_CALLS = 16
"""The most calls that a grammar allows in one answer: a model that never ends would go on calling."""


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsGrown:
    """More of the arguments of the call that was begun last, as JSON text."""

    text: str


ToolEvent = Said | CallBegun | ArgumentsGrown


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    parameters: dict[str, Any]


class ToolParser(ABC):
    """Parses one answer. However its text is cut into pieces, the events together say the same."""

    template_mark: ClassVar[str]
    """A text that the chat templates of such models have."""
    shows_special_tokens: ClassVar[bool] = False
    """Whether the parser needs the texts of special tokens."""

    @abstractmethod
    def __init__(self, *, must_call: bool = False) -> None:
        """`must_call`: a grammar of `call_grammar` holds the answer."""

    @abstractmethod
    def push(self, text: str) -> list[ToolEvent]:
        """Take the next piece of the text."""

    @abstractmethod
    def finish(self) -> list[ToolEvent]:
        """Return what was held back. The text is at its end."""

    @staticmethod
    @abstractmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        """Return a Lark grammar of one call, or of several, of these functions."""

    @staticmethod
    def new_call_id() -> str:
        return f"call_{secrets.token_hex(12)}"


def split_at(text: str, tag: str) -> tuple[str, bool, str]:
    """Return the text before `tag`, whether it is there, and the rest.

    Without the tag the rest is what may be the beginning of one.
    """
    before, found, after = text.partition(tag)
    if found:
        return before, True, after
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return text[:-length], False, text[-length:]
    return text, False, ""
