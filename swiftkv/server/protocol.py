"""The requests that clients may send: OpenAI's fields, vLLM's extra ones, and a cap on everything that costs.

Types are strict (`"1"` is not a number) so that the OpenAPI document says exactly what is taken. A field that is not
supported is refused by name, unless its value asks for nothing (`tools: []`, `best_of: 1`, `null`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, PlainValidator, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from swiftkv.model_config import BUDGET_FORMS
from swiftkv.server.errors import ApiError
from swiftkv.server.fields import (
    FIELD_NAMES,
    INT32_MAX,
    TEXT_ONLY,
    AtMost,
    Body,
    CacheControl,
    Label,
    OnlyKinds,
    Text,
    Unsupported,
)
from swiftkv.server.parameters import SHOWN_CHARS
from swiftkv.server.price import LIMITS
from swiftkv.server.structured import StructuredFields
from swiftkv.server.templating import ReasoningEffort, TemplateFields, Verbosity
from swiftkv.server.tiers import WantedTier
from swiftkv.server.tools import ToolCallMessages, ToolFields
from swiftkv.server.truncation import TruncationFields
from swiftkv.units import DURATION_PATTERN, Budget, parse_budget

MAX_TEMPERATURE = 100  # beyond it all tokens are equally likely, and far beyond it float32 overflows
INT64_MAX = 2**63 - 1

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
# A list of a million wrong items must not make a million errors.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=LIMITS.token_ids)]
StopString = Annotated[str, Field(min_length=1, max_length=LIMITS.stop_chars)]
StopList = Annotated[list[StopString], Field(fail_fast=True, max_length=LIMITS.stops)]
Switch = Literal["true", "false"]  # values in a query, where pydantic would take 1, yes and t as well
TokenIdKey = Annotated[str, Field(pattern="^[0-9]{1,9}$")]

AllowedTokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=LIMITS.allowed_token_ids)]
BadWord = Annotated[str, Field(pattern=r"\S", max_length=LIMITS.bad_word_chars)]
BadWords = Annotated[list[BadWord], Field(fail_fast=True, max_length=LIMITS.bad_words)]
LogitBias = Annotated[
    dict[TokenIdKey, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=LIMITS.logit_bias),
    BeforeValidator(AtMost(LIMITS.logit_bias)),
]
Metadata = Annotated[dict[Label, Label], Field(max_length=LIMITS.metadata), BeforeValidator(AtMost(LIMITS.metadata))]
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00]+$")]
"""A client's salt. A NUL ends what the node itself writes into a salt, for its tenants."""
CacheRetention = Literal["in_memory", "24h"]
RETENTION = "With `24h` and storage the prompt is stored when the request ends, even if `write_policy` would wait"


class ModelBody(Body):
    model: Annotated[str, Field(max_length=256, description="May be left out where there is one model")] | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[None, Unsupported(False)] = None


class SamplingFields(ModelBody):
    """The fields that every request for an answer may have, whatever protocol it speaks."""

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = Field(None, description="`-1`: no seed")
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stream: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    return_cached_tokens_details: bool | None = Field(
        None, description="Whether `usage` says in which tiers cached tokens were found"
    )

    def shared_fields(self) -> dict[str, Any]:
        """Return the values of these fields by name, for a request of another protocol."""
        return {name: getattr(self, name) for name in SamplingFields.model_fields}


class GenerationBody(SamplingFields, StructuredFields, TruncationFields):
    """The fields that completions and chat completions have in common."""

    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = Field(
        None, description="No stop token and no end of sequence (not even an ignored one) comes before this many tokens"
    )
    n: Annotated[int, Field(ge=1, le=LIMITS.choices)] | None = None
    stop: StopString | StopList | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=LIMITS.stop_token_ids)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokenIds | None = Field(
        None,
        description=(
            "The only tokens that may be drawn: without the end of sequence among them, the answer cannot end with it. "
            "Not with a structured output"
        ),
    )
    bad_words: BadWords | None = Field(
        None, description="Texts that the answer must not contain, with or without a space before them"
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=LIMITS.logprobs)] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="Logprobs write their tokens as `token_id:7`")
    include_stop_str_in_output: bool | None = Field(
        None, description="The text includes the stop string or stop token that ended it"
    )
    service_tier: WantedTier | None = None

    user: Label | None = Field(None, description="Accepted, not used")
    store: bool | None = Field(None, description="Accepted, not used")
    metadata: Metadata | None = Field(None, description="Accepted, not used")
    safety_identifier: Label | None = Field(None, description="Accepted, not used")
    prompt_cache_key: Label | None = Field(None, description="Accepted, not used")
    prompt_cache_retention: CacheRetention | None = Field(None, description=RETENTION)
    # vLLM's, which some of its clients send with the value that asks for nothing.
    early_stopping: Annotated[None, Unsupported(False)] = None
    kv_transfer_params: Annotated[None, Unsupported()] = None
    length_penalty: Annotated[None, Unsupported(1, 1.0)] = None
    spaces_between_special_tokens: Annotated[None, Unsupported(True)] = None
    use_beam_search: Annotated[None, Unsupported(False)] = None
    vllm_xargs: Annotated[None, Unsupported({})] = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "one_text"
    if not isinstance(value, list) or not value:
        return None
    if isinstance(value[0], str):
        return "texts"
    return "token_id_lists" if isinstance(value[0], list) else "token_ids"


PROMPT_KINDS = Discriminator(
    _prompt_kind,
    custom_error_type="prompt_type",
    custom_error_message="must be a string, a list of token ids, or a list of either, and not empty",
)
Prompt = Annotated[
    Annotated[Text, Tag("one_text")]
    | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=LIMITS.prompts), Tag("texts")]
    | Annotated[TokenIds, Field(min_length=1), Tag("token_ids")]
    | Annotated[
        list[Annotated[TokenIds, Field(min_length=1)]],
        Field(fail_fast=True, min_length=1, max_length=LIMITS.prompts),
        Tag("token_id_lists"),
    ],
    PROMPT_KINDS,
]


def each_prompt(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Return one prompt or many as a list."""
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return cast("list[str | list[int]]", [prompt] if is_one else prompt)


class CompletionBody(GenerationBody):
    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX, description="0 only with echo")] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=LIMITS.logprobs)] | None = None
    add_special_tokens: bool | None = None
    suffix: Annotated[None, Unsupported("")] = None
    best_of: Annotated[None, Unsupported(1)] = None
    prompt_embeds: Annotated[None, Unsupported()] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or many, as a list."""
        return each_prompt(self.prompt)


class TextPart(Body):
    type: Annotated[Literal["text"], BeforeValidator(OnlyKinds("text", because=TEXT_ONLY))]
    text: Text
    cache_control: CacheControl = None


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=LIMITS.content_parts)] | None = Field(
        None, description="Required unless there are `tool_calls` or `reasoning_content`"
    )
    name: Label | None = None
    refusal: Annotated[None, Unsupported("")] = None
    audio: Annotated[None, Unsupported()] = None
    annotations: Annotated[None, Unsupported([])] = None
    function_call: Annotated[None, Unsupported()] = None
    tool_calls: ToolCallMessages | None = None
    tool_call_id: Label | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = Field(None, description="The same as `reasoning_content`, over which it takes precedence")
    # OpenAI's client adds it to answers to `parse`, which come back with the conversation.
    parsed: Any = Field(None, description="Accepted, not used")
    # LiteLLM and OpenRouter add these to answers, with reasoning that the fields above have already.
    provider_specific_fields: Any = Field(None, description="Accepted, not used")
    reasoning_details: Any = Field(None, description="Accepted, not used")
    thinking_blocks: Any = Field(None, description="Accepted, not used")
    cache_control: CacheControl = None

    @property
    def says_something(self) -> bool:
        """Whether there is content, or an assistant's message has something in its place."""
        return self.content is not None or (
            self.role == "assistant" and bool(self.tool_calls or self.reasoning_content or self.reasoning)
        )

    @property
    def num_parts(self) -> int:
        return len(self.content) if isinstance(self.content, list) else 1

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it: one string of content, calls whose arguments are objects."""
        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if reasoning := self.reasoning or self.reasoning_content:
            message["reasoning_content"] = message["thinking"] = reasoning  # gpt-oss has the second name for it
        return message


class Prediction(Body):
    """The text that OpenAI's client expects in the answer, which speeds it up there and never changes it."""

    type: Literal["content"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=LIMITS.content_parts)]


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=LIMITS.messages)]


class ChatBody(GenerationBody, ToolFields, TemplateFields):
    must_fit: ClassVar[bool] = True
    """Whether a `max_tokens` beyond the room in the context is refused. If not, the answer ends where the room does."""
    logprobs_of_text: ClassVar[bool] = False
    """Whether log-probabilities are shown of the text's tokens alone, and not of reasoning and calls."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LIMITS.logprobs)] | None = None
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="Without effect where the chat template does not take it"
    )
    verbosity: Verbosity | None = Field(None, description="Accepted, not used")
    include_reasoning: bool | None = Field(None, description="`false`: the answer leaves out its reasoning")
    thinking_token_budget: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = Field(
        None, description="The reasoning is ended after this many tokens; `-1`: no limit"
    )
    prediction: Prediction | None = Field(None, description="Accepted, not used")

    functions: Annotated[None, Unsupported([])] = None
    function_call: Annotated[None, Unsupported("none", "auto")] = None
    modalities: Annotated[None, Unsupported(["text"])] = None
    audio: Annotated[None, Unsupported()] = None
    web_search_options: Annotated[None, Unsupported()] = None
    add_special_tokens: Annotated[None, Unsupported(False)] = None
    documents: Annotated[None, Unsupported([])] = None
    echo: Annotated[None, Unsupported(False)] = None


class PromptBody(ModelBody, TemplateFields, ToolFields):
    """A prompt, or messages and the tools beside them."""

    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="`true` only with `prompt`")


class TokenizeBody(PromptBody):
    """vLLM's `/tokenize`."""

    return_token_strs: bool | None = None


class PinBody(PromptBody):
    """A prompt that is to stay in the pool."""

    cache_salt: CacheSalt | None = None


class DetokenizeBody(ModelBody):
    tokens: TokenIds


def _read_budget(value: object) -> Budget:
    try:
        return parse_budget(value)
    except ValueError:
        raise PydanticCustomError("budget", "must be {forms}", {"forms": BUDGET_FORMS}) from None


class BudgetBody(Body):
    """The most that a worker may lend from now on."""

    budget: Annotated[
        Budget,
        PlainValidator(_read_budget),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string", "pattern": r"^[0-9]{1,15}([KMGTPE]iB|B)$"},
                    {"type": "string", "pattern": r"^(100|[0-9]{1,2}(\.[0-9]{1,4})?)%$"},
                    {"type": "integer", "enum": [0]},
                ],
                "description": BUDGET_FORMS[0].upper() + BUDGET_FORMS[1:],
                "examples": ["128MiB", "50%", 0],
            }
        ),
    ]


class ModelSection(Body):
    """A model's section of the node's file; what it may hold is in docs/configuration.md."""

    model_config = ConfigDict(extra="allow")


class StorageSection(Body):
    """A `tiers.storage` section of the node's file; what it may hold is in docs/tiers.md."""

    model_config = ConfigDict(extra="allow")


class BatchBody(Body):
    """A batch that is to be run."""

    input_file_id: Label
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: Annotated[None, Unsupported()] = None


def explain_invalid(errors: Sequence[Any]) -> ApiError:
    """Return what pydantic found wrong with a body or a parameter, as one error about one field."""
    # If a field takes several types, the error that got furthest into the value is shown, and among equals the one
    # about a value of the right type.
    # One that is not supported may have been sent in place of one that is missing.
    refused = [e for e in errors if e["type"] in ("extra_forbidden", "unsupported_field")]
    first = refused[0] if refused and errors[0]["type"] == "missing" else errors[0]
    first_field = first["loc"][:2]
    candidates = (e for e in errors if e["loc"][:2] == first_field)
    error = max(candidates, key=lambda e: (len(e["loc"]), not e["type"].endswith("_type")))
    kind, text = error["type"], error["msg"]
    place, *location = error["loc"]
    if place != "body" and location:
        is_duration = error.get("ctx", {}).get("pattern") == DURATION_PATTERN
        wanted = "write a duration such as 90s, 30m or 24h" if is_duration else text
        return ApiError(400, f"field '{location[0]}': {wanted}", param=str(location[0]))
    if not location and kind == "too_many_entries":
        return ApiError(400, f"the body {text}", code="limit_exceeded")
    if not location:
        return ApiError(400, f"the body must be a JSON object, with 'Content-Type: application/json' ({text})")
    # pydantic puts the names of union members between those of the fields.
    named = [str(part) for part in location[:-1] if isinstance(part, int) or part in FIELD_NAMES]
    if kind in ("extra_forbidden", "missing") or isinstance(location[-1], int) or location[-1] in FIELD_NAMES:
        named.append(str(location[-1])[:SHOWN_CHARS])
    if kind == "unknown_kind":
        key, kinds, because = (error["ctx"][name] for name in ("key", "kinds", "because"))
        if isinstance(sent := error["input"], dict):  # the error is one of the object, and not of what its key holds
            sent = sent.get(key)
            named += [key] if isinstance(sent, str) else []
        if isinstance(sent, str) and named[-1] == key:
            reason = f": {because}" if because else ""
            text = f"'{sent[:SHOWN_CHARS]}' is not supported{reason}; {key}s here: {kinds}"
    field = ".".join(named)
    if kind in ("extra_forbidden", "unsupported_field"):
        return ApiError(400, f"field '{field}' is not supported", param=field, code="unsupported_field")
    if kind == "missing":
        return ApiError(400, f"field '{field}' is required", param=field, code="missing_field")
    return ApiError(400, f"field '{field}': {text}", param=field)
