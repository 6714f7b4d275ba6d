"""The objects of `/v1/messages`: the answer, its blocks, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from swiftkv.server.errors import AnthropicErrorDetail
from swiftkv.server.sse import NamedEvent

StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class MessageText(Struct):
    text: str
    type: Literal["text"] = "text"


class Thinking(Struct):
    """Reasoning, which has no signature."""

    thinking: str
    signature: str = ""
    type: Literal["thinking"] = "thinking"


class ToolUseBlock(Struct):
    id: str
    name: str
    input: dict[str, Any]
    type: Literal["tool_use"] = "tool_use"


class MessageUsage(Struct):
    input_tokens: int
    """Prompt tokens that were not in the cache; all prompt tokens where the node does not show cached ones."""
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int | UnsetType = UNSET
    cached_tokens_details: dict[str, int] | UnsetType = UNSET
    """`cache_read_input_tokens` by where their KV lay, for requests that ask: local, peer, host, storage."""


class MessageObject(Struct):
    id: str
    model: str
    content: list[Any]
    """Content blocks of the types `thinking`, `text` and `tool_use`."""
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class TokenCount(Struct):
    input_tokens: int


class AnthropicModel(Struct):
    id: str
    display_name: str
    created_at: str
    """The time at which the gateway met the model, in the form of RFC 3339."""
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"] = "active"
    type: Literal["model"] = "model"


class AnthropicModelList(Struct):
    """All models, in one page."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False


class MessageStart(NamedEvent):
    message: MessageObject


class Ping(NamedEvent):
    pass


class BlockStart(NamedEvent):
    index: int
    content_block: Thinking | MessageText | ToolUseBlock


class TextPiece(Struct):
    text: str
    type: Literal["text_delta"] = "text_delta"


class ThinkingPiece(Struct):
    thinking: str
    type: Literal["thinking_delta"] = "thinking_delta"


class InputPiece(Struct):
    partial_json: str
    type: Literal["input_json_delta"] = "input_json_delta"


class BlockDelta(NamedEvent):
    index: int
    delta: ThinkingPiece | TextPiece | InputPiece


class BlockStop(NamedEvent):
    index: int


class MessageEnd(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(NamedEvent):
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(NamedEvent):
    pass


class ErrorEvent(NamedEvent):
    error: AnthropicErrorDetail
