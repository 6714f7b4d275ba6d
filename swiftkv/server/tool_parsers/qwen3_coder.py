"""Qwen3-Coder's calls, which MiMo writes too: tags around a function's name and around each argument, as plain text.

<tool_call>
<function=weather>
<parameter=city>
Ulm
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from swiftkv.grammars import held_schema
from swiftkv.server.tool_parsers.argument_types import Argument, argument_json, arguments_of
from swiftkv.server.tool_parsers.base import (
    ArgumentWriter,
    TaggedParser,
    ToolEvent,
    ToolFunction,
    any_call,
    further_calls,
    split_at_first,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = (_PARAMETER_END, f"\n{_PARAMETER}", f"\n{_FUNCTION_END}")
_INSIDE = (_PARAMETER, _FUNCTION_END, _CLOSE)  # the tags that a call may have next


class Qwen3CoderParser(TaggedParser):
    template_mark = _PARAMETER  # others write <function=name> around JSON
    call_opening = _OPEN
    call_tags = (_OPEN, _CLOSE)

    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        super().__init__(functions, must_call=must_call)
        self._parameters = {function.name: arguments_of(function.parameters) for function in functions}
        self._known: dict[str, Argument] = {}  # the arguments that the called function knows
        self._head: str | None = None  # the text of a call without a name so far
        self._name = ""  # the name in the call in progress
        self._key: str | None = None  # the key of the argument in progress
        self._value = ""
        self._writer = ArgumentWriter()
        self._is_closed = False  # the call in progress: only its last tag may follow
        self._value_ends = (_PARAMETER_END,) if must_call else _VALUE_ENDS

    def finish(self) -> list[ToolEvent]:
        if self._name:
            return []
        return self._last_text((self._head or "") + self._rest)

    def _step(self, events: list[ToolEvent]) -> bool:
        if self._key is not None:
            return self._take_value(events)
        if self._name and self._is_closed:
            return self._take_end()
        if self._name:
            return self._take_tag(events)
        if self._head is not None:
            return self._take_name(events)
        before, self._head, self._rest = split_at_first(self._rest, (_OPEN, _FUNCTION))
        self._say(before, events)
        if self._head == _FUNCTION:  # the model left out the first tag
            self._head, self._rest = "", _FUNCTION + self._rest
        return self._head is not None

    def _take_name(self, events: list[ToolEvent]) -> bool:
        body = self._rest.lstrip()
        name, is_whole, rest = body.removeprefix(_FUNCTION).partition(">")
        if _FUNCTION.startswith(body) or (body.startswith(_FUNCTION) and not is_whole and "\n" not in name):
            return False
        is_call = body.startswith(_FUNCTION) and is_whole and "\n" not in name and name.strip()
        if not is_call or not (self._head or name.strip() in self._parameters):  # it only looked like a call
            if not self._head:
                self._rest = self._rest.removeprefix(_FUNCTION)
            self._say(self._head or _FUNCTION, events)
            self._head = None
            return True
        self._called()
        self._head, self._rest = None, rest
        self._name = name.strip()
        self._known = self._parameters.get(self._name, {})
        self._is_closed = False
        events += self._writer.begin(self._name)
        return True

    def _take_tag(self, events: list[ToolEvent]) -> bool:
        """Take the next tag of a call; other text between its tags is ignored."""
        start = self._rest.find("<")
        self._rest = self._rest[start:] if start >= 0 else ""
        if not self._rest:
            return False
        if self._rest.startswith(_PARAMETER):
            key, is_whole, rest = self._rest.removeprefix(_PARAMETER).partition(">")
            if is_whole:
                self._key, self._value, self._rest = key.strip(), "", rest
            return bool(is_whole)
        if self._rest.startswith((_FUNCTION_END, _CLOSE)):
            self._rest = self._rest.removeprefix(_FUNCTION_END)
            self._is_closed = True
            events.append(self._writer.end())
            return True
        if any(tag.startswith(self._rest) for tag in _INSIDE):
            return False
        self._rest = self._rest[1:]
        return True

    def _take_end(self) -> bool:
        body = self._rest.lstrip()
        if body != _CLOSE and _CLOSE.startswith(body):
            return False
        self._name, self._rest = "", body.removeprefix(_CLOSE)
        return True

    def _take_value(self, events: list[ToolEvent]) -> bool:
        assert self._key is not None
        value, end, self._rest = split_at_first(self._rest, self._value_ends)
        self._value += value
        if end is None:
            return False
        if end != _PARAMETER_END:  # the model left that out
            self._rest = end + self._rest
        text = self._value.removeprefix("\n").removesuffix("\n")
        events.append(self._writer.add(self._key, argument_json(text, self._known.get(self._key))))
        self._key = None
        return True

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        more = further_calls(r'"\n"', several=several)
        rules = [f"calls: call{more}", any_call(functions)]
        for number, function in enumerate(functions):
            rules += _function_rules(number, function)
        return "\n".join(rules)


def _function_rules(number: int, function: ToolFunction) -> list[str]:
    """Return the rules of one function: its arguments stand in the order of the schema."""
    parts, rules = [], []
    for index, (key, argument) in enumerate(arguments_of(function.parameters).items()):
        name = f"{number}_{index}"
        begin = json.dumps(f"{_PARAMETER}{key}>\n")
        parts.append(f"argument_{name}" + ("" if argument.is_required else "?"))
        rules.append(f"argument_{name}: {begin} value_{name} " + r'"\n"')
        rules += _value_rules(name, argument)
    head, end = f"\n{_FUNCTION}{function.name}>\n", f"{_FUNCTION_END}\n"
    return [f"call_{number}: tag_0 {json.dumps(head)} {' '.join(parts)} {json.dumps(end)} tag_1", *rules]


def _value_rules(name: str, argument: Argument) -> list[str]:
    """Return the rules of a value with the tag that ends it."""
    end = json.dumps(f"\n{_PARAMETER_END}")
    if argument.choices:
        return [f"value_{name}: ({' | '.join(map(json.dumps, argument.choices))}) {end}"]
    if argument.kind != "string":
        schema = json.dumps(held_schema(dict(argument.schema)))
        return [f"value_{name}: json_{name} {end}", f"json_{name}: %json {schema}"]
    least, most = argument.schema.get("minLength", 0), argument.schema.get("maxLength", "")
    return [f"value_{name}[lazy]: /(?s:.{{{least},{most}}})\\n<\\/parameter>/"]
