"""The interface of parsers of tool calls: each takes a model's text in pieces and separates calls from it."""

from __future__ import annotations

import json
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
    """A further part of the arguments of the call that was begun last, as JSON text."""

    text: str


ToolEvent = Said | CallBegun | ArgumentsGrown


class ArgumentWriter:
    """Writes arguments of calls as JSON, for models that write them in another form. Each is sent when it is whole."""

    def __init__(self) -> None:
        self._comma = ""

    def begin(self, name: str) -> list[ToolEvent]:
        """Begin a call of the function `name`."""
        self._comma = ""
        return [CallBegun(name), ArgumentsGrown("{")]

    def add(self, key: str, value: str) -> ToolEvent:
        """Add an argument whose value is the JSON text `value`."""
        comma, self._comma = self._comma, ", "
        return ArgumentsGrown(f"{comma}{json.dumps(key, ensure_ascii=False)}: {value}")

    def end(self) -> ToolEvent:
        """End the call."""
        return ArgumentsGrown("}")


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    parameters: dict[str, Any]


class ToolParser(ABC):
    """Parses one answer. Taken together, its events do not depend on how the text is cut into pieces."""

    template_mark: ClassVar[str]
    """A text that occurs in the chat templates of such models."""
    shows_special_tokens: ClassVar[bool] = False
    """Whether the parser needs the texts of special tokens."""

    holds_calls: ClassVar[bool] = True
    """Whether a grammar can force an answer to be calls."""
    call_opening: ClassVar[str | None] = None
    """The text with which calls begin, and no JSON does; `None` if a call may look like another answer."""

    call_tags: ClassVar[Sequence[str]] = ()
    """Texts that are one token of most such models; `call_grammar` names them `tag_0`, `tag_1` and so on."""

    @classmethod
    def for_template(cls, chat_template: str) -> type[ToolParser]:
        """Return the parser of the form that a chat template shows, where models of one family have several."""
        return cls

    @abstractmethod
    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        """`functions` may be called; `must_call`: a grammar of `call_grammar` constrains the answer."""

    @abstractmethod
    def push(self, text: str) -> list[ToolEvent]:
        """Take the next piece of the text."""

    @abstractmethod
    def finish(self) -> list[ToolEvent]:
        """Return the events of the text that was held back; call it at the end of the text."""

    @staticmethod
    @abstractmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        """Return Lark rules in which `calls` is one call, or several, of these functions."""

    @staticmethod
    def new_call_id() -> str:
        return f"call_{secrets.token_hex(12)}"


def further_calls(separator: str, call: str = "call", *, several: bool) -> str:
    """Return what may follow the first call in a Lark rule: nothing, or `several` calls after a `separator` each."""
    return f" ({separator} {call}){{0,{MAX_CALLS - 1}}}" if several else ""


def any_call(functions: Sequence[ToolFunction]) -> str:
    """Return the Lark rule that `call` is `call_0`, `call_1` and so on, one for each function."""
    return "call: " + " | ".join(f"call_{number}" for number in range(len(functions)))


class EitherParser:
    """Parses an answer that a grammar makes either calls or text. Its beginning decides, so text may quote calls."""

    def __init__(self, calls: ToolParser, opening: str) -> None:
        """`calls` parses the calls, which begin with `opening`."""
        self._calls = calls
        self._opening = opening
        self._start: str | None = ""  # the text so far, until it is known what it is
        self._has_calls = False

    def push(self, text: str) -> list[ToolEvent]:
        if self._start is not None:
            self._start += text
            if self._opening.startswith(self._start):
                return []
            self._has_calls = self._start.startswith(self._opening)
            text, self._start = self._start, None
        if self._has_calls:
            return self._calls.push(text)
        return [Said(text)] if text else []

    def finish(self) -> list[ToolEvent]:
        if self._has_calls:
            return self._calls.finish()
        return [Said(self._start)] if self._start else []

    def new_call_id(self) -> str:
        return self._calls.new_call_id()


class SteppedParser(ToolParser):
    """Takes its text in steps, each as soon as it is certain."""

    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        self._rest = ""  # text that was not taken yet

    def push(self, text: str) -> list[ToolEvent]:
        self._rest += text
        events: list[ToolEvent] = []
        while self._step(events):
            pass
        return events

    @abstractmethod
    def _step(self, events: list[ToolEvent]) -> bool:
        """Take what can be taken. Return whether there may be more."""


class TaggedParser(SteppedParser):
    """Parses calls between tags. White space in the text before a call and after it is left out."""

    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        super().__init__(functions, must_call=must_call)
        self._spaces = ""  # sent only if no call follows them
        self._is_behind_call = False  # a call has ended, and no text has followed

    def _say(self, text: str, events: list[ToolEvent]) -> None:
        """Add an event for `text`, but hold back white space at its end."""
        text = self._unsaid(text)
        told = text.rstrip()
        self._spaces = text[len(told) :]
        if told:
            self._is_behind_call = False
            events.append(Said(told))

    def _last_text(self, text: str) -> list[ToolEvent]:
        """Return the event for what is left at the end of an answer, if that is anything."""
        text = self._unsaid(text)
        return [Said(text)] if text else []

    def _unsaid(self, text: str) -> str:
        """Return the white space that was held back, and `text` after it."""
        text = self._spaces + text
        return text.lstrip() if self._is_behind_call else text

    def _called(self) -> None:
        """Note that a call has begun: white space before it is dropped."""
        self._spaces = ""
        self._is_behind_call = True


def split_at(text: str, tag: str) -> tuple[str, bool, str]:
    """Return the text before `tag`, whether it is there, and the rest.

    Without the tag, the rest is the end of the text that may begin one.
    """
    before, found, rest = split_at_first(text, (tag,))
    return before, found is not None, rest


def split_at_first(text: str, tags: Sequence[str]) -> tuple[str, str | None, str]:
    """Return the text before the first of `tags`, that tag, and the rest.

    Without a tag, the rest is the end of the text that may begin one.
    """
    begins = {tag: begin for tag in tags if (begin := text.find(tag)) >= 0}
    if begins:
        first = min(begins, key=begins.__getitem__)
        return text[: begins[first]], first, text[begins[first] + len(first) :]
    for length in range(min(max(map(len, tags)) - 1, len(text)), 0, -1):
        if any(len(tag) > length and text.endswith(tag[:length]) for tag in tags):
            return text[:-length], None, text[-length:]
    return text, None, ""
