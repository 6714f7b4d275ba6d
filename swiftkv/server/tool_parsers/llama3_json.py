"""Llama 3's calls: an answer that is JSON objects and nothing else, with `; ` between them."""

from __future__ import annotations

from collections.abc import Sequence

from swiftkv.server.tool_parsers.base import Said, ToolEvent, ToolFunction, ToolParser, further_calls
from swiftkv.server.tool_parsers.json_call import JsonCall, call_rules

_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class Llama3JsonParser(ToolParser):
    template_mark = '"parameters": dictionary of argument name and its value'
    shows_special_tokens = True

    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        self._start: str | None = ""  # the text so far, until it is known whether it is calls
        self._call: JsonCall | None = None  # `None`: the answer is text
        self._skipped = ""  # before the call in progress
        self._has_called = False

    def push(self, text: str) -> list[ToolEvent]:
        if self._start is not None:
            self._start += text
            begin = self._start.lstrip()
            if not begin or _TAG.startswith(begin):
                return []
            body = begin.removeprefix(_TAG).lstrip()
            if not body:
                return []
            text, self._start = self._start, None
            if body.startswith("{"):
                self._skipped, text = text[: len(text) - len(body)], body
                self._call = JsonCall()
        return self._read(text) if self._call is not None else [Said(text)]

    def finish(self) -> list[ToolEvent]:
        if self._start is not None:
            return [Said(self._start)] if self._start else []
        if self._call is None or self._call.is_begun or not self._call.text:
            return []
        return [Said(self._skipped + self._call.text)]

    def _read(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        while text and self._call is not None:
            if not self._call.text:
                body = text.lstrip(_BETWEEN)
                self._skipped += text[: len(text) - len(body)]
                text = body
            said, text = self._call.push(text)
            events += said
            if self._call.is_broken and not self._call.is_begun:
                events.append(Said(self._skipped + self._call.text + text))
                self._call, text = None, ""
            elif self._call.is_broken:
                text = ""
            elif self._call.is_done:
                self._call, self._skipped = JsonCall(), ""
        return events

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        more = further_calls('"; "', several=several)
        return f"calls: call{more}\n" + call_rules(functions, key="parameters")
