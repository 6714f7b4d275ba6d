"""Apriel's calls: `<tool_calls>` and `</tool_calls>` around a JSON list of them."""

from __future__ import annotations

from swiftkv.server.tool_parsers.nemotron_json import NemotronJsonParser


class AprielParser(NemotronJsonParser):
    """Parses calls of Nemotron's form between other tags."""

    template_mark = "<tool_calls>["
    call_opening = "<tool_calls>"
    call_tags = ("<tool_calls>", "</tool_calls>")
