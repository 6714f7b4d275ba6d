"""Nemotron's calls: `<TOOLCALL>` and `</TOOLCALL>` around a JSON list of them."""

from __future__ import annotations

from collections.abc import Sequence

from swiftkv.server.tool_parsers.base import TaggedParser, ToolEvent, ToolFunction, further_calls, split_at
from swiftkv.server.tool_parsers.json_call import JsonCall, call_rules

_BETWEEN = " \t\r\n,[]"


class NemotronJsonParser(TaggedParser):
    template_mark = "<TOOLCALL>"
    call_opening = "<TOOLCALL>"
    call_tags = ("<TOOLCALL>", "</TOOLCALL>")
    shows_special_tokens = True

    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        super().__init__(functions, must_call=must_call)
        self._open, self._close = self.call_tags
        self._is_inside = False  # between the tags
        self._has_called = False  # since the first tag
        self._opening = ""  # the text since that tag: for the user unless a call begins
        self._call: JsonCall | None = None

    def finish(self) -> list[ToolEvent]:
        if self._has_called and self._is_inside:
            return []
        return self._last_text(self._opening + (self._call.text if self._call is not None else "") + self._rest)

    def _step(self, events: list[ToolEvent]) -> bool:
        if self._call is not None:
            return self._take_call(self._call, events)
        if self._is_inside:
            return self._take_between(events)
        before, self._is_inside, self._rest = split_at(self._rest, self._open)
        self._say(before, events)
        if self._is_inside:
            self._has_called, self._opening = False, self._open
        return self._is_inside

    def _take_between(self, events: list[ToolEvent]) -> bool:
        body = self._rest.lstrip(_BETWEEN)
        self._opening += self._rest[: len(self._rest) - len(body)]
        self._rest = body
        if body.startswith("{"):
            self._call = JsonCall()
            return True
        if self._close.startswith(body) and body != self._close:
            return False
        inside, is_closed, rest = split_at(body, self._close)
        if not is_closed:
            return False
        self._rest, self._is_inside = rest, False
        if not self._has_called:
            self._say(f"{self._opening}{inside}{self._close}", events)
        self._opening = ""
        return True

    def _take_call(self, call: JsonCall, events: list[ToolEvent]) -> bool:
        said, self._rest = call.push(self._rest)
        events += said
        if call.is_begun:
            self._called()
            self._has_called = True
        if not call.is_done and not call.is_broken:
            return False
        self._opening += call.text
        self._call = None
        return True

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        more = further_calls('", "', several=several)
        return f'calls: tag_0 "[" call{more} "]" tag_1\n' + call_rules(functions)
