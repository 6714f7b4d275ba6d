"""Mistral's calls: `[TOOL_CALLS]`, then a JSON list of them, or from its eleventh tokenizer on `name[ARGS]{…}` each."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from swiftkv.server.tool_parsers.base import (
    MAX_CALLS,
    ArgumentsGrown,
    CallBegun,
    Said,
    SteppedParser,
    ToolEvent,
    ToolFunction,
    split_at,
)
from swiftkv.server.tool_parsers.json_call import JsonCall, JsonValue, call_rules

_TAG, _ARGUMENTS_TAG, _ID_TAG = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_BETWEEN = " \t\r\n,"
_ID_LENGTH = 9  # the templates refuse other ids


class MistralParser(SteppedParser):
    template_mark = _TAG
    call_opening = _TAG
    opens_with_token = True
    shows_special_tokens = True

    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        super().__init__(functions, must_call=must_call)
        self._is_text = not must_call
        self._call: JsonCall | None = None  # a call within a list
        self._arguments: JsonValue | None = None  # after a name

    def finish(self) -> list[ToolEvent]:
        is_cut = self._call is not None or self._arguments is not None
        return [Said(self._rest)] if self._is_text and self._rest and not is_cut else []

    def _step(self, events: list[ToolEvent]) -> bool:
        if self._is_text:
            before, is_there, self._rest = split_at(self._rest, _TAG)
            if before:
                events.append(Said(before))
            self._is_text = not is_there
            return is_there
        if self._call is not None:
            said, self._rest = self._call.push(self._rest)
            events += said
            if self._call.is_broken:
                self._is_text = True
                if not self._call.is_begun:
                    events.append(Said(self._call.text))
            has_ended = self._call.is_done or self._call.is_broken
            self._call = None if has_ended else self._call
            return has_ended
        if self._arguments is not None:
            count = self._arguments.push(self._rest)
            if count:
                events.append(ArgumentsGrown(self._rest[:count]))
            self._rest = self._rest[count:]
            is_done = self._arguments.is_done
            self._arguments = None if is_done else self._arguments
            return is_done
        return self._begin_call(events)

    def _begin_call(self, events: list[ToolEvent]) -> bool:
        self._rest = self._rest.lstrip(_BETWEEN + "]")
        if self._rest.startswith(_TAG):
            self._rest = self._rest.removeprefix(_TAG)
            return True
        if _TAG.startswith(self._rest):  # nothing, [, or the beginning of the tag
            return False
        if self._rest[0] == "[":
            self._rest = self._rest[1:]
            return True
        if self._rest.startswith("{"):
            self._call = JsonCall()
            return True
        name, has_arguments, _ = self._rest.partition("{")
        if not has_arguments:
            return False
        self._rest = self._rest[len(name) :]
        events.append(CallBegun(name.partition(_ARGUMENTS_TAG)[0].partition(_ID_TAG)[0].strip()))
        self._arguments = JsonValue()
        return True

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        more = f' (", " call){{0,{MAX_CALLS - 1}}}' if several else ""
        return f'calls: "[" call{more} "]"\n' + call_rules(functions)

    @staticmethod
    def new_call_id() -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))
