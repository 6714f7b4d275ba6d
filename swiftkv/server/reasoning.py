"""Reasoning: the text in which a model thinks before it answers, separated from the answer token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from swiftkv.engine.messages import ReasoningMarks
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers.base import Said, ToolEvent


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning."""

    text: str


SectionEvent = Thought | ToolEvent


class Sections(ABC):
    """Separates the parts of one answer."""

    @property
    @abstractmethod
    def is_reasoning(self) -> bool:
        """Whether the answer is within its reasoning."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether the rest of the answer is text for the user."""

    @property
    def is_header(self) -> bool:
        """Whether the answer is between its parts, in text that nobody sees."""
        return False

    @abstractmethod
    def is_mark(self, token_id: int) -> bool:
        """Return whether a token may end one part and begin another."""

    @abstractmethod
    def take(self, token_id: int, text: str) -> list[SectionEvent]:
        """Take the next token, and the text that has become certain with it."""

    @abstractmethod
    def finish(self, text: str) -> list[SectionEvent]:
        """Take the last text, which came with no token."""


class ReasoningParser(ABC):
    """Knows how one model writes its reasoning."""

    can_be_ended: ClassVar[bool] = True
    """Whether the last tokens of `marks` end the reasoning wherever they come."""

    @abstractmethod
    def sections(self, prompt_ids: Sequence[int], *, continues: bool) -> Sections:
        """Return the object that separates the parts of an answer to a prompt.

        `continues`: the prompt ends within a message of the model's, which the answer continues.
        """

    @abstractmethod
    def marks(self, prompt_ids: Sequence[int], *, continues: bool) -> ReasoningMarks | None:
        """Return the tokens that begin and end the reasoning of an answer to a prompt, `None` if it will not reason."""


@dataclass(frozen=True, slots=True)
class _Tags:
    """The tags of a kind of models.

    Attributes:
        always: Whether an answer begins inside its reasoning even if the prompt does not say so: the model leaves out
            the first tag.
    """

    begin: str
    end: str
    always: bool = False


TAGS = {
    "qwen3": _Tags("<think>", "</think>"),
    "deepseek_r1": _Tags("<think>", "</think>", always=True),
    "mistral": _Tags("[THINK]", "[/THINK]"),
}


class TagParser(ReasoningParser):
    """Reasoning between two tags, each a token. The prompt may have the first tag, or both for no reasoning."""

    def __init__(self, tokenizer: Tokenizer, begin_id: int, end_id: int, *, always: bool) -> None:
        self._tokenizer = tokenizer
        self._begin_id = begin_id
        self._end_id = end_id
        self._always = always

    def sections(self, prompt_ids: Sequence[int], *, continues: bool) -> TagSections:
        end_text = self._tokenizer.token_text(self._end_id)
        return TagSections(self._begin_id, self._end_id, end_text, self._begins(prompt_ids, continues))

    def marks(self, prompt_ids: Sequence[int], *, continues: bool) -> ReasoningMarks | None:
        match self._begins(prompt_ids, continues):
            case True:
                return ReasoningMarks([self._end_id])
            case None:
                return ReasoningMarks([self._end_id], self._begin_id)
            case False:
                return None

    def _begins(self, prompt_ids: Sequence[int], continues: bool) -> bool | None:
        """Return whether an answer begins inside its reasoning; `None` if its first token decides."""
        for token_id in reversed(prompt_ids):
            if token_id in (self._begin_id, self._end_id):
                return token_id == self._begin_id
            if not continues and self._tokenizer.token_text(token_id).strip():
                break
        if continues:
            return False
        return True if self._always else None


class TagSections(Sections):
    """Separates reasoning between tags from the answer. White space around the reasoning is left out."""

    def __init__(self, begin_id: int, end_id: int, end_text: str, begins: bool | None) -> None:
        self._begin_id = begin_id
        self._end_id = end_id
        self._end_text = end_text
        self._is_reasoning = bool(begins)
        self._may_begin = begins is not False  # with the next token
        self._spaces = ""  # spaces of the reasoning that are sent only if more follows
        self._is_blank = True  # the part so far is white space, which is left out
        self._trims = bool(begins)  # the answer follows reasoning

    @property
    def is_reasoning(self) -> bool:
        return self._is_reasoning

    @property
    def is_done(self) -> bool:
        return not (self._is_reasoning or self._may_begin or (self._trims and self._is_blank))

    def is_mark(self, token_id: int) -> bool:
        return token_id in (self._begin_id, self._end_id) and not self.is_done

    def take(self, token_id: int, text: str) -> list[SectionEvent]:
        may_begin, self._may_begin = self._may_begin, False
        if may_begin and token_id == self._begin_id:
            self._is_reasoning = self._trims = True
            return []
        if not self._is_reasoning:
            return self._say(text)
        if token_id != self._end_id:
            return self._think(text)
        events = self._think(text.removesuffix(self._end_text))
        self._is_reasoning, self._is_blank = False, True
        return events

    def finish(self, text: str) -> list[SectionEvent]:
        return self._think(text) if self._is_reasoning else self._say(text)

    def _think(self, text: str) -> list[SectionEvent]:
        text = self._spaces + text
        text = text.lstrip() if self._is_blank else text
        told = text.rstrip()
        self._spaces = text[len(told) :]
        self._is_blank = self._is_blank and not told
        return [Thought(told)] if told else []

    def _say(self, text: str) -> list[SectionEvent]:
        text = text.lstrip() if self._trims and self._is_blank else text
        self._is_blank = self._is_blank and not text
        return [Said(text)] if text else []
