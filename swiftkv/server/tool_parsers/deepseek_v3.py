"""DeepSeek's calls, of V3 and R1, in which tags stand around a function's name and a block of JSON.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Ulm"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from swiftkv.grammars import held_schema
from swiftkv.server.tool_parsers.base import (
    ArgumentsGrown,
    CallBegun,
    TaggedParser,
    ToolEvent,
    ToolFunction,
    any_call,
    further_calls,
    split_at,
    split_at_first,
)
from swiftkv.server.tool_parsers.json_call import JsonValue

_OPEN, _CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE = "```json"


class DeepSeekV3Parser(TaggedParser):
    template_mark = _SEPARATOR
    call_opening = _OPEN
    call_tags = (_OPEN, _CLOSE, _CALL, _CALL_END, _SEPARATOR)
    shows_special_tokens = True

    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        super().__init__(functions, must_call=must_call)
        self._next: Literal["text", "call", "name", "arguments", "call end"] = "text"
        self._opening = ""  # the tags before a call: for the user unless it begins
        self._arguments = JsonValue()

    def finish(self) -> list[ToolEvent]:
        if self._next in ("arguments", "call end"):
            return []
        return self._last_text(self._opening + self._rest)

    def _step(self, events: list[ToolEvent]) -> bool:
        match self._next:
            case "text":
                return self._take_text(events)
            case "call":
                return self._take_call(events)
            case "name":
                return self._take_name(events)
            case "arguments":
                return self._take_arguments(events)
            case "call end":
                _, is_there, self._rest = split_at(self._rest, _CALL_END)
                self._next = "call" if is_there else "call end"
                return is_there

    def _take_text(self, events: list[ToolEvent]) -> bool:
        before, tag, self._rest = split_at_first(self._rest, (_OPEN, _CALL))
        self._say(before, events)
        if tag is None:
            return False
        self._opening, self._next = tag, "call" if tag == _OPEN else "name"
        return True

    def _take_call(self, events: list[ToolEvent]) -> bool:
        """Take the first tag of a call, or the last one of all calls."""
        body = self._rest.lstrip()
        if any(tag != body and tag.startswith(body) for tag in (_CALL, _CLOSE)):
            return False
        if body.startswith(_CALL):
            self._opening += self._rest[: len(self._rest) - len(body)] + _CALL if self._opening else ""
            self._rest, self._next = body.removeprefix(_CALL), "name"
        elif body.startswith(_CLOSE) and not self._opening:
            self._rest, self._next = body.removeprefix(_CLOSE), "text"
        else:
            self._be_text(events)
        return True

    def _take_name(self, events: list[ToolEvent]) -> bool:
        _, is_there, after = split_at(self._rest, _SEPARATOR)
        name, is_whole, body = after.partition("\n")
        body = body.lstrip()
        if not (is_there and is_whole) or _FENCE.startswith(body):
            return False
        body = body.removeprefix(_FENCE).lstrip()
        if not body:
            return False
        if not name.strip() or not body.startswith("{"):
            self._be_text(events)
            return True
        self._called()
        self._opening, self._rest, self._next = "", body, "arguments"
        self._arguments = JsonValue()
        events.append(CallBegun(name.strip()))
        return True

    def _take_arguments(self, events: list[ToolEvent]) -> bool:
        count = self._arguments.push(self._rest)
        if count:
            events.append(ArgumentsGrown(self._rest[:count]))
        self._rest = self._rest[count:]
        if self._arguments.is_done:
            self._next = "call end"
        return self._arguments.is_done

    def _be_text(self, events: list[ToolEvent]) -> None:
        text, self._opening, self._next = self._opening, "", "text"
        self._say(text, events)

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        more = further_calls(r'"\n"', several=several)
        rules = [f"calls: tag_0 call{more} tag_1", any_call(functions)]
        for number, function in enumerate(functions):
            head, end = json.dumps(f"{function.name}\n{_FENCE}\n"), json.dumps("\n```")
            schema = held_schema({"type": "object", **function.parameters})
            rules.append(f'call_{number}: tag_2 "function" tag_4 {head} arguments_{number} {end} tag_3')
            rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
        return "\n".join(rules)
