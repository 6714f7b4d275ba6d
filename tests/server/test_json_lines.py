"""Clients may end lines where Python's `str.splitlines` does."""

from __future__ import annotations

import sys

import msgspec

from swiftkv.server.json_lines import json_line
from swiftkv.server.sse import NamedEvent, plain_events

EVERY_CHARACTER = "".join(map(chr, [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]))


def test_no_character_ends_a_line() -> None:
    line = json_line({"text": EVERY_CHARACTER, EVERY_CHARACTER: 1})
    assert msgspec.json.decode(line) == {"text": EVERY_CHARACTER, EVERY_CHARACTER: 1}
    assert line.decode().splitlines() == [line.decode()]


def test_what_needs_no_escape_is_written_as_it_is() -> None:
    assert json_line({"text": "häßlich \u2027 \u202a 漢"}) == '{"text":"häßlich \u2027 \u202a 漢"}'.encode()


def test_an_event_is_one_line() -> None:
    text = plain_events([NamedEvent("a\u2028b"), NamedEvent("c\x85d\u2029e")]).decode()
    assert text.splitlines() == ['data: {"type":"a\\u2028b"}', "", 'data: {"type":"c\\u0085d\\u2029e"}', ""]
