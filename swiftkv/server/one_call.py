"""Conversations for chat templates that show only one call of a message, as those of Llama 3 and gpt-oss do.

Llama 3's refuse further calls, and gpt-oss' leaves them out and takes all results for those of the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

_ONCE = ("reasoning_content", "thinking")


def one_call(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with at most one call each, as if the model had made its calls one after the other.

    Each call is followed by its results. Results that belong to no call come after the last call.
    """
    shown: list[Mapping[str, Any]] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            shown.append(message)
            continue
        results = list(takewhile(lambda other: other["role"] == "tool", rest))
        del rest[: len(results)]
        for number, call in enumerate(calls):
            shown.append({**(_without_words(message) if number else message), "tool_calls": [call]})
            shown += [result for result in results if result.get("tool_call_id") == call["id"]]
            results = [result for result in results if result.get("tool_call_id") != call["id"]]
        shown += results
    return shown


def _without_words(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in _ONCE} | {"content": ""}
