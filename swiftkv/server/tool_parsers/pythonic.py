"""Calls as a list in Python, `[weather(city="Ulm", days=3), now()]`, which Llama 3.2, Llama 4 and ToolACE may write.

An answer is such a list, or text. A list that is not one of calls is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

from swiftkv.grammars import held_schema
from swiftkv.server.tool_parsers.argument_types import Argument, argument_rules, arguments_of
from swiftkv.server.tool_parsers.base import (
    ArgumentWriter,
    Said,
    SteppedParser,
    ToolEvent,
    ToolFunction,
    any_call,
    further_calls,
)
from swiftkv.server.tool_parsers.python_literal import PythonValue, literal_json

_BEGINS, _END = ("<|python_start|>", "<|python_tag|>", "["), "<|python_end|>"
_NAME = re.compile(r"[\w.-]{1,128}")
_KEY = re.compile(r"[^\s=()\[\]{}\"',]{1,128}")


class PythonicParser(SteppedParser):
    template_mark = "[func_name1(param"
    shows_special_tokens = True

    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        super().__init__(functions, must_call=must_call)
        self._known_keys = {function.name: [*arguments_of(function.parameters)] for function in functions}
        self._next: Literal["list", "name", "argument", "value", "after call", "end", "text"] = "list"
        self._opening = ""  # text that is for the user unless a call begins
        self._name = ""  # the name of the call in progress
        self._is_begun = False  # the call in progress
        self._has_called = False
        self._key: str | None = None  # the key of the argument in progress; `None`: it has none, and is left out
        self._value = PythonValue()
        self._value_text = ""
        self._writer = ArgumentWriter()

    def finish(self) -> list[ToolEvent]:
        if self._has_called and self._next in ("argument", "value"):
            return []
        text = self._opening + self._value_text + self._rest
        return [Said(text)] if text else []

    def _step(self, events: list[ToolEvent]) -> bool:
        match self._next:
            case "list":
                return self._take_list(events)
            case "name":
                return self._take_name(events)
            case "argument":
                return self._take_argument(events)
            case "value":
                return self._take_value(events)
            case "after call":
                return self._take_after_call(events)
            case "end":
                return self._take_end(events)
            case "text":
                return self._be_text(events)

    def _take_list(self, events: list[ToolEvent]) -> bool:
        body = self._skip_spaces()
        begin = next((begin for begin in _BEGINS if body.startswith(begin)), None)
        if begin is None:
            return not any(begin.startswith(body) for begin in _BEGINS) and self._be_text(events)
        self._take(len(begin))
        if begin == "[":
            self._next = "name"
        return True

    def _take_name(self, events: list[ToolEvent]) -> bool:
        body = self._skip_spaces()
        if self._has_called and body.startswith("]"):  # behind a last comma
            self._opening, self._rest, self._next = "", body[1:], "end"
            return True
        name, is_whole, _ = body.partition("(")
        if not _NAME.fullmatch(name):
            return bool(body) and self._be_text(events)
        if not is_whole:
            return False
        self._take(len(name) + 1)
        self._name, self._is_begun, self._next = name, False, "argument"
        return True

    def _take_argument(self, events: list[ToolEvent]) -> bool:
        body = self._skip_spaces()
        if body.startswith(")"):
            after = body[1:].lstrip()
            if not self._is_begun and not after.startswith((",", "]")):  # a call with arguments is one without doubt
                return bool(after) and self._be_text(events)
            self._begin(events)
            events.append(self._writer.end())
            self._rest, self._next = body[1:], "after call"
            return True
        if self._is_begun and body.startswith(","):
            self._rest = body[1:]
            return True
        key, is_whole, after = body.partition("=")
        if not (may_be_key := self._may_be_key(key, is_whole=bool(is_whole))) and not self._is_begun:
            return bool(body) and self._be_text(events)
        if not body or (may_be_key and not after):
            return False
        is_key = may_be_key and not after.startswith("=")
        if not is_key and not self._is_begun:
            return self._be_text(events)
        self._begin(events)
        self._key, self._value, self._value_text = (key.strip() if is_key else None), PythonValue(), ""
        self._rest, self._next = (after if is_key else body), "value"
        return True

    def _take_value(self, events: list[ToolEvent]) -> bool:
        count = self._value.push(self._rest)
        self._value_text += self._rest[:count]
        self._rest = self._rest[count:]
        if not self._value.is_done:
            return False
        if self._key is not None:
            events.append(self._writer.add(self._key, literal_json(self._value_text)))
        self._value_text, self._next = "", "argument"
        return True

    def _take_after_call(self, events: list[ToolEvent]) -> bool:
        body = self._rest = self._rest.lstrip()
        if not body.startswith((",", "]")):
            return bool(body) and self._be_text(events)
        self._rest, self._next = body[1:], "name" if body[0] == "," else "end"
        return True

    def _take_end(self, events: list[ToolEvent]) -> bool:
        body = self._rest = self._rest.lstrip()
        if body.startswith(_END):
            self._rest = body.removeprefix(_END)
            return True
        return not _END.startswith(body) and self._be_text(events)

    def _may_be_key(self, key: str, *, is_whole: bool) -> bool:
        """Return whether `key` is the key of an argument, or may become one."""
        known = self._known_keys.get(self._name, [])
        is_known = key in known if is_whole else any(each.startswith(key) for each in known)
        return is_known or _KEY.fullmatch(key.rstrip()) is not None

    def _skip_spaces(self) -> str:
        self._take(len(self._rest) - len(self._rest.lstrip()))
        return self._rest

    def _take(self, count: int) -> None:
        self._opening += self._rest[:count]
        self._rest = self._rest[count:]

    def _begin(self, events: list[ToolEvent]) -> None:
        self._opening = ""
        if not self._is_begun:
            self._is_begun = self._has_called = True
            events += self._writer.begin(self._name)

    def _be_text(self, events: list[ToolEvent]) -> bool:
        if text := self._opening + self._rest:
            events.append(Said(text))
        self._opening, self._rest, self._next = "", "", "text"
        return False

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        more = further_calls('", "', several=several)
        rules = [f'calls: "[" call{more} "]"', any_call(functions)]
        for number, function in enumerate(functions):
            rules += _function_rules(number, function)
        return "\n".join(rules)


def _function_rules(number: int, function: ToolFunction) -> list[str]:
    arguments = arguments_of(function.parameters)
    rules = [f"call_{number}: {json.dumps(function.name + '(')} first_{number}_0 " + '")"']
    rules += argument_rules(str(number), arguments, assign="=", between=", ")
    for index, argument in enumerate(arguments.values()):
        rules += _value_rules(f"{number}_{index}", argument)
    return rules


def _value_rules(name: str, argument: Argument) -> list[str]:
    """Return the rules of a value: JSON is nearly Python, and may stand where the two differ within a value."""
    none = ' | "None"' if argument.is_nullable else ""
    if argument.kind == "boolean" and not {"enum", "const"} & argument.whole.keys():
        return [f'value_{name}: "True" | "False"{none}']
    return [f"value_{name}: json_{name}{none}", f"json_{name}: %json {json.dumps(held_schema(dict(argument.whole)))}"]
