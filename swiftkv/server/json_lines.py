"""JSON that every client takes for one line."""

from __future__ import annotations

import msgspec

_encoder = msgspec.json.Encoder()
_BREAKS = {"\x85": rb"\u0085", "\u2028": rb"\u2028", "\u2029": rb"\u2029"}
_ESCAPES = [(character.encode(), escape) for character, escape in _BREAKS.items()]


def json_line(value: object) -> bytes:
    """Return a value as JSON without any character that some client may take for the end of a line.

    JSON escapes the controls below U+0020 by itself. Python's `str.splitlines`, and with it httpx's `iter_lines`, also
    end a line at U+0085, U+2028 and U+2029, which a model may well generate.
    """
    line = _encoder.encode(value)
    for character, escape in _ESCAPES:
        if character in line:
            line = line.replace(character, escape)
    return line
