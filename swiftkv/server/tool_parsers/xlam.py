"""xLAM's calls: an answer that is a JSON list of them and nothing else, `[{"name": …, "arguments": {…}}, …]`."""

from __future__ import annotations

from collections.abc import Sequence

from swiftkv.server.tool_parsers.base import Said, SteppedParser, ToolEvent, ToolFunction, further_calls
from swiftkv.server.tool_parsers.json_call import JsonCall, call_rules

_BETWEEN = " \t\r\n,"


class XlamParser(SteppedParser):
    template_mark = "make calls in a single JSON array"

    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        super().__init__(functions, must_call=must_call)
        self._is_text = False
        self._opening = ""  # text that is for the user unless a call begins
        self._has_called = self._has_ended = False
        self._call: JsonCall | None = None

    def finish(self) -> list[ToolEvent]:
        if self._call is not None and self._call.is_begun:
            return []
        text = self._opening + (self._call.text if self._call is not None else "") + self._rest
        return [Said(text)] if text else []

    def _step(self, events: list[ToolEvent]) -> bool:
        if self._is_text:
            return self._be_text(events)
        if self._call is not None:
            return self._take_call(self._call, events)
        if self._has_ended:
            self._rest = self._rest.lstrip()
            return bool(self._rest) and self._be_text(events)
        body = self._rest.lstrip(_BETWEEN)
        self._opening, self._rest = self._opening + self._rest[: len(self._rest) - len(body)], body
        is_list = self._opening.strip().startswith("[") or self._has_called
        if not is_list and body.startswith("["):
            self._opening, self._rest = self._opening + "[", body[1:]
            return True
        if is_list and body.startswith("{"):
            self._call = JsonCall(needs_arguments=True)
            return True
        if self._has_called and body.startswith("]"):
            self._opening, self._rest, self._has_ended = "", body[1:], True
            return True
        return bool(body) and self._be_text(events)

    def _take_call(self, call: JsonCall, events: list[ToolEvent]) -> bool:
        said, self._rest = call.push(self._rest)
        events += said
        if call.is_begun:
            self._opening, self._has_called = "", True
        if not call.is_done and not call.is_broken:
            return False
        self._call = None
        if call.is_broken:
            self._opening += "" if call.is_begun else call.text
            return self._be_text(events)
        return True

    def _be_text(self, events: list[ToolEvent]) -> bool:
        if text := self._opening + self._rest:
            events.append(Said(text))
        self._opening, self._rest, self._is_text = "", "", True
        return False

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        more = further_calls('", "', several=several)
        return f'calls: "[" call{more} "]"\n' + call_rules(functions)
