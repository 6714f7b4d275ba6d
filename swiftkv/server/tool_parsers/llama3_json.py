"""Llama 3's calls: JSON objects with `; ` between them, after text or as all of an answer.

`<|python_tag|>` may stand before them. As in vLLM, an object is a call only if it has a name and arguments. One that
follows text may be an example or a definition that the text quotes, so it has to have the name of a function of the
request, and before its arguments no keys that calls lack.
"""

from __future__ import annotations

from collections.abc import Sequence

from swiftkv.server.tool_parsers.base import TaggedParser, ToolEvent, ToolFunction, further_calls, split_at_first
from swiftkv.server.tool_parsers.json_call import JsonCall, call_rules

_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class Llama3JsonParser(TaggedParser):
    template_mark = '"parameters": dictionary of argument name and its value'
    shows_special_tokens = True

    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        super().__init__(functions, must_call=must_call)
        self._names = {function.name for function in functions}
        self._call: JsonCall | None = None
        self._opening = ""  # the tag and the text of the call in progress: for the user unless it begins
        self._has_said = False  # text, which may quote objects

    def finish(self) -> list[ToolEvent]:
        if self._call is not None and self._call.is_begun:
            return []
        return self._last_text(self._opening + self._rest)

    def _step(self, events: list[ToolEvent]) -> bool:
        if self._call is not None:
            return self._take_call(self._call, events)
        if self._opening:
            return self._take_after_tag(events)
        if self._is_behind_call:
            self._rest = self._rest.lstrip(_BETWEEN)
        before, mark, self._rest = split_at_first(self._rest, (_TAG, "{"))
        self._say(before, events)
        if mark == "{":
            self._rest = mark + self._rest
            self._call = JsonCall(needs_arguments=True, names=self._names if self._has_said else None)
        elif mark is not None:
            self._opening = mark
        return mark is not None

    def _take_after_tag(self, events: list[ToolEvent]) -> bool:
        body = self._rest.lstrip()
        self._opening += self._rest[: len(self._rest) - len(body)]
        self._rest = body
        if body.startswith("{"):
            self._call = JsonCall(needs_arguments=True)
        elif body:
            self._be_text(events)
        return bool(body)

    def _take_call(self, call: JsonCall, events: list[ToolEvent]) -> bool:
        said, rest = call.push(self._rest)
        self._opening += self._rest[: len(self._rest) - len(rest)]
        self._rest = rest
        if call.is_begun:
            self._called()
            self._opening = ""
        elif call.is_other or call.is_broken:
            self._be_text(events)
        events += said
        if not call.is_done and not call.is_broken:
            return False
        self._call = None
        return True

    def _be_text(self, events: list[ToolEvent]) -> None:
        text, self._opening = self._opening, ""
        self._say(text, events)

    def _say(self, text: str, events: list[ToolEvent]) -> None:
        self._has_said = self._has_said or bool(text.strip())
        super()._say(text, events)

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        more = further_calls('"; "', several=several)
        return f"calls: call{more}\n" + call_rules(functions, key="parameters")
