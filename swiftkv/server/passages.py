"""An answer as a row of passages: reasoning, texts and calls of tools, each opened, grown and closed before the next.

OpenAI's responses and Anthropic's messages are written from these events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from swiftkv.server.choices import Delta
from swiftkv.server.named_logprobs import ChatTokenLogprob
from swiftkv.server.reasoning import Thought
from swiftkv.server.responses import ToolCallDelta
from swiftkv.server.tool_parsers.base import Said


@dataclass(slots=True)
class TextPassage:
    """Text for the user. `is_cut`: the answer met its length limit, or failed, within the passage."""

    index: int
    pieces: list[str] = field(default_factory=list)
    is_cut: bool = False
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class ThoughtPassage:
    """The model's reasoning."""

    index: int
    pieces: list[str] = field(default_factory=list)
    is_cut: bool = False


@dataclass(slots=True)
class CallPassage:
    """A call of a tool; its pieces are the arguments, as the model wrote them."""

    index: int
    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)
    is_cut: bool = False


Passage = ThoughtPassage | TextPassage | CallPassage


@dataclass(frozen=True, slots=True)
class Opened:
    passage: Passage


@dataclass(frozen=True, slots=True)
class Grown:
    passage: Passage
    text: str
    logprobs: Sequence[ChatTokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    passage: Passage


PassageEvent = Opened | Grown | Closed


def content(passage: Passage) -> str:
    """Return a passage's reasoning, text or arguments so far."""
    return "".join(passage.pieces)


class Passages:
    """Makes the passages of one choice from its deltas."""

    def __init__(self) -> None:
        self.all: list[Passage] = []
        self.num_chars = 0
        self.num_logprobs = 0
        self._open: Passage | None = None

    def take(self, delta: Delta, logprobs: Sequence[ChatTokenLogprob] = ()) -> Iterator[PassageEvent]:
        """Yield a delta's events. The last delta closes the last passage; there is at least an empty text.

        `logprobs` are those of `delta.text_tokens`, and go with the delta's first text.
        """
        for part in delta.parts:
            match part:
                case Thought(text):
                    if not isinstance(self._open, ThoughtPassage):
                        yield from self._begin(ThoughtPassage(len(self.all)))
                    yield self._grow(text)
                case Said(text):
                    if not isinstance(self._open, TextPassage):
                        yield from self._begin(TextPassage(len(self.all)))
                    yield self._grow(text, logprobs)
                    logprobs = ()
                case ToolCallDelta(id=call_id, function=function):
                    if call_id is not UNSET:
                        assert function.name is not UNSET
                        yield from self._begin(CallPassage(len(self.all), call_id, function.name))
                    if function.arguments:
                        yield self._grow(function.arguments)
        if delta.finish_reason is not None:
            if not self.all:
                yield from self._begin(TextPassage(0))
            yield from self._close(is_cut=delta.finish_reason == "length")

    def cut(self) -> None:
        """Mark the passage that is open as cut: the answer has failed within it."""
        if self._open is not None:
            self._open.is_cut = True

    def _begin(self, passage: Passage) -> Iterator[PassageEvent]:
        yield from self._close(is_cut=False)
        self.all.append(passage)
        self._open = passage
        yield Opened(passage)

    def _grow(self, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> Grown:
        assert self._open is not None
        self._open.pieces.append(text)
        self.num_chars += len(text)
        if isinstance(self._open, TextPassage):
            self._open.logprobs += logprobs
            self.num_logprobs += len(logprobs)
        return Grown(self._open, text, logprobs)

    def _close(self, *, is_cut: bool) -> Iterator[PassageEvent]:
        if self._open is not None:
            self._open.is_cut = is_cut
            yield Closed(self._open)
        self._open = None
