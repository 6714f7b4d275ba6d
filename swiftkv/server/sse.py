"""Server-sent events as bytes, with a name each or without, as protocols have them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from swiftkv.server.json_lines import json_line

END_OF_STREAM = b"data: [DONE]\n\n"
"""The last event of OpenAI's completions."""


class NamedEvent(Struct):
    """An event whose name stands before its data, and in it."""

    type: str


def plain_events(events: Sequence[Struct]) -> bytes:
    """Return events without names, as OpenAI's completions have them."""
    return b"".join(b"data: " + json_line(event) + b"\n\n" for event in events)


def named_events(events: Sequence[NamedEvent]) -> bytes:
    """Return events with their names, as OpenAI's responses and Anthropic's messages have them."""
    return b"".join(b"event: " + event.type.encode() + b"\ndata: " + json_line(event) + b"\n\n" for event in events)
