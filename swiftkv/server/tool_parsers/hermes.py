"""Hermes' calls, which Qwen's models write: `<tool_call>` and `</tool_call>` around a JSON object each."""

from __future__ import annotations

from collections.abc import Sequence

from swiftkv.server.tool_parsers.base import MAX_CALLS, Said, ToolEvent, ToolFunction, ToolParser, split_at
from swiftkv.server.tool_parsers.json_call import JsonCall, call_rules

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    template_mark = _OPEN

    def __init__(self, *, must_call: bool = False) -> None:
        self._rest = ""  # text that was not taken yet
        self._spaces = ""  # which nobody is told of when a call follows them
        self._call: JsonCall | None = None
        self._is_behind_call = False  # and has said nothing since

    def push(self, text: str) -> list[ToolEvent]:
        self._rest += text
        events: list[ToolEvent] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[ToolEvent]:
        if self._call is not None:
            if self._call.is_begun:
                return []
            return [Said(f"{self._spaces}{_OPEN}{self._call.text}{self._rest}")]
        text = self._spaces + self._rest
        text = text.lstrip() if self._is_behind_call else text
        return [Said(text)] if text else []

    def _step(self, events: list[ToolEvent]) -> bool:
        """Take what can be taken. Return whether there may be more."""
        if self._call is None:
            before, is_open, self._rest = split_at(self._rest, _OPEN)
            self._say(before, events)
            if is_open:
                self._call = JsonCall()
            return is_open
        said, self._rest = self._call.push(self._rest)
        if any(said):
            self._spaces = ""
        events += said
        if not self._call.is_done and not self._call.is_broken:
            return False
        inside, is_closed, rest = split_at(self._rest, _CLOSE)
        if not is_closed:
            return False
        if self._call.is_begun:
            self._is_behind_call = True
        else:
            self._say(f"{_OPEN}{self._call.text}{inside}{_CLOSE}", events)
        self._call, self._rest = None, rest
        return True

    def _say(self, text: str, events: list[ToolEvent]) -> None:
        """Tell of text, but hold back white space at its end."""
        text = self._spaces + text
        text = text.lstrip() if self._is_behind_call else text
        told = text.rstrip()
        self._spaces = text[len(told) :]
        if told:
            self._is_behind_call = False
            events.append(Said(told))

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if several else ""
        return f"start: call{more}\n" + call_rules(functions, begin=f"{_OPEN}\n", end=f"\n{_CLOSE}")
