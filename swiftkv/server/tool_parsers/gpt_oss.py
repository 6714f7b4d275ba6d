"""gpt-oss' calls: `harmony.py` finds them by their tokens, as it does reasoning, so only text for the user is left."""

from __future__ import annotations

from collections.abc import Sequence

from swiftkv.server.tool_parsers.base import Said, ToolEvent, ToolFunction, ToolParser


class GptOssParser(ToolParser):
    template_mark = "<|channel|>"
    holds_calls = False

    def __init__(self, functions: Sequence[ToolFunction] = (), *, must_call: bool = False) -> None:
        assert not must_call

    def push(self, text: str) -> list[ToolEvent]:
        return [Said(text)] if text else []

    def finish(self) -> list[ToolEvent]:
        return []

    @staticmethod
    def call_grammar(functions: Sequence[ToolFunction], *, several: bool) -> str:
        raise NotImplementedError
