"""Reads the JSON object that is a call, `{"name": …, "arguments": {…}}`, as its text comes."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from swiftkv.grammars import held_schema
from swiftkv.server.tool_parsers.base import ArgumentsGrown, CallBegun, ToolEvent, ToolFunction, any_call

_ARGUMENTS = ("arguments", "parameters")
_KEYS = (*_ARGUMENTS, "name", "type", "id")
_SPACE = " \t\r\n"
_SCALAR_ENDS = _SPACE + ",]}"


class JsonValue:
    """Finds the end of one JSON value, from its first character on; what lies between brackets is not checked."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._in_string = self._is_escaped = self._is_scalar = False

    def push(self, text: str) -> int:
        """Take a piece; return how many of its characters belong to the value."""
        for position, char in enumerate(text):
            if self.is_done:
                return position
            if self._in_string:
                self._take_in_string(char)
            elif char == '"':
                self._in_string = True
            elif char in "[{":
                self._depth += 1
            elif self._depth and char in "]}":
                self._depth -= 1
                self.is_done = not self._depth
            elif not self._depth:
                if self._is_scalar and char in _SCALAR_ENDS:
                    self.is_done = True
                    return position
                self._is_scalar = True
        return len(text)

    def _take_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            self.is_done = not self._depth


class JsonCall:
    """Reads one call. If the text is no call, or has no name, the call is *broken*: the text is for the user."""

    def __init__(self, *, needs_arguments: bool = False, names: Collection[str] | None = None) -> None:
        """Prepare to read one call, or another object.

        Args:
            needs_arguments: Whether an object without arguments is no call.
            names: The names that a call may have; an object with another name, or with keys that calls lack before the
                call has begun, is no call.
        """
        self.is_done = False
        self.is_broken = False
        self.is_begun = False
        self.is_other = False  # it is known to be no call, and will be broken when it is done
        self._needs_arguments = needs_arguments
        self._names = names
        self._name = ""
        self._taken: list[str] = []
        self._wanted = "{"  # the next token: {, key, :, value, or "," where more follows a value
        self._key = ""
        self._value = JsonValue()
        self._value_text: list[str] = []
        self._early_arguments = ""  # arguments that came before the name

    @property
    def text(self) -> str:
        """All of the text that was taken."""
        return "".join(self._taken)

    def push(self, text: str) -> tuple[list[ToolEvent], str]:
        """Take a piece; return its events, and the part of it that lies after the call or its first mistake."""
        events: list[ToolEvent] = []
        position = 0
        while position < len(text) and not self.is_done and not self.is_broken:
            if self._wanted in ("key", "value"):
                position += self._push_value(text[position:], events)
            else:
                self._push_mark(text[position], events)
                position += not self.is_broken
        self._taken.append(text[:position])
        return events, text[position:]

    def _push_mark(self, char: str, events: list[ToolEvent]) -> None:
        if char in _SPACE:
            return
        match self._wanted, char:
            case "{", "{":
                self._wanted = "key or }"
            case "key or }" | "next key", '"':
                self._begin("key", char)
            case "key or }" | ",", "}":
                self.is_done = True
                self.is_broken = not self.is_begun
            case ":", ":":
                self._wanted = "first of value"
            case "first of value", _ if char not in _SCALAR_ENDS:
                self._begin("value", char)
                if self._key in _ARGUMENTS:
                    self._begin_call(events)
            case ",", ",":
                self._wanted = "next key"
            case _:
                self.is_broken = True

    def _begin(self, what: str, char: str) -> None:
        self._wanted = what
        self._value = JsonValue()
        self._value.push(char)
        self._value_text = [char]

    def _begin_call(self, events: list[ToolEvent]) -> None:
        """Begin the call if its name is known and it has not begun."""
        if not self._name or self.is_begun or self.is_other:
            return
        self.is_begun = True
        events.append(CallBegun(self._name))
        if self._early_arguments:
            events.append(ArgumentsGrown(self._early_arguments))

    def _push_value(self, text: str, events: list[ToolEvent]) -> int:
        if not self._value.is_done:
            count = self._value.push(text)
            self._value_text.append(text[:count])
        else:
            count = 0
        is_arguments = self._wanted == "value" and self._key in _ARGUMENTS and self._value_text[0] != '"'
        if is_arguments and self.is_begun:
            events.append(ArgumentsGrown("".join(self._value_text)))
            self._value_text = [""]
        if self._value.is_done:
            self._end_value(events)
        return count

    def _end_value(self, events: list[ToolEvent]) -> None:
        raw = "".join(self._value_text)
        if self._wanted == "key":
            self._key = _string(raw)
            self._wanted = ":"
            if self._names is not None and self._key not in _KEYS and not self.is_begun:
                self.is_other = True
            return
        self._wanted = ","
        if self._key == "name" and not self.is_begun:
            self._name = _string(raw)
            self.is_broken = not self._name
            if self._names is not None and self._name not in self._names:
                self.is_other = True
            if not self._needs_arguments or self._early_arguments:
                self._begin_call(events)
        elif self._key in _ARGUMENTS:
            arguments = _string(raw) if raw.startswith('"') else raw  # some models write a string that holds them
            if not self.is_begun:
                self._early_arguments = arguments
            elif arguments:
                events.append(ArgumentsGrown(arguments))


def call_rules(functions: Sequence[ToolFunction], *, begin: str = "", key: str = "arguments", end: str = "") -> str:
    """Return Lark rules in which `call` is a call of one of the functions, between `begin` and `end`."""
    rules = [any_call(functions)]
    for number, function in enumerate(functions):
        head = f'{begin}{{"name": {json.dumps(function.name)}, "{key}": '
        schema = held_schema({"type": "object", **function.parameters})
        rules.append(f"call_{number}: {json.dumps(head)} arguments_{number} {json.dumps('}' + end)}")
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    return "\n".join(rules)


def _string(raw: str) -> str:
    """Return the string that is written as `raw`; an empty one if that is no string."""
    try:
        value = json.loads(raw)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
