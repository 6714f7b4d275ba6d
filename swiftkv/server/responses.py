"""The answers: OpenAI's objects with vLLM's extra fields, as structs that msgspec writes in a microsecond.

A field that is `UNSET` is left out; `None` is written as `null`, which OpenAI's clients expect in places.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from swiftkv.server.batches.objects import FileDeleted, OfflineBatch, OfflineBatchList, StoredFile, StoredFileList
from swiftkv.server.cache_views import CacheCleared, CacheOverview, PinChange, RequestMatch
from swiftkv.server.errors import AnthropicError, ErrorResponse
from swiftkv.server.messages_api.objects import AnthropicModel, AnthropicModelList, MessageObject, TokenCount
from swiftkv.server.named_logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from swiftkv.server.node_views import (
    BudgetChange,
    Health,
    LendingOverview,
    ModelChange,
    ModelFilesList,
    ModelStart,
    NodeOverview,
    NotReady,
    PoolView,
    Readiness,
    Sleeping,
    StorageChange,
    StorageOverview,
    Version,
)
from swiftkv.server.pooling.objects import EmbeddingList, Ranking, ScoreList
from swiftkv.server.responses_api.objects import ResponseObject


class PromptTokensDetails(Struct):
    cached_tokens: int
    cached_tokens_details: dict[str, int] | UnsetType = UNSET
    """The cached tokens by where their KV lay, for requests that ask: local, peer, host, storage."""


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """A completion; a chunk of one when streamed."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    service_tier: str | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET


class FunctionCall(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(Struct):
    """A part of a call: the first has id, type and name, further ones have more of the arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AssistantMessage(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same, under vLLM's newer name."""


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    service_tier: str | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    state: str
    """The state of the model's engine."""
    task: str
    """The kind of request that the model answers: generate, embed or score."""
    object: Literal["model"] = "model"
    owned_by: str = "swiftkv"
    parent: None = None


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    prompt: str


class RenderedPrompt(Struct):
    """A prompt as a model computes it: vLLM's answer without the fields that only its own engines need."""

    request_id: str
    model: str
    token_ids: list[int]


class Load(Struct):
    """The load of a model, in SGLang's words. All figures but `max_running_requests` are 0 before it serves."""

    model: str
    dp_rank: int
    max_running_requests: int
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_uncached_tokens: int = 0
    """Prompt tokens of requests that have no token yet; those that will be found in the cache count, too."""
    num_used_tokens: int = 0
    num_total_tokens: int = 0
    """Tokens in use and prompt tokens that wait."""
    max_total_num_tokens: int = 0
    token_usage: float = 0.0
    gen_throughput: float = 0.0
    """Tokens a second between two requests for loads, the latest that were half a second or more apart."""
    cache_hit_rate: float = 0.0
    utilization: float = 0.0
    """The part of `max_running_requests` that runs."""


class Loads(Struct):
    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[Load]
    """One for each model."""


DOCUMENTED = (
    Completion, ChatCompletion, ResponseObject, MessageObject, TokenCount, ModelCard, ModelList, AnthropicModel,
    AnthropicModelList, Tokenized, Detokenized,
    Health, Readiness, NotReady, Version, ErrorResponse, AnthropicError, LendingOverview, BudgetChange, PoolView,
    NodeOverview, RenderedPrompt, Loads, ModelFilesList, ModelStart, ModelChange, Sleeping, StorageOverview,
    StorageChange, CacheOverview, RequestMatch, CacheCleared, PinChange, StoredFile,
    StoredFileList, FileDeleted, OfflineBatch, OfflineBatchList, EmbeddingList, ScoreList, Ranking,
)  # fmt: skip


def openapi_components() -> dict[str, Any]:
    """Return the schemas of all answers, for the OpenAPI document."""
    _, components = msgspec.json.schema_components(DOCUMENTED, ref_template="#/components/schemas/{name}")
    return dict(components)
