"""The peculiarities of a chat template, which shows them when it renders small conversations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from swiftkv.server.errors import ApiError
from swiftkv.server.one_call import one_call
from swiftkv.server.one_system import one_system

_SHOWN = "swiftkv shown"
_LATE_PROBE = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "system", "content": _SHOWN},
]
_PARTS_PROBES = [
    [{"role": "user", "content": _SHOWN}],
    [{"role": "system", "content": _SHOWN}, {"role": "user", "content": "a"}],
]
_SHORT_ID_CHARS = 9


class TemplateTraits:
    """Gives messages the form in which a chat template shows all of them. Each trait is found out when it is needed."""

    def __init__(self, render: Callable[[Sequence[Mapping[str, Any]]], str]) -> None:
        """`render` returns the text that the template makes of messages; it raises `ApiError` if it refuses them."""
        self._render = render

    def without_late_system(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return messages whose system messages stand where the template shows them."""
        return messages if self._shows_late_system else one_system(messages)

    def in_shape(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return messages whose calls, contents and ids have the form that the template takes."""
        if self._shows_one_call:
            messages = one_call(messages)
        if self._takes_thought_or_text:
            messages = [_with_text_in_thought(message) for message in messages]
        if self._wants_short_ids:
            messages = [_with_short_ids(message) for message in messages]
        if self._takes_arguments_as_text:
            messages = [_with_argument_texts(message) for message in messages]
        return _in_parts(messages) if self._takes_parts else messages

    @cached_property
    def _shows_late_system(self) -> bool:
        """Whether the template shows later system messages, too, in their places."""
        return self._shows(_LATE_PROBE)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template takes texts only as parts of a content, as the first one of Gemma 3 does."""
        return any(not self._shows(probe) and self._shows(_in_parts(probe)) for probe in _PARTS_PROBES)

    @cached_property
    def _wants_short_ids(self) -> bool:
        """Whether the template refuses ids of calls that are not as long as those of Mistral's models."""
        return not self._shows(_calling("call_of_another_model")) and self._shows(_calling("a" * _SHORT_ID_CHARS))

    @cached_property
    def _shows_one_call(self) -> bool:
        """Whether the template refuses or leaves out all calls of a message but the first."""
        probe = _calling_twice()
        return not self._shows(probe) and self._shows(one_call(probe))

    @cached_property
    def _takes_thought_or_text(self) -> bool:
        """Whether the template refuses a call after reasoning and text, as that of gpt-oss does."""
        probe = _calling("a" * _SHORT_ID_CHARS)
        probe[1] = {**probe[1], "content": "a", "reasoning_content": "b", "thinking": "b"}
        return not self._shows(probe) and self._shows([_with_text_in_thought(message) for message in probe])

    @cached_property
    def _takes_arguments_as_text(self) -> bool:
        """Whether the template refuses arguments that are an object, as DeepSeek-R1's does, or shows them as Python."""
        probe = _calling("a" * _SHORT_ID_CHARS, a=_SHOWN)
        if self._shows(probe) and not self._shows(probe, f"'{_SHOWN}'"):
            return False
        return self._shows([_with_argument_texts(message) for message in probe], f'"{_SHOWN}"')

    def _shows(self, probe: Sequence[Mapping[str, Any]], shown: str = _SHOWN) -> bool:
        """Return whether the template takes a conversation and shows `shown`, which is in it."""
        try:
            return shown in self._render(probe)
        except ApiError:
            return False


def _in_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages whose content is a list of one part."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def _calling(call_id: str, **arguments: str) -> list[Mapping[str, Any]]:
    """Return a conversation with a call of this id."""
    return [
        {"role": "user", "content": _SHOWN},
        {"role": "assistant", "content": "", "tool_calls": [_call(call_id, **arguments)]},
        {"role": "tool", "content": "a", "tool_call_id": call_id},
    ]


def _calling_twice() -> list[Mapping[str, Any]]:
    """Return a conversation with two calls in one message; `_SHOWN` is in the second."""
    one, two = (character * _SHORT_ID_CHARS for character in "ab")
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [_call(one), _call(two, a=_SHOWN)]},
        {"role": "tool", "content": "a", "tool_call_id": one},
        {"role": "tool", "content": "a", "tool_call_id": two},
    ]


def _call(call_id: str, **arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def _with_text_in_thought(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message that has no text between its reasoning and its calls: the text ends the reasoning."""
    if not (message.get("tool_calls") and message["content"] and "thinking" in message):
        return message
    thought = f"{message['thinking']}\n\n{message['content']}"
    return {**message, "content": "", "reasoning_content": thought, "thinking": thought}


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose ids of calls have the length that Mistral's templates ask for."""
    shown = dict(message)
    if "tool_calls" in message:
        shown["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        shown["tool_call_id"] = _short_id(message["tool_call_id"])
    return shown


def _with_argument_texts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls have their arguments as JSON."""
    if not message.get("tool_calls"):
        return message
    functions = [dict(call["function"]) for call in message["tool_calls"]]
    for function in functions:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    calls = zip(message["tool_calls"], functions, strict=True)
    return {**message, "tool_calls": [{**call, "function": function} for call, function in calls]}


def _short_id(call_id: str) -> str:
    if len(call_id) == _SHORT_ID_CHARS:
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID_CHARS]  # the last ones alone may be those of others
