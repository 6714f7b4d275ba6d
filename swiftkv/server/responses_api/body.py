"""The request that `/v1/responses` takes, and its translation to a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from msgspec import Raw
from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, Tag

from swiftkv.server.fields import INT32_MAX, TEXT_ONLY, UNSEEN, Body, Label, OnlyKinds, Text, Unsupported, told_by
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
from swiftkv.server.responses_api.tools import (
    AnyTools,
    CalledTool,
    NamedToolChoice,
    RequestTools,
    custom_arguments,
    function_name,
)
from swiftkv.server.structured import JsonSchema, JsonSchemaFormat, ResponseFormat, encoded
from swiftkv.server.templating import ReasoningEffort, Verbosity
from swiftkv.server.tiers import WantedTier
from swiftkv.server.tools import (
    CalledFunction,
    FunctionName,
    NamedFunction,
    NamedTool,
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
_ONLY_TEXTS = OnlyKinds("input_text", "output_text", "text", because=TEXT_ONLY)


class InputText(Body):
    type: Annotated[Literal["input_text", "output_text", "text"], BeforeValidator(_ONLY_TEXTS)]
    text: Text
    annotations: list[Any] | None = Field(None, description="Accepted, not used", max_length=LIMITS.content_parts)
    logprobs: list[Any] | None = Field(None, description="Accepted, not used")


InputTexts = Annotated[list[InputText], Field(fail_fast=True, max_length=LIMITS.content_parts)]


class InputFile(Body):
    """A picture or file that a tool returned. The model sees a note in its place."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_image", "input_file"]

    @property
    def text(self) -> str:
        return UNSEEN.format(self.type)


OutputPart = Annotated[
    Annotated[InputText, Tag("text part")] | Annotated[InputFile, Tag("file part")],
    told_by(
        "type",
        dict.fromkeys(("input_text", "output_text", "text"), "text part")
        | dict.fromkeys(("input_image", "input_file"), "file part"),
    ),
]
OutputParts = Annotated[list[OutputPart], Field(fail_fast=True, max_length=LIMITS.content_parts)]


class MessageItem(Body):
    """A message: one of the user's, or an item of an earlier answer."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | InputTexts
    type: Literal["message"] | None = None
    id: Label | None = Field(None, description="Accepted, not used")
    status: ItemStatus | None = Field(None, description="Accepted, not used")
    phase: Label | None = Field(None, description="Accepted, not used")


class CallInput(Body):
    """The fields that calls of functions and of custom tools share when clients send them back."""

    model_config = ConfigDict(validate_by_name=True)  # `model_dump()` of OpenAI's client writes `async_`

    call_id: Label
    name: FunctionName
    id: Label | None = Field(None, description="Accepted, not used")
    status: ItemStatus | None = Field(None, description="Accepted, not used")
    namespace: FunctionName | None = None
    caller: Annotated[None, Unsupported()] = None
    async_: Annotated[None, Unsupported(False)] = Field(None, alias="async")


class FunctionCallInput(CallInput):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    arguments: Text


class CustomCallInput(CallInput):
    """A call of a custom tool that an earlier answer made."""

    type: Literal["custom_tool_call"]
    input: Text

    @property
    def arguments(self) -> str:
        """The arguments of the function that stands for the tool."""
        return custom_arguments(self.input)


class CallOutput(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Label
    output: Text | OutputParts
    id: Label | None = Field(None, description="Accepted, not used")
    status: ItemStatus | None = Field(None, description="Accepted, not used")
    name: Label | None = Field(None, description="Accepted, not used")
    namespace: Label | None = Field(None, description="Accepted, not used")
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


HostedItemType = Literal["web_search_call", "image_generation_call", "tool_search_call", "tool_search_output"]


class HostedItem(Body):
    """A call of a tool that another server ran: the model is not shown it."""

    model_config = ConfigDict(extra="ignore")

    type: HostedItemType


_ITEM_TAGS = {
    "message": "message item",
    "function_call": "function_call item",
    "function_call_output": "output of a call",
    "custom_tool_call": "custom_tool_call item",
    "custom_tool_call_output": "output of a call",
    "reasoning": "reasoning item",
    **dict.fromkeys(get_args(HostedItemType), "item of another server"),
}
Item = Annotated[
    Annotated[MessageItem, Tag("message item")]
    | Annotated[FunctionCallInput, Tag("function_call item")]
    | Annotated[CustomCallInput, Tag("custom_tool_call item")]
    | Annotated[CallOutput, Tag("output of a call")]
    | Annotated[ReasoningItem, Tag("reasoning item")]
    | Annotated[HostedItem, Tag("item of another server")],
    told_by("type", _ITEM_TAGS, default="message"),
]


class PlainTextFormat(Body):
    type: Literal["text", "json_object"]


class SchemaTextFormat(Body):
    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: Annotated[JsonSchema, Field(alias="schema")]
    description: Label | None = None
    strict: bool | None = Field(None, description="The schema constrains the answer in either case")


TextFormat = Annotated[
    Annotated[PlainTextFormat, Tag("plain format")] | Annotated[SchemaTextFormat, Tag("format with a schema")],
    told_by("type", {"text": "plain format", "json_object": "plain format", "json_schema": "format with a schema"}),
]


class TextSettings(Body):
    format: TextFormat | None = None
    verbosity: Verbosity | None = Field(None, description="Accepted, not used")

    def for_chat(self) -> ResponseFormat | None:
        if self.format is None:
            return None
        schema = None
        if isinstance(self.format, SchemaTextFormat):
            schema = JsonSchemaFormat.model_construct(name=self.format.name, schema_=self.format.schema_)
        return ResponseFormat.model_construct(type=self.format.type, json_schema=schema)


class ReasoningSettings(Body):
    effort: ReasoningEffort | None = Field(None, description="Without effect where the chat template does not take it")
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Accepted, not used")


class ResponsesStreamOptions(Body):
    include_obfuscation: bool | None = Field(None, description="Accepted, not used")


_TEXT_LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]


class ResponsesChat(ChatBody):
    """The chat that a request is translated to."""

    logprobs_of_text: ClassVar[bool] = True


class ResponsesBody(SamplingFields):
    """The fields of a request.

    With the header `originator`, by which Codex names itself, it may have further fields: each version of Codex sends
    others.
    """

    lenient_with: ClassVar[str | None] = "originator"

    input: Text | Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=LIMITS.messages)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    tools: AnyTools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    service_tier: WantedTier | None = None

    store: bool | None = Field(None, description="Accepted, not used")
    user: Label | None = Field(None, description="Accepted, not used")
    metadata: Metadata | None = Field(None, description="Accepted, not used")
    client_metadata: dict[str, Any] | None = Field(None, description="Accepted, not used")
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
    include: list[Included] | None = Field(
        None, description=f"Only `{_TEXT_LOGPROBS}` has an effect", max_length=len(get_args(Included))
    )
    top_logprobs: Annotated[int, Field(ge=0, le=LIMITS.logprobs)] | None = Field(
        None, description=f"Without effect if `include` has no `{_TEXT_LOGPROBS}`"
    )

    _chat: ChatBody = PrivateAttr()
    _request_tools: RequestTools = PrivateAttr()
    _tools: Raw = PrivateAttr()
    _text: Raw = PrivateAttr()
    _num_echoed_bytes: int = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Translate the request to a chat here, since large bodies are parsed in a thread."""
        self._request_tools = RequestTools(self.tools or ())
        self._chat = _chat(self, self._request_tools)
        asked_tools = [tool.model_dump(exclude_none=True) for tool in self._request_tools.shown]
        asked_text = {} if self.text is None else self.text.model_dump(exclude_none=True, by_alias=True)
        tools = encoded(asked_tools, "tools")
        text = encoded({"format": {"type": "text"}, **asked_text}, "text.format.schema")
        self._tools, self._text, self._num_echoed_bytes = Raw(tools), Raw(text), len(tools) + len(text)

    @property
    def includes_logprobs(self) -> bool:
        """Whether the answer's texts come with the log-probabilities of their tokens."""
        return _TEXT_LOGPROBS in (self.include or ())

    @property
    def chat(self) -> ChatBody:
        """The chat that the request is translated to."""
        return self._chat

    def tool_called(self, function: str) -> CalledTool:
        """Return the tool of the request that a function of the chat stands for."""
        return self._request_tools.called(function)

    @property
    def echoed_tools(self) -> Raw:
        """The tools as the answer repeats them: those that the model is shown."""
        return self._tools

    @property
    def echoed_text(self) -> Raw:
        """The text settings as the answer repeats them."""
        return self._text

    @property
    def echoed_tool_choice(self) -> object:
        """The choice of tools as the answer repeats it."""
        choice = self.tool_choice
        return choice.model_dump(exclude_none=True) if isinstance(choice, NamedToolChoice) else choice or "auto"

    @property
    def num_echoed_bytes(self) -> int:
        return self._num_echoed_bytes


def _chat(body: ResponsesBody, tools: RequestTools) -> ChatBody:
    """Return the chat of a request. Its fields were checked already, and are not checked again."""
    choice: ToolChoice | None = None
    if isinstance(body.tool_choice, NamedToolChoice):
        name = function_name(body.tool_choice.namespace, body.tool_choice.name)
        function = NamedFunction.model_construct(name=name)
        choice = NamedTool.model_construct(type="function", function=function)
    else:
        choice = body.tool_choice
    return ResponsesChat.model_construct(
        **body.shared_fields(),
        messages=list(_messages(body)),
        logprobs=body.includes_logprobs,
        top_logprobs=body.top_logprobs if body.includes_logprobs else None,
        max_completion_tokens=body.max_output_tokens,
        tools=tools.for_chat() or None,
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
    answer: ChatMessage | None = None  # the message to which the calls that follow belong
    thought: str | None = None  # the reasoning of the message that follows
    for item in body.input:
        if isinstance(item, HostedItem):
            continue
        if isinstance(item, ReasoningItem):
            thought = "\n".join(part.text for part in item.content or ()) or None
            if answer is not None:
                yield answer
                answer = None
            continue
        if isinstance(item, FunctionCallInput | CustomCallInput):
            answer = answer or ChatMessage.model_construct(role="assistant", reasoning_content=thought)
            answer.tool_calls = answer.tool_calls or []
            answer.tool_calls.append(_call(item))
            thought = None
            continue
        if answer is not None:
            yield answer
            answer = None
        if isinstance(item, CallOutput):
            yield ChatMessage.model_construct(role="tool", tool_call_id=item.call_id, content=_content(item.output))
        elif item.role == "assistant":
            content = _content(item.content)
            answer = ChatMessage.model_construct(role="assistant", content=content, reasoning_content=thought)
        else:
            yield ChatMessage.model_construct(role=item.role, content=_content(item.content))
        thought = None
    if answer is not None:
        yield answer


def _call(item: FunctionCallInput | CustomCallInput) -> ToolCallMessage:
    name = function_name(item.namespace, item.name)
    function = CalledFunction.model_construct(name=name, arguments=item.arguments)
    return ToolCallMessage.model_construct(id=item.call_id, type="function", function=function)


def _content(value: str | Sequence[InputText | InputFile]) -> str | list[TextPart]:
    if isinstance(value, str):
        return value
    return [TextPart.model_construct(type="text", text=part.text) for part in value]
