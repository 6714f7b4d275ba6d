"""Conversations for chat templates that show only one system message, the first.

Agents add instructions in the middle of a conversation, where Qwen's newer templates refuse them and others leave them
out. Moved to the front, they would change the beginning of every prompt, which then would not be found in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_REMINDER = "<system-reminder>\n{}\n</system-reminder>"


def one_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages of which only the first may have the role `system`.

    System messages at the beginning become one. A later one is joined to the user's message beside it, or becomes a
    user's message, so that the user and the assistant go on taking turns.
    """
    shown: list[Mapping[str, Any]] = []
    joins_next = False
    for message in messages:
        is_late = message["role"] == "system" and bool(shown)
        at_front = is_late and len(shown) == 1 and shown[0]["role"] == "system"
        if is_late and not at_front:
            message = {"role": "user", "content": _REMINDER.format(message["content"])}
        meets_user = message["role"] == shown[-1]["role"] == "user" if shown else False
        if at_front or (meets_user and (is_late or joins_next)):
            shown[-1] = {**shown[-1], "content": f"{shown[-1]['content']}\n\n{message['content']}"}
        else:
            shown.append(message)
        joins_next = is_late
    return shown
