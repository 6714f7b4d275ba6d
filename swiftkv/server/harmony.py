"""Harmony, the format of gpt-oss: an answer is messages in channels, with special tokens between their parts.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f json<|message|>{…}<|call|>

OpenAI's own library downloads a vocabulary from the internet; the special tokens of the checkpoint suffice here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from swiftkv.engine.messages import ReasoningMarks
from swiftkv.server.reasoning import ReasoningParser, SectionEvent, Sections, Thought
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers.base import ArgumentsGrown, CallBegun, Said

CHANNEL = "<|channel|>"
_MARKS = ("<|start|>", CHANNEL, "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_FINAL = "final"
_CHANNELS = ("analysis", "commentary", _FINAL)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."
_NO_FUNCTIONS = ("assistant", "functions", "python", "browser", "container")  # the last three are gpt-oss' own tools
_WITHOUT_MESSAGE = re.compile(
    rf"{re.escape(CHANNEL)}\s+(?:{'|'.join(_CHANNELS)})(?:\s+to=\S++)?+"
    r"(?:\s+<\|constrain\|>\s*+\w*+|\s+(?:json|code)\b)?+(?=\s|\{)"
)
"""The header of a message whose text the model began without `<|message|>`."""
_LONGEST_HEADER = 512  # characters: a longer text without marks is no header


@dataclass(frozen=True, slots=True)
class HarmonyTokens:
    """The special tokens by their ids, and those that stand before the text of a final answer."""

    marks: dict[int, str]
    final: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> HarmonyTokens | None:
        """Return the tokens of a tokenizer, `None` if it lacks one."""
        ids = {mark: tokenizer.token_id(mark) for mark in _MARKS}
        marks = {token_id: mark for mark, token_id in ids.items() if token_id is not None}
        if len(marks) < len(_MARKS):
            return None
        return cls(marks, tokenizer.encode(f"{CHANNEL}{_FINAL}<|message|>", add_special_tokens=False))


class HarmonyParser(ReasoningParser):
    can_be_ended = False  # another message must begin, and not within the head of one

    def __init__(self, tokenizer: Tokenizer, tokens: HarmonyTokens) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens

    def sections(self, prompt_ids: Sequence[int], *, continues: bool) -> HarmonySections:
        sections = HarmonySections(self._tokens)
        if continues:
            starts = [index for index, token_id in enumerate(prompt_ids) if self._is_start(token_id)]
            for token_id in prompt_ids[starts[-1] if starts else 0 :]:
                sections.take(token_id, self._tokenizer.token_text(token_id))
        return sections

    def marks(self, prompt_ids: Sequence[int], *, continues: bool) -> ReasoningMarks | None:
        if continues and self.sections(prompt_ids, continues=True).is_answer:
            return None
        return ReasoningMarks(self._tokens.final, is_last=True)

    def _is_start(self, token_id: int) -> bool:
        return self._tokens.marks.get(token_id) == "<|start|>"


class HarmonySections(Sections):
    """Separates the messages of one answer.

    Messages to functions are calls; the final channel, and commentary without a recipient, are the answer; all others
    are reasoning.
    """

    def __init__(self, tokens: HarmonyTokens) -> None:
        self._marks = tokens.marks
        self._header: str | None = ""  # the header of the message that begins; `None` within its text
        self._part: Literal["reasoning", "answer", "call"] = "answer"
        self._has_marks = False

    @property
    def is_reasoning(self) -> bool:
        return self._header is None and self._part == "reasoning"

    @property
    def is_answer(self) -> bool:
        return self._header is None and self._part == "answer"

    @property
    def is_done(self) -> bool:
        return False

    @property
    def is_header(self) -> bool:
        if self._header is None or not self._has_marks or len(self._header) > _LONGEST_HEADER:
            return False
        return _WITHOUT_MESSAGE.search(self._header) is None

    def is_mark(self, token_id: int) -> bool:
        return token_id in self._marks

    def take(self, token_id: int, text: str) -> list[SectionEvent]:
        mark = self._marks.get(token_id)
        if mark is None:
            return self._add(text)
        self._has_marks = True
        events = self._add(text.removesuffix(mark))
        match mark:
            case "<|message|>":
                events += self._begin()
            case "<|channel|>" | "<|constrain|>":
                self._header = f"{self._header or ''} {mark} "
            case _:
                events += self._end_header()
                self._header = ""
        return events

    def finish(self, text: str) -> list[SectionEvent]:
        header = self._header
        if header is None:
            return self._add(text)
        if self._has_marks:
            return self._add(text) + self._end_header()
        return [Said(header + text)] if header + text else []

    def _add(self, text: str) -> list[SectionEvent]:
        if self._header is not None:
            self._header += text
            if self._has_marks or len(self._header) <= _LONGEST_HEADER:
                return []
            text, self._header = self._header, None
        if not text:
            return []
        match self._part:
            case "reasoning":
                return [Thought(text)]
            case "answer":
                return [Said(text)]
            case "call":
                return [ArgumentsGrown(text)]

    def _begin(self) -> list[SectionEvent]:
        """End a message's header, which says whether the text after it is a call, the answer or reasoning."""
        header, self._header = self._header or "", None
        _, is_marked, behind = header.partition(CHANNEL)
        names = behind.split()[:1] if is_marked else [word for word in header.split() if word in _CHANNELS]
        channel = names[0] if names else _FINAL
        recipient = _RECIPIENT.search(header)
        function = None if recipient is None else _function(recipient[1])
        if function is not None:
            self._part = "call"
            return [CallBegun(function)]
        is_answer = channel == _FINAL or (channel == "commentary" and recipient is None)
        self._part = "answer" if is_answer else "reasoning"
        return []

    def _end_header(self) -> list[SectionEvent]:
        """Return the message whose text the model wrote into its header, without the mark `<|message|>` before it.

        Commentary without a recipient is left out: it may be a malformed header.
        """
        header = self._header or ""
        found = _WITHOUT_MESSAGE.search(header)
        if found is None or not header[found.end() :].strip():
            return []
        self._header = header[: found.end()]
        if "commentary" in self._header and "to=" not in self._header:
            return []
        return self._begin() + self._add(header[found.end() :].lstrip())


def _function(recipient: str) -> str | None:
    """Return the function that a message calls, or `None`. In long contexts gpt-oss drops the prefix `functions.`"""
    if recipient.startswith(_FUNCTIONS):
        return recipient.removeprefix(_FUNCTIONS) or None
    return None if recipient.partition(".")[0] in _NO_FUNCTIONS else recipient
