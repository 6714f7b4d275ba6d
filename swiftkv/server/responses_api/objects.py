"""The objects of `/v1/responses`: the answer, its items, and the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from swiftkv.server.named_logprobs import ChatTokenLogprob
from swiftkv.server.sse import NamedEvent

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct):
    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[str] = field(default_factory=list)
    logprobs: Sequence[ChatTokenLogprob] = ()


class ReasoningText(Struct):
    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class ReasoningOutput(Struct):
    id: str
    content: list[ReasoningText]
    status: Status
    summary: list[str] = field(default_factory=list)
    type: Literal["reasoning"] = "reasoning"


class OutputMessage(Struct):
    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class FunctionCallItem(Struct):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    type: Literal["function_call"] = "function_call"
    namespace: str | UnsetType = UNSET


class CustomCallItem(Struct):
    id: str
    call_id: str
    name: str
    input: str
    status: Status
    type: Literal["custom_tool_call"] = "custom_tool_call"
    namespace: str | UnsetType = UNSET


OutputItem = ReasoningOutput | OutputMessage | FunctionCallItem | CustomCallItem


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0
    cached_tokens_details: dict[str, int] | UnsetType = UNSET
    """The cached tokens by where their KV lay, for requests that ask: local, peer, host, storage."""


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(Struct):
    code: str
    message: str


class Effort(Struct):
    effort: str | None = None
    summary: None = None


class ResponseObject(Struct):
    """An answer. Besides the output, it repeats the settings of the request."""

    id: str
    created_at: int
    status: Status
    model: str
    output: list[Any]
    """Items of the types `reasoning`, `message`, `function_call` and `custom_tool_call`."""
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float | None
    text: Any
    tool_choice: Any
    tools: Any
    top_p: float | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    user: str | None
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    service_tier: str | UnsetType = UNSET
    object: Literal["response"] = "response"
    background: bool = False
    previous_response_id: None = None
    reasoning: Effort = field(default_factory=Effort)
    store: bool = False
    top_logprobs: int = 0
    truncation: Literal["disabled"] = "disabled"


class ResponseEvent(NamedEvent):
    sequence_number: int
    response: ResponseObject


class ItemEvent(NamedEvent):
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(NamedEvent):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class TextDelta(NamedEvent):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: Sequence[ChatTokenLogprob] = ()


class TextDone(NamedEvent):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: Sequence[ChatTokenLogprob] = ()


class ReasoningDelta(NamedEvent):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDone(NamedEvent):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDelta(NamedEvent):
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(NamedEvent):
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class CustomInputDelta(NamedEvent):
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class CustomInputDone(NamedEvent):
    sequence_number: int
    item_id: str
    output_index: int
    input: str
