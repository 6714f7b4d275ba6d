"""FunctionGemma's calls: `<start_function_call>call:weather{city:<escape>Ulm<escape>,days:3}<end_function_call>`.

Values are like JSON's, but texts stand between two `<escape>`, and keys stand alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from swiftkv.grammars import held_schema
from swiftkv.server.tool_parsers.argument_types import (
    Argument,
    argument_json,
    argument_of,
    argument_rules,
    arguments_of,
)
from swiftkv.server.tool_parsers.base import (
    ArgumentWriter,
    TaggedParser,
    ToolEvent,
    ToolFunction,
    any_call,
    further_calls,
    split_at,
    split_at_first,
)

_OPEN, _CLOSE, _ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"
_RESPONSE = "<start_function_response>"
_CALL = "call:"
_BRACKETS = {"{": 1, "[": 1, "}": -1, "]": -1}
_MARKS = (_ESCAPE, *_BRACKETS, ",")
_SCALAR = re.compile(r"[^,\[\]{}]+")
_BETWEEN = " \t\r\n,"


class FunctionGemmaParser(TaggedParser):
    template_mark = _OPEN
    call_opening = _OPEN
    call_tags = (_OPEN, _CLOSE, _ESCAPE)
    shows_special_tokens = True

    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        super().__init__(functions, must_call=must_call)
        self._parameters = {function.name: arguments_of(function.parameters) for function in functions}
        self._known: dict[str, Argument] = {}  # the arguments that the called function knows
        self._next: Literal["text", "name", "key", "value", "text in value", "call end", "response"] = "text"
        self._opening = ""  # the tag before a call: for the user unless it begins
        self._key = ""  # the key of the argument in progress
        self._value = ""
        self._depth = 0  # of brackets in the value
        self._writer = ArgumentWriter()

    def finish(self) -> list[ToolEvent]:
        if self._next not in ("text", "name"):
            return []
        return self._last_text(self._opening + self._rest)

    def _step(self, events: list[ToolEvent]) -> bool:
        match self._next:
            case "text":
                return self._take_text(events)
            case "name":
                return self._take_name(events)
            case "key":
                return self._take_key(events)
            case "value":
                return self._take_value(events)
            case "text in value":
                text, is_there, self._rest = split_at(self._rest, _ESCAPE)
                self._value += text
                if is_there:
                    self._value, self._next = self._value + _ESCAPE, "value"
                return is_there
            case "call end":
                _, tag, self._rest = split_at_first(self._rest, (_CLOSE, _OPEN))
                if tag == _OPEN:  # the model left out the last tag
                    self._rest = _OPEN + self._rest
                self._next = "call end" if tag is None else "text"
                return tag is not None
            case "response":  # the model goes on with results that it cannot know
                self._rest = ""
                return False

    def _take_text(self, events: list[ToolEvent]) -> bool:
        before, tag, self._rest = split_at_first(self._rest, (_OPEN, _RESPONSE))
        self._say(before, events)
        if tag == _OPEN:
            self._opening, self._next = tag, "name"
        elif tag is not None and self._is_behind_call:
            self._next = "response"
        elif tag is not None:
            self._say(tag, events)
        return tag is not None

    def _take_name(self, events: list[ToolEvent]) -> bool:
        body = self._rest.lstrip()
        name, is_whole, rest = body.removeprefix(_CALL).partition("{")
        if _CALL.startswith(body) or (body.startswith(_CALL) and not is_whole and "<" not in name):
            return False
        text, self._opening = self._opening, ""
        if not body.startswith(_CALL) or not is_whole or not name.strip() or "<" in name:
            self._say(text, events)
            self._next = "text"
            return True
        self._called()
        self._rest, self._next = rest, "key"
        self._known = self._parameters.get(name.strip(), {})
        events += self._writer.begin(name.strip())
        return True

    def _take_key(self, events: list[ToolEvent]) -> bool:
        body = self._rest.lstrip(_BETWEEN)
        if body.startswith("}"):
            self._rest, self._next = body[1:], "call end"
            events.append(self._writer.end())
            return True
        key, is_whole, rest = body.partition(":")
        if is_whole:
            self._key, self._value, self._depth = key.replace(_ESCAPE, "").strip(), "", 0
            self._rest, self._next = rest, "value"
        return bool(is_whole)

    def _take_value(self, events: list[ToolEvent]) -> bool:
        """Take the value up to the next mark; a comma or a bracket of the call ends it."""
        before, mark, self._rest = split_at_first(self._rest, _MARKS)
        self._value += before
        if mark is None:
            return False
        if not self._depth and mark in (",", "}"):
            events.append(self._writer.add(self._key, _value_json(self._value, self._known.get(self._key))))
            self._rest, self._next = mark + self._rest, "key"
            return True
        self._value += mark
        self._depth = max(0, self._depth + _BRACKETS.get(mark, 0))
        self._next = "text in value" if mark == _ESCAPE else "value"
        return True

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        more = further_calls("", several=several)
        rules = [f"calls: call{more}", any_call(functions), *_ANY_VALUE]
        for number, function in enumerate(functions):
            head = json.dumps(f"{_CALL}{function.name}{{")
            rules.append(f'call_{number}: tag_0 {head} first_{number}_0 "}}" tag_1')
            rules += _SchemaRules(number, function.parameters).rules
        return "\n".join(rules)


_ANY_VALUE = (
    'any_value: any_text | any_list | any_object | "true" | "false" | "null" | any_number',
    r"any_text: tag_2 (/[^<]+/ | /<+([^<e]|e[^<s]|es[^<c])/)* tag_2",  # no end of a text within it
    'any_list: "[" (any_value ("," any_value)*)? "]"',
    'any_object: "{" (any_key ":" any_value ("," any_key ":" any_value)*)? "}"',
    r"any_key: /[A-Za-z_][\w.-]{0,63}/",
    'any_number: %json {"type": "number"}',
)
"""Lark rules of values without a schema."""


class _SchemaRules:
    """The Lark rules of one function's arguments. A schema that occurs several times, as by reference, has one rule."""

    def __init__(self, number: int, parameters: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self._number = number
        self._names: dict[str, str] = {}  # of a schema's rule, by the schema
        self._add_members(str(number), parameters)

    def _add_members(self, name: str, schema: Mapping[str, Any]) -> None:
        """Add the rules of an object's members: sorted by their keys, as the chat template writes them."""
        arguments = dict(sorted(arguments_of(schema).items(), key=lambda item: item[0].lower()))
        self.rules += argument_rules(name, arguments, assign=":", between=",")
        for index, (key, argument) in enumerate(arguments.items()):
            self.rules.append(f"value_{name}_{index}: {self._rule_of(schema['properties'][key], argument)}")

    def _rule_of(self, schema: object, argument: Argument) -> str:
        """Return the name of the rule of a schema, which is read as `argument`."""
        written = json.dumps(schema)
        if written not in self._names:
            name = self._names[written] = f"schema_{self._number}_{len(self._names)}"
            rule = self._value(name, argument)
            self.rules.append(f"{name}: {rule}" + (' | "null"' if argument.is_nullable else ""))
        return self._names[written]

    def _value(self, name: str, argument: Argument) -> str:
        if argument.choices:
            return f"tag_2 ({' | '.join(map(json.dumps, argument.choices))}) tag_2"
        match argument.kind:
            case "string":
                return "any_text"
            case "integer" | "number" | "boolean":
                self.rules.append(f"json_{name}: %json {json.dumps(held_schema(dict(argument.schema)))}")
                return f"json_{name}"
            case "array":
                if "items" not in argument.schema:
                    return "any_list"
                items = argument.schema["items"]
                each = self._rule_of(items, argument_of(items, argument.schema))
                return f'"[" {_list_of(each, argument.schema)} "]"'
            case "object":
                if not argument.schema.get("properties"):
                    return self._object_of_any_keys(argument.schema)
                self._add_members(name, argument.schema)
                return f'"{{" first_{name}_0 "}}"'
            case "any" if values := _scalars(argument.schema):
                return " | ".join(json.dumps(json.dumps(value)) for value in values)
        return "any_value"

    def _object_of_any_keys(self, schema: Mapping[str, Any]) -> str:
        values = schema.get("additionalProperties")
        if values is False:
            return '"{" "}"'
        if not isinstance(values, dict):
            return "any_object"
        member = f'any_key ":" {self._rule_of(values, argument_of(values, schema))}'
        return f'"{{" ({member} ("," {member})*)? "}}"'


def _list_of(each: str, schema: Mapping[str, Any]) -> str:
    """Return the Lark expression of as many values as a list may have."""
    least, most = (schema.get(key) for key in ("minItems", "maxItems"))
    least = least if isinstance(least, int) else 0
    if not isinstance(most, int):
        further = f"{{{max(least - 1, 0)},}}"
    elif most > 0:
        further = f"{{{max(least - 1, 0)},{most - 1}}}"
    else:
        return '""'
    return f'({each} ("," {each}){further})' + ("" if least > 0 else "?")


def _scalars(schema: Mapping[str, Any]) -> list[Any]:
    """Return the numbers, truth values and null that are all a value may be, if its schema lists nothing else."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(value, str | list | dict) for value in values):
        return []
    return values


def _value_json(text: str, argument: Argument | None) -> str:
    """Return the value of an argument as JSON; one that cannot be read is a string."""
    text = text.strip()
    if text.startswith(("[", "{")):
        try:
            value, end = _read(text, 0)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        return value if end == len(text) else json.dumps(text, ensure_ascii=False)
    if text.startswith(_ESCAPE):
        return argument_json(text.removeprefix(_ESCAPE).removesuffix(_ESCAPE), argument)
    return _scalar_json(text) if argument is None else argument_json(text, argument)


def _read(text: str, start: int) -> tuple[str, int]:
    """Return the value that begins at `start` as JSON, and where it ends.

    Raises:
        ValueError: There is none.
    """
    if text.startswith(_ESCAPE, start):
        end = text.index(_ESCAPE, start + len(_ESCAPE))
        return json.dumps(text[start + len(_ESCAPE) : end], ensure_ascii=False), end + len(_ESCAPE)
    bracket = text[start : start + 1]
    if bracket not in ("[", "{"):
        scalar = _SCALAR.match(text, start)
        if scalar is None:
            raise ValueError("no value")
        return _scalar_json(scalar[0].strip()), scalar.end()
    members, end, closing = [], start + 1, "]" if bracket == "[" else "}"
    while not text.startswith(closing, end := _skip_between(text, end)):
        key = ""
        if bracket == "{":
            colon = text.index(":", end)
            key = json.dumps(text[end:colon].replace(_ESCAPE, "").strip(), ensure_ascii=False) + ": "
            end = _skip_between(text, colon + 1)
        value, end = _read(text, end)
        members.append(key + value)
    return f"{bracket}{', '.join(members)}{closing}", end + 1


def _skip_between(text: str, start: int) -> int:
    while start < len(text) and text[start] in _BETWEEN:
        start += 1
    return start


def _scalar_json(text: str) -> str:
    """Return a number, a boolean or null as JSON, and any other text as a string."""
    if text in ("None", "True", "False"):  # the chat template writes None so
        return {"None": "null", "True": "true", "False": "false"}[text]
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return json.dumps(text, ensure_ascii=False)
    return text
