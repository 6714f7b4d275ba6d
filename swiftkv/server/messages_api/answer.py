"""The answer to a request to `/v1/messages`, whole or as Anthropic's events."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct

from swiftkv.server.begun import BegunRequest
from swiftkv.server.errors import ApiError
from swiftkv.server.messages_api.objects import (
    BlockDelta,
    BlockStart,
    BlockStop,
    ErrorEvent,
    InputPiece,
    MessageDelta,
    MessageEnd,
    MessageObject,
    MessageStart,
    MessageStop,
    MessageText,
    MessageUsage,
    Ping,
    StopReason,
    TextPiece,
    Thinking,
    ThinkingPiece,
    ToolUseBlock,
)
from swiftkv.server.passage_answer import PassageAnswer
from swiftkv.server.passages import CallPassage, Closed, Grown, Opened, Passage, PassageEvent, ThoughtPassage, content
from swiftkv.server.protocol import ChatBody
from swiftkv.server.sse import NamedEvent


class MessagesAnswer(PassageAnswer):
    id_prefix = "msg_"

    def __init__(self, request: BegunRequest[ChatBody]) -> None:
        super().__init__(request)
        self._max_tokens = request.body.max_tokens

    def opening(self) -> list[NamedEvent]:
        begun = MessageObject(self.id, self.model.name, [], self._message_usage())
        return [MessageStart("message_start", begun), Ping("ping")]

    def written(self, event: PassageEvent) -> list[NamedEvent]:
        match event:
            case Opened(CallPassage() as passage):
                empty = ToolUseBlock(passage.call_id, passage.name, {})
                return [BlockStart("content_block_start", passage.index, empty)]
            case Opened(ThoughtPassage() as passage):
                return [BlockStart("content_block_start", passage.index, Thinking(""))]
            case Opened(passage):
                return [BlockStart("content_block_start", passage.index, MessageText(""))]
            case Grown(CallPassage() as passage, text):
                return [BlockDelta("content_block_delta", passage.index, InputPiece(text))]
            case Grown(ThoughtPassage() as passage, text):
                return [BlockDelta("content_block_delta", passage.index, ThinkingPiece(text))]
            case Grown(passage, text):
                return [BlockDelta("content_block_delta", passage.index, TextPiece(text))]
            case Closed(passage):
                return [BlockStop("content_block_stop", passage.index)]

    def closing(self) -> list[Struct]:
        end = MessageEnd(self._stop_reason(), self._stop_sequence())
        return [MessageDelta("message_delta", end, self._message_usage()), MessageStop("message_stop")]

    def failure(self, error: ApiError) -> Struct:
        return ErrorEvent("error", error.anthropic_answer().error)

    def whole(self) -> Struct:
        return MessageObject(
            self.id,
            self.model.name,
            [_content_block(passage) for passage in self.passages.all],
            self._message_usage(),
            self._stop_reason(),
            self._stop_sequence(),
        )

    def _stop_reason(self) -> StopReason:
        if self.finish_reason == "length":
            return "model_context_window_exceeded" if self._is_context_full() else "max_tokens"
        if self._stop_sequence() is not None:
            return "stop_sequence"
        has_call = any(isinstance(_content_block(passage), ToolUseBlock) for passage in self.passages.all)
        return "tool_use" if has_call else "end_turn"

    def _is_context_full(self) -> bool:
        """Return whether the context was full before the answer reached the limit that was asked for."""
        usage = self.usage()
        is_short = usage.completion_tokens < (self._max_tokens or 0)
        return is_short and usage.prompt_tokens + usage.completion_tokens >= self.model.max_model_len

    def _stop_sequence(self) -> str | None:
        return self.stop_reason if isinstance(self.stop_reason, str) else None

    def _message_usage(self) -> MessageUsage:
        """Return the usage so far; tokens that were in the cache count apart from the others."""
        usage = self.usage()
        if usage.prompt_tokens_details is UNSET:
            return MessageUsage(usage.prompt_tokens, usage.completion_tokens)
        cached, by_tier = usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens_details.cached_tokens_details
        return MessageUsage(
            usage.prompt_tokens - cached,
            usage.completion_tokens,
            cache_read_input_tokens=cached,
            cached_tokens_details=by_tier,
        )


def _content_block(passage: Passage) -> Thinking | MessageText | ToolUseBlock:
    """Return a passage as a whole answer has it: a call whose arguments are no JSON object is text."""
    text = content(passage)
    if isinstance(passage, CallPassage):
        arguments = _object(text or "{}")
        if arguments is not None:
            return ToolUseBlock(passage.call_id, passage.name, arguments)
    return Thinking(text) if isinstance(passage, ThoughtPassage) else MessageText(text)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
