"""The request that `/v1/responses` takes, and the chat that it comes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from msgspec import Raw
from pydantic import Field, PrivateAttr, Tag

from swiftkv.server.fields import INT32_MAX, Body, Label, Text, Unsupported, told_by
from swiftkv.server.price import LIMITS
from swiftkv.server.protocol import (
    RETENTION,
    CacheRetention,
    ChatBody,
    ChatMessage,
    Metadata,
    SamplingFields,
    TextPart,
)
from swiftkv.server.structured import JsonSchema, JsonSchemaFormat, ResponseFormat, encoded
from swiftkv.server.templating import ReasoningEffort
from swiftkv.server.tiers import WantedTier
from swiftkv.server.tools import (
    CalledFunction,
    FunctionDefinition,
    FunctionName,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCallMessage,
    ToolChoice,
)

FIELD_OF_CHAT = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""The names that a chat's fields have here, for errors that are found in the chat."""

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = Field(None, description="Accepted, not used", max_length=LIMITS.content_parts)
    logprobs: list[Any] | None = Field(None, description="Accepted, not used", max_length=LIMITS.content_parts)


InputTexts = Annotated[list[InputText], Field(fail_fast=True, max_length=LIMITS.content_parts)]


class MessageItem(Body):
    """A message: one of the user's, or an item of an earlier answer."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | InputTexts
    type: Literal["message"] | None = None
    id: Label | None = Field(None, description="Accepted, not used")
    status: ItemStatus | None = Field(None, description="Accepted, not used")
    phase: Label | None = Field(None, description="Accepted, not used")


class FunctionCallInput(Body):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: Label
    name: FunctionName
    arguments: Text
    id: Label | None = Field(None, description="Accepted, not used")
    status: ItemStatus | None = Field(None, description="Accepted, not used")
    namespace: Annotated[None, Unsupported()] = None
    caller: Annotated[None, Unsupported()] = None


class FunctionCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: Label
    output: Text | InputTexts
    id: Label | None = Field(None, description="Accepted, not used")
    status: ItemStatus | None = Field(None, description="Accepted, not used")
    name: Label | None = Field(None, description="Accepted, not used")
    namespace: Annotated[None, Unsupported()] = None
    caller: Annotated[None, Unsupported()] = None


class ReasoningPart(Body):
    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Body):
    """Reasoning of an earlier answer; the chat template decides what of it the model sees."""

    type: Literal["reasoning"]
    id: Label | None = Field(None, description="Accepted, not used")
    summary: list[Any] | None = Field(None, description="Accepted, not used", max_length=LIMITS.content_parts)
    content: Annotated[list[ReasoningPart], Field(fail_fast=True, max_length=LIMITS.content_parts)] | None = None
    encrypted_content: Text | None = Field(None, description="Accepted, not used")
    status: ItemStatus | None = Field(None, description="Accepted, not used")


_ITEM_TAGS = {
    "message": "message item",
    "function_call": "function_call item",
    "function_call_output": "function_call_output item",
    "reasoning": "reasoning item",
}
Item = Annotated[
    Annotated[MessageItem, Tag("message item")]
    | Annotated[FunctionCallInput, Tag("function_call item")]
    | Annotated[FunctionCallOutput, Tag("function_call_output item")]
    | Annotated[ReasoningItem, Tag("reasoning item")],
    told_by("type", _ITEM_TAGS, default="message"),
]


class FunctionTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema")
    strict: bool | None = Field(None, description="Accepted, not used: see docs/tools.md")
    defer_loading: Annotated[None, Unsupported(False)] = None

    def for_chat(self) -> Tool:
        function = FunctionDefinition.model_construct(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return Tool.model_construct(type="function", function=function)


class NamedFunctionTool(Body):
    type: Literal["function"]
    name: FunctionName


class PlainTextFormat(Body):
    type: Literal["text", "json_object"]


class SchemaTextFormat(Body):
    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: Annotated[JsonSchema, Field(alias="schema")]
    description: Label | None = None
    strict: bool | None = Field(None, description="The schema holds the answer in either case")


TextFormat = Annotated[
    Annotated[PlainTextFormat, Tag("plain format")] | Annotated[SchemaTextFormat, Tag("format with a schema")],
    told_by("type", {"text": "plain format", "json_object": "plain format", "json_schema": "format with a schema"}),
]


class TextSettings(Body):
    format: TextFormat | None = None
    verbosity: Annotated[None, Unsupported("medium")] = None

    def for_chat(self) -> ResponseFormat | None:
        if self.format is None:
            return None
        schema = None
        if isinstance(self.format, SchemaTextFormat):
            schema = JsonSchemaFormat.model_construct(name=self.format.name, schema_=self.format.schema_)
        return ResponseFormat.model_construct(type=self.format.type, json_schema=schema)


class ReasoningSettings(Body):
    effort: ReasoningEffort | None = Field(None, description="Where the chat template takes it")
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Accepted, not used")


class ResponsesStreamOptions(Body):
    include_obfuscation: Annotated[None, Unsupported(False)] = None


class ResponsesBody(SamplingFields):
    input: Text | Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=LIMITS.messages)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=LIMITS.tools)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    service_tier: WantedTier | None = None

    store: bool | None = Field(None, description="Accepted, not used")
    user: Label | None = Field(None, description="Accepted, not used")
    metadata: Metadata | None = Field(None, description="Accepted, not used")
    safety_identifier: Label | None = Field(None, description="Accepted, not used")
    prompt_cache_key: Label | None = Field(None, description="Accepted, not used")
    prompt_cache_retention: CacheRetention | None = Field(None, description=RETENTION)
    max_tool_calls: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(None, description="Accepted, not used")
    stream_options: ResponsesStreamOptions | None = None
    previous_response_id: Annotated[None, Unsupported()] = None
    conversation: Annotated[None, Unsupported()] = None
    prompt: Annotated[None, Unsupported()] = None
    background: Annotated[None, Unsupported(False)] = None
    truncation: Annotated[None, Unsupported("disabled")] = None
    include: Annotated[None, Unsupported([], ["reasoning.encrypted_content"])] = None
    top_logprobs: Annotated[None, Unsupported(0)] = None

    _chat: ChatBody = PrivateAttr()
    _tools: Raw = PrivateAttr()
    _text: Raw = PrivateAttr()
    _num_echoed_bytes: int = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Translate, where a large body is parsed: in a thread."""
        self._chat = _chat(self)
        asked_tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        asked_text = {} if self.text is None else self.text.model_dump(exclude_none=True, by_alias=True)
        tools = encoded(asked_tools, "tools")
        text = encoded({"format": {"type": "text"}, **asked_text}, "text.format.schema")
        self._tools, self._text, self._num_echoed_bytes = Raw(tools), Raw(text), len(tools) + len(text)

    @property
    def chat(self) -> ChatBody:
        """The chat that the request comes to."""
        return self._chat

    @property
    def echoed_tools(self) -> Raw:
        """The tools as the answer repeats them."""
        return self._tools

    @property
    def echoed_text(self) -> Raw:
        """The text settings as the answer repeats them."""
        return self._text

    @property
    def echoed_tool_choice(self) -> object:
        """The choice of tools as the answer repeats it."""
        choice = self.tool_choice
        return choice.model_dump() if isinstance(choice, NamedFunctionTool) else choice or "auto"

    @property
    def num_echoed_bytes(self) -> int:
        return self._num_echoed_bytes


def _chat(body: ResponsesBody) -> ChatBody:
    """Return the chat of a request. Every field was checked already, and nothing is checked again."""
    choice: ToolChoice | None = None
    if isinstance(body.tool_choice, NamedFunctionTool):
        function = NamedFunction.model_construct(name=body.tool_choice.name)
        choice = NamedTool.model_construct(type="function", function=function)
    else:
        choice = body.tool_choice
    return ChatBody.model_construct(
        **body.shared_fields(),
        messages=list(_messages(body)),
        max_completion_tokens=body.max_output_tokens,
        tools=None if body.tools is None else [tool.for_chat() for tool in body.tools],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if body.text is None else body.text.for_chat(),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        service_tier=body.service_tier,
        prompt_cache_retention=body.prompt_cache_retention,
    )


def _messages(body: ResponsesBody) -> Iterator[ChatMessage]:
    if body.instructions is not None:
        yield ChatMessage.model_construct(role="system", content=body.instructions)
    if isinstance(body.input, str):
        yield ChatMessage.model_construct(role="user", content=body.input)
        return
    answer: ChatMessage | None = None  # what follows may be calls that belong to it
    thought: str | None = None  # of the message that follows
    for item in body.input:
        if isinstance(item, ReasoningItem):
            thought = "\n".join(part.text for part in item.content or ()) or None
            if answer is not None:
                yield answer
                answer = None
            continue
        if isinstance(item, FunctionCallInput):
            answer = answer or ChatMessage.model_construct(role="assistant", reasoning_content=thought)
            answer.tool_calls = answer.tool_calls or []
            answer.tool_calls.append(_call(item))
            thought = None
            continue
        if answer is not None:
            yield answer
            answer = None
        if isinstance(item, FunctionCallOutput):
            yield ChatMessage.model_construct(role="tool", tool_call_id=item.call_id, content=_content(item.output))
        elif item.role == "assistant":
            content = _content(item.content)
            answer = ChatMessage.model_construct(role="assistant", content=content, reasoning_content=thought)
        else:
            yield ChatMessage.model_construct(role=item.role, content=_content(item.content))
        thought = None
    if answer is not None:
        yield answer


def _call(item: FunctionCallInput) -> ToolCallMessage:
    function = CalledFunction.model_construct(name=item.name, arguments=item.arguments)
    return ToolCallMessage.model_construct(id=item.call_id, type="function", function=function)


def _content(value: str | list[InputText]) -> str | list[TextPart]:
    if isinstance(value, str):
        return value
    return [TextPart.model_construct(type="text", text=part.text) for part in value]
