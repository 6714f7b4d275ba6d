"""Hermes' calls, which Qwen's models write: `<tool_call>` and `</tool_call>` around a JSON object each."""

from __future__ import annotations

from collections.abc import Sequence

from swiftkv.server.tool_parsers.base import Said, TaggedParser, ToolEvent, ToolFunction, further_calls, split_at
from swiftkv.server.tool_parsers.json_call import JsonCall, call_rules

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(TaggedParser):
    template_mark = _OPEN
    call_opening = _OPEN
    call_tags = (_OPEN, _CLOSE)

    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        super().__init__(functions, must_call=must_call)
        self._call: JsonCall | None = None

    def finish(self) -> list[ToolEvent]:
        if self._call is not None:
            if self._call.is_begun:
                return []
            return [Said(f"{self._spaces}{_OPEN}{self._call.text}{self._rest}")]
        return self._last_text(self._rest)

    def _step(self, events: list[ToolEvent]) -> bool:
        if self._call is None:
            before, is_open, self._rest = split_at(self._rest, _OPEN)
            self._say(before, events)
            if is_open:
                self._call = JsonCall()
            return is_open
        said, self._rest = self._call.push(self._rest)
        if self._call.is_begun:
            self._called()
        events += said
        if not self._call.is_done and not self._call.is_broken:
            return False
        inside, is_closed, rest = split_at(self._rest, _CLOSE)
        if not is_closed:
            return False
        if not self._call.is_begun:
            self._say(f"{_OPEN}{self._call.text}{inside}{_CLOSE}", events)
        self._call, self._rest = None, rest
        return True

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        more = further_calls(r'"\n"', "tag_0 call tag_1", several=several)
        return f"calls: tag_0 call tag_1{more}\n" + call_rules(functions, begin="\n", end="\n")
