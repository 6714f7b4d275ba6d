"""The requests that `/v1/messages` and its `count_tokens` take, and their translation to a chat.

It is one file of more than 400 lines, so that each part of a message stands beside its translation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, Tag

from swiftkv.server.fields import (
    INT32_MAX,
    NO_SERVER_TOOLS,
    TEXT_ONLY,
    UNSEEN,
    Body,
    CacheControl,
    Label,
    OnlyKinds,
    Text,
    Unsupported,
    told_by,
)
from swiftkv.server.price import LIMITS
from swiftkv.server.protocol import ChatBody, ChatMessage, ModelBody, SamplingFields, StopList, TextPart
from swiftkv.server.structured import JsonSchema, JsonSchemaFormat, ResponseFormat, encoded
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
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "continue_final_message": "messages",
}
"""The names that a chat's fields have here, for errors that are found in the chat."""

_ATTRIBUTION = "x-anthropic-billing-header:"
"""The name of the line with which Claude Code's prompts begin. Its value differs from request to request, so a prompt
with it would never be found in the cache."""

ServerBlockType = Literal[
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
]


class CachedPart(Body):
    cache_control: CacheControl = None


class TextBlockParam(CachedPart):
    type: Literal["text"]
    text: Text
    citations: list[Any] | None = Field(None, description="Accepted, not used", max_length=LIMITS.content_parts)


Texts = Annotated[list[TextBlockParam], Field(fail_fast=True, max_length=LIMITS.content_parts)]


class ToolUseParam(CachedPart):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: Label
    name: FunctionName
    input: dict[str, Any]
    caller: dict[str, Any] | None = Field(None, description="Accepted, not used")
    toolset_name: Label | None = Field(None, description="Accepted, not used")


class FileParam(CachedPart):
    """A picture or document that a tool returned. The model sees plain text, and a note in place of anything else."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["image", "document"]
    source: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        source = self.source or {}
        text = source.get("data") if source.get("type") == "text" else None
        return text if isinstance(text, str) else UNSEEN.format(self.type)


class ToolReferenceParam(CachedPart):
    """A tool that a search for tools found. The prompt has all tools of a request from the beginning."""

    type: Literal["tool_reference"]
    tool_name: FunctionName

    @property
    def text(self) -> str:
        return f"The tool {self.tool_name} can be called."


ResultBlock = Annotated[
    Annotated[TextBlockParam, Tag("text block")]
    | Annotated[FileParam, Tag("file block")]
    | Annotated[ToolReferenceParam, Tag("tool_reference block")],
    told_by(
        "type",
        {
            "text": "text block",
            "image": "file block",
            "document": "file block",
            "tool_reference": "tool_reference block",
        },
    ),
]
ResultBlocks = Annotated[list[ResultBlock], Field(fail_fast=True, max_length=LIMITS.content_parts)]


class ToolResultParam(CachedPart):
    type: Literal["tool_result"]
    tool_use_id: Label
    content: Text | ResultBlocks | None = None
    is_error: bool | None = Field(None, description="Accepted, not used")


class ThinkingParam(Body):
    """Reasoning of an earlier answer; the chat template decides what of it the model sees."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = Field(None, description="Accepted, not used")


class RedactedThinkingParam(Body):
    type: Literal["redacted_thinking"]
    data: Text


class ServerBlockParam(Body):
    """A part of another server's answer, about a tool that this server ran itself. The model is not shown it."""

    model_config = ConfigDict(extra="ignore")

    type: ServerBlockType


class ChangedTool(Body):
    type: Literal["tool_reference"]
    name: FunctionName


class ToolChangeParam(CachedPart):
    """A tool that may be called from here on, or no longer."""

    type: Literal["tool_addition", "tool_removal"]
    tool: ChangedTool

    @property
    def text(self) -> str:
        can = "can be called from here on" if self.type == "tool_addition" else "cannot be called any more"
        return f"The tool {self.tool.name} {can}."


SystemBlock = Annotated[
    Annotated[TextBlockParam, Tag("text block")] | Annotated[ToolChangeParam, Tag("tool change")],
    told_by("type", {"text": "text block", "tool_addition": "tool change", "tool_removal": "tool change"}),
]
UserBlock = Annotated[
    Annotated[TextBlockParam, Tag("text block")] | Annotated[ToolResultParam, Tag("tool_result block")],
    told_by("type", {"text": "text block", "tool_result": "tool_result block"}, because=TEXT_ONLY),
]
AssistantBlock = Annotated[
    Annotated[TextBlockParam, Tag("text block")]
    | Annotated[ToolUseParam, Tag("tool_use block")]
    | Annotated[ThinkingParam, Tag("thinking block")]
    | Annotated[RedactedThinkingParam, Tag("redacted_thinking block")]
    | Annotated[ServerBlockParam, Tag("block of another server")],
    told_by(
        "type",
        {kind: f"{kind} block" for kind in ("text", "tool_use", "thinking", "redacted_thinking")}
        | dict.fromkeys(get_args(ServerBlockType), "block of another server"),
    ),
]


class UserMessage(Body):
    role: Literal["user"]
    content: Text | Annotated[list[UserBlock], Field(fail_fast=True, max_length=LIMITS.content_parts)]


class AnsweredMessage(Body):
    """A message of the assistant's."""

    role: Literal["assistant"]
    content: Text | Annotated[list[AssistantBlock], Field(fail_fast=True, max_length=LIMITS.content_parts)]


class SystemMessage(Body):
    """An instruction that a program adds in the middle of a conversation."""

    role: Literal["system"]
    content: Text | Annotated[list[SystemBlock], Field(fail_fast=True, max_length=LIMITS.content_parts)]


Message = Annotated[
    Annotated[UserMessage, Tag("user message")]
    | Annotated[AnsweredMessage, Tag("assistant message")]
    | Annotated[SystemMessage, Tag("system message")],
    told_by("role", {role: f"{role} message" for role in ("user", "assistant", "system")}),
]


class ClientTool(CachedPart):
    # The first field, so that a tool of another type is refused for its type, and not for the fields that it lacks.
    type: Annotated[Literal["custom"] | None, BeforeValidator(OnlyKinds("custom", because=NO_SERVER_TOOLS))] = None
    name: FunctionName
    input_schema: dict[str, Any]
    description: Text | None = None
    strict: bool | None = Field(None, description="Accepted, not used")
    eager_input_streaming: bool | None = Field(None, description="Accepted, not used")
    defer_loading: bool | None = Field(None, description="Accepted, not used")
    allowed_callers: list[Label] | None = Field(None, description="Accepted, not used", max_length=LIMITS.tools)
    input_examples: Annotated[None, Unsupported([])] = None

    def for_chat(self) -> Tool:
        function = FunctionDefinition.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema
        )
        return Tool.model_construct(type="function", function=function)


class ToolChoiceParam(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(Body):
    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


ToolChoiceOf = Annotated[
    Annotated[ToolChoiceParam, Tag("general choice")] | Annotated[NamedToolChoice, Tag("choice by name")],
    told_by("type", {**dict.fromkeys(("auto", "any", "none"), "general choice"), "tool": "choice by name"}),
]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[JsonSchema, Field(alias="schema")]


class OutputConfig(Body):
    format: SchemaFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Without effect where the chat template does not take it"
    )


class ThinkingSettings(Body):
    """Whether the model shall think, if its chat template leaves the choice."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(
        None, description="The reasoning is ended after this many tokens, if the model ends it with a tag"
    )
    display: Literal["summarized", "omitted"] | None = Field(None, description="Accepted, not used")


class MessageMetadata(Body):
    model_config = ConfigDict(extra="ignore")

    user_id: Label | None = Field(None, description="Accepted, not used")


class MessagesChat(ChatBody):
    """The chat that a request is translated to.

    Clients of this API send the same limits to every model. So a limit is not refused for being too high, nor because
    the model's reasoning cannot be ended.
    """

    must_fit: ClassVar[bool] = False


class CountTokensBody(ModelBody):
    """The fields that make the prompt.

    With the header `anthropic-beta` a request may have more fields than these: programs that follow Anthropic's betas
    send new ones every few weeks.
    """

    lenient_with: ClassVar[str | None] = "anthropic-beta"

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=LIMITS.messages)]
    system: Text | Texts | None = None
    tools: Annotated[list[ClientTool], Field(fail_fast=True, max_length=LIMITS.tools)] | None = None
    tool_choice: ToolChoiceOf | None = None
    output_config: OutputConfig | None = None
    thinking: ThinkingSettings | None = None
    cache_control: CacheControl = None
    context_management: dict[str, Any] | None = Field(None, description="Accepted, not used")

    _chat: ChatBody = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Translate the request to a chat here, since large bodies are parsed in a thread."""
        self._chat = MessagesChat.model_construct(**self._chat_fields())

    @property
    def chat(self) -> ChatBody:
        """The chat that the request is translated to. Its fields were checked already, and are not checked again."""
        return self._chat

    def _chat_fields(self) -> dict[str, Any]:
        choice, config, thinking = self.tool_choice, self.output_config, self.thinking
        return {
            "model": self.model,
            "messages": list(_messages(self.system, self.messages)),
            "tools": None if self.tools is None else [tool.for_chat() for tool in self.tools],
            "tool_choice": None if choice is None else _tool_choice(choice),
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "response_format": None if config is None else _response_format(config),
            "reasoning_effort": None if config is None else config.effort,
            "thinking_token_budget": None if thinking is None else thinking.budget_tokens,
            "chat_template_kwargs": None if thinking is None else {"enable_thinking": thinking.type != "disabled"},
            "continue_final_message": self.messages[-1].role == "assistant",
        }


class MessagesBody(CountTokensBody, SamplingFields):
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    stop_sequences: StopList | None = None
    metadata: MessageMetadata | None = Field(None, description="Accepted, not used")
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="Accepted, not used")
    inference_geo: Label | None = Field(None, description="Accepted, not used")
    container: Annotated[None, Unsupported()] = None
    mcp_servers: Annotated[None, Unsupported([])] = None

    def _chat_fields(self) -> dict[str, Any]:
        own = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        return super()._chat_fields() | self.shared_fields() | own


def _tool_choice(choice: ToolChoiceParam | NamedToolChoice) -> ToolChoice:
    if isinstance(choice, NamedToolChoice):
        function = NamedFunction.model_construct(name=choice.name)
        return NamedTool.model_construct(type="function", function=function)
    return "required" if choice.type == "any" else choice.type


def _response_format(config: OutputConfig) -> ResponseFormat | None:
    if config.format is None:
        return None
    schema = JsonSchemaFormat.model_construct(name="answer", schema_=config.format.schema_)
    return ResponseFormat.model_construct(type="json_schema", json_schema=schema)


def _messages(
    system: str | Sequence[TextBlockParam] | None, messages: Sequence[UserMessage | AnsweredMessage | SystemMessage]
) -> Iterator[ChatMessage]:
    if shown := _system_prompt(system or ""):
        yield ChatMessage.model_construct(role="system", content=shown)
    for message in messages:
        if isinstance(message.content, str):
            yield ChatMessage.model_construct(role=message.role, content=message.content)
        elif isinstance(message, UserMessage):
            yield from _of_user(message.content)
        elif isinstance(message, SystemMessage):
            yield ChatMessage.model_construct(role="system", content=_texts(message.content))
        else:
            yield _of_assistant(message.content)


def _system_prompt(system: str | Sequence[TextBlockParam]) -> str | list[TextPart]:
    """Return a system prompt without the line that changes from request to request."""
    if isinstance(system, str):
        return _without_attribution(system)
    texts = [_without_attribution(block.text) for block in system]
    return [TextPart.model_construct(type="text", text=text) for text in texts if text]


def _without_attribution(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_ATTRIBUTION) else text


def _of_user(blocks: Sequence[TextBlockParam | ToolResultParam]) -> Iterator[ChatMessage]:
    """Yield a message for each result of a tool, and one for the texts between them."""
    texts: list[TextBlockParam] = []
    for block in blocks:
        if isinstance(block, TextBlockParam):
            texts.append(block)
            continue
        if texts:
            yield ChatMessage.model_construct(role="user", content=_texts(texts))
            texts = []
        result = "" if block.content is None else _texts(block.content)
        yield ChatMessage.model_construct(role="tool", tool_call_id=block.tool_use_id, content=result)
    if texts or not blocks:
        yield ChatMessage.model_construct(role="user", content=_texts(texts))


def _of_assistant(
    blocks: Sequence[TextBlockParam | ToolUseParam | ThinkingParam | RedactedThinkingParam | ServerBlockParam],
) -> ChatMessage:
    """Return an answer as one message."""
    thoughts = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingParam))
    texts = [block for block in blocks if isinstance(block, TextBlockParam)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseParam)]
    return ChatMessage.model_construct(
        role="assistant", content=_texts(texts), tool_calls=calls or None, reasoning_content=thoughts or None
    )


def _call(block: ToolUseParam) -> ToolCallMessage:
    function = CalledFunction.model_construct(name=block.name, arguments=encoded(block.input, "messages"))
    return ToolCallMessage.model_construct(id=block.id, type="function", function=function)


def _texts(
    value: str | Sequence[TextBlockParam | FileParam | ToolReferenceParam | ToolChangeParam],
) -> str | list[TextPart]:
    if isinstance(value, str):
        return value
    return [TextPart.model_construct(type="text", text=block.text) for block in value]
