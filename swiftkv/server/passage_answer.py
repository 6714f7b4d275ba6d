"""An answer that is written as passages, for the protocols that have them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, cast

from msgspec import Struct

from swiftkv.server.answer import Answer
from swiftkv.server.begun import BegunRequest
from swiftkv.server.choices import Delta
from swiftkv.server.named_logprobs import ChatTokenLogprob, chat_logprobs
from swiftkv.server.passages import PassageEvent, Passages
from swiftkv.server.protocol import ChatBody
from swiftkv.server.sse import NamedEvent, named_events
from swiftkv.server.text_tokens import TextToken

_SMALL_CHARS = 1 << 16
_SMALL_LOGPROBS = 512


class PassageAnswer(Answer):
    """The one choice of a chat as passages. A stream and a whole answer are made of the same passages."""

    end_of_stream: ClassVar[bytes] = b""

    def __init__(self, request: BegunRequest[ChatBody]) -> None:
        super().__init__(request)
        self.passages = Passages()
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @abstractmethod
    def opening(self) -> list[NamedEvent]:
        """Return the events that begin a stream."""

    @abstractmethod
    def written(self, event: PassageEvent) -> list[NamedEvent]:
        """Return the stream's events for one event of a passage."""

    def add(self, batch: Sequence[Delta]) -> None:
        for _ in self._happened(batch):
            pass

    def chunks(self, batch: Sequence[Delta]) -> list[Struct]:
        events: list[Struct] = []
        happened = self._happened(batch)
        if self._is_first(0):
            events += self.opening()
        for event in happened:
            events += self.written(event)
        return events

    def encode(self, events: Sequence[Struct]) -> bytes:
        return named_events(cast("Sequence[NamedEvent]", events))

    def is_small(self, batch: Sequence[Delta]) -> bool:
        """Return whether the events are small. An event that closes a passage repeats all of it, so it may be large."""
        may_close = any(delta.finish_reason or delta.calls for delta in batch)
        return super().is_small(batch) and (not may_close or self.has_small_closing)

    @property
    def has_small_closing(self) -> bool:
        return self.passages.num_chars <= _SMALL_CHARS and self.passages.num_logprobs <= _SMALL_LOGPROBS

    def _happened(self, batch: Sequence[Delta]) -> Iterator[PassageEvent]:
        self._count(batch)
        for delta in batch:
            if delta.finish_reason is not None:
                self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            yield from self.passages.take(delta, self._text_logprobs(delta.text_tokens))

    def _text_logprobs(self, tokens: Sequence[TextToken]) -> Sequence[ChatTokenLogprob]:
        if not tokens:
            return ()
        return chat_logprobs(
            self._token_names, [token.token_id for token in tokens], [token.logprobs for token in tokens]
        ).content
