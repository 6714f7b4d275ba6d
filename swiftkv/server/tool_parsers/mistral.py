"""Mistral's calls: `[TOOL_CALLS]`, then a JSON list of them, or from its eleventh tokenizer on `name[ARGS]{…}` each.

The eleventh has an id between the two: `[TOOL_CALLS]name[CALL_ID]abcdefghi[ARGS]{…}`.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence
from typing import ClassVar

from swiftkv.grammars import held_schema
from swiftkv.server.tool_parsers.base import (
    ArgumentsGrown,
    CallBegun,
    Said,
    SteppedParser,
    ToolEvent,
    ToolFunction,
    ToolParser,
    any_call,
    further_calls,
    split_at,
    split_at_first,
)
from swiftkv.server.tool_parsers.json_call import JsonCall, JsonValue, call_rules

_TAG, _ARGUMENTS_TAG, _ID_TAG = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_BETWEEN = " \t\r\n,"
_NAME = re.compile(r"[\w.-]{1,128}")
_ID_LENGTH = 9  # the templates refuse other ids


class MistralParser(SteppedParser):
    """Parses calls of each form. Its grammar has that of a list."""

    template_mark = _TAG
    call_opening = _TAG
    call_tags: ClassVar[Sequence[str]] = (_TAG,)
    shows_special_tokens = True

    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        super().__init__(functions, must_call=must_call)
        self._is_text = True
        self._opening = ""  # the text since the last tag, until a call begins
        self._call: JsonCall | None = None  # a call within a list
        self._arguments: JsonValue | None = None  # after a name

    @classmethod
    def for_template(cls, chat_template: str) -> type[ToolParser]:
        if _ID_TAG in chat_template:
            return MistralIdParser
        return MistralNameParser if _ARGUMENTS_TAG in chat_template else cls

    def finish(self) -> list[ToolEvent]:
        if self._arguments is not None or (self._call is not None and self._call.is_begun):
            return []
        text = self._opening + (self._call.text if self._call is not None else "") + self._rest
        return [Said(text)] if text else []

    def _step(self, events: list[ToolEvent]) -> bool:
        if self._is_text:
            before, is_there, self._rest = split_at(self._rest, _TAG)
            if before:
                events.append(Said(before))
            if is_there:
                self._is_text, self._opening = False, _TAG
            return is_there
        if self._call is not None:
            return self._take_call(self._call, events)
        if self._arguments is not None:
            count = self._arguments.push(self._rest)
            if count:
                events.append(ArgumentsGrown(self._rest[:count]))
            self._rest = self._rest[count:]
            is_done = self._arguments.is_done
            self._arguments = None if is_done else self._arguments
            return is_done
        return self._begin_call(events)

    def _take_call(self, call: JsonCall, events: list[ToolEvent]) -> bool:
        said, self._rest = call.push(self._rest)
        events += said
        if call.is_begun:
            self._opening = ""
        if not call.is_done and not call.is_broken:
            return False
        self._call = None
        if call.is_broken:
            self._be_text(events, "" if call.is_begun else call.text)
        return True

    def _begin_call(self, events: list[ToolEvent]) -> bool:
        body = self._rest.lstrip(_BETWEEN + "]")
        if self._opening:
            self._opening += self._rest[: len(self._rest) - len(body)]
        self._rest = body
        if body.startswith(_TAG):
            self._opening, self._rest = _TAG, body.removeprefix(_TAG)
            return True
        if _TAG.startswith(body):  # nothing, [, or the beginning of the tag
            return False
        if body.startswith("[") and self._opening:
            self._opening, self._rest = self._opening + "[", body[1:]
            return True
        if body.startswith("{"):
            self._call = JsonCall()
            return True
        head, has_arguments, _ = body.partition("{")
        name, tag, rest = split_at_first(head, (_ARGUMENTS_TAG, _ID_TAG))
        may_be_name = _NAME.fullmatch(name.strip()) or (not name and tag is None and rest)
        if not may_be_name:
            return self._be_text(events)
        if not has_arguments:
            return False
        self._rest = body[len(head) :]
        self._opening = ""
        events.append(CallBegun(name.strip()))
        self._arguments = JsonValue()
        return True

    def _be_text(self, events: list[ToolEvent], text: str = "") -> bool:
        """Go on as text: what looked like a call is text for the user, `text` and what stood before it included."""
        if self._opening + text:
            events.append(Said(self._opening + text))
        self._is_text, self._opening = True, ""
        return True

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        more = further_calls('", "', several=several)
        return f'calls: tag_0 "[" call{more} "]"\n' + call_rules(functions)

    @staticmethod
    def new_call_id() -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))


class MistralNameParser(MistralParser):
    """Parses calls of each form. Its grammar has that of names."""

    call_tags = (_TAG, _ARGUMENTS_TAG)

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        return _name_rules(functions, several=several, call_id="")


class MistralIdParser(MistralParser):
    """Parses calls of each form. Its grammar has that of names with ids."""

    call_tags = (_TAG, _ARGUMENTS_TAG, _ID_TAG)

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        rules = _name_rules(functions, several=several, call_id="tag_2 call_id ")
        return f"{rules}\ncall_id: /[A-Za-z0-9]{{{_ID_LENGTH}}}/"


def _name_rules(functions: Sequence[ToolFunction], *, several: bool, call_id: str) -> str:
    more = further_calls("", several=several)
    rules = [f"calls: call{more}", any_call(functions)]
    for number, function in enumerate(functions):
        schema = held_schema({"type": "object", **function.parameters})
        rules.append(f"call_{number}: tag_0 {json.dumps(function.name)} {call_id}tag_1 arguments_{number}")
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    return "\n".join(rules)
