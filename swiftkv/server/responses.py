"""The answers: OpenAI's objects with vLLM's extra fields, as structs that msgspec writes in a microsecond.

A field that is `UNSET` is left out; `None` is written as `null`, which OpenAI's clients expect in places.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from swiftkv.lease.messages import GroupBlocks
from swiftkv.server.batches.objects import FileDeleted, OfflineBatch, OfflineBatchList, StoredFile, StoredFileList
from swiftkv.server.errors import AnthropicError, ErrorResponse
from swiftkv.server.messages_api.objects import MessageObject, TokenCount
from swiftkv.server.responses_api.objects import ResponseObject


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptLogprob(Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry per prompt token, by token id; the first token has none."""


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


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


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


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
    """The same, under the name that vLLM has for it by now."""


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
    """A prompt as a model computes it: vLLM's answer without what its own engines want besides."""

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
    """Tokens a second since the last request for loads that was half a second or more before."""
    cache_hit_rate: float = 0.0
    utilization: float = 0.0
    """The part of `max_running_requests` that runs."""


class Loads(Struct):
    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[Load]
    """One for each model."""


class Health(Struct):
    status: Literal["ok"] = "ok"


class Loading(Struct):
    """The weights that an engine has loaded, of all that it needs."""

    loaded_bytes: int
    total_bytes: int
    left_s: float | None
    """Seconds that the rest is expected to take; null: nothing can be said yet."""


class EngineView(Struct):
    state: str
    why: str | None
    """The reason for the state; null for an engine that is ready."""
    since_s: float
    """Seconds since the engine entered the state."""
    in_flight: int
    """Sequences that wait or run."""
    progress_age_s: float | None
    """Seconds since its step loop last showed progress; null: there is no engine that could."""
    restarts: int
    """Number of restarts since the node came up."""
    pid: int | None
    storage: Literal["ok", "degraded"] | None = None
    """The state of the storage tier, which is degraded while it is left alone; null: there is none."""
    loading: Loading | None = None
    """The progress of an engine that loads its weights; null for any other."""


class Readiness(Struct):
    status: Literal["ready"]
    models: dict[str, str]
    """Engine states by model."""
    engines: dict[str, EngineView]


class NotReady(ErrorResponse):
    models: dict[str, str]
    engines: dict[str, EngineView]


class Version(Struct):
    version: str


class LinkView(Struct):
    """One KV group of a lender paired with one of a borrower, as one of the two sees it."""

    lender: str
    lender_group: int
    borrower: str
    borrower_group: int
    peer_state: str
    heard_s_ago: float | None
    """Seconds since the last message of the peer; null: it is not there."""
    extent_bytes: int
    meu_w: int
    meu_m: int
    num_extents: int
    extents: dict[str, int]
    """Number of extents by state."""
    lent_bytes: int
    no_offer_s: float | None
    """Seconds for which the lender will offer nothing, because its own requests needed blocks; null: it may offer."""


class ModelLending(Struct):
    """A model's part in lending. `error` says why its coordinator is silent; the fields it would fill are null."""

    model: str
    role: str
    state: str
    error: str | None
    pool_bytes: int
    budget_bytes: int | None
    lent_bytes: int | None
    borrowed_bytes: int | None
    borrowed_blocks: dict[str, int] | None
    """Number of the model's blocks in borrowed memory, by state: free, used, cached, in_flight."""
    recalls: dict[str, int] | None
    """Number of recalls since the engine started, by reason."""
    groups: list[GroupBlocks] | None
    """The blocks of its pool by state, for each of its KV groups."""
    lends: list[LinkView]
    borrows: list[LinkView]


class LendingOverview(Struct):
    enabled: bool
    transport: str
    models: list[ModelLending]


class ModelStart(Struct):
    """A model that is started because somebody asked; `state` is that of its engine."""

    model: str
    state: str


class ModelChange(Struct):
    """A model that was put to sleep, woken, added or removed; `state` is that of its engine now, or `removed`."""

    model: str
    state: str
    took_s: float


class Sleeping(Struct):
    """vLLM's answer to the question whether a model sleeps."""

    is_sleeping: bool


class BudgetChange(Struct):
    """The outcome of a change: `recalled_bytes` came home within `took_s` seconds, or would in a dry run."""

    model: str
    dry_run: bool
    budget_bytes: int
    lent_bytes: int
    recalled_bytes: int
    took_s: float


class ExtentView(Struct):
    """An extent; `owner` is the model that may write to it now."""

    extent: int
    state: str
    owner: str
    epoch: int


class LinkExtents(Struct):
    """Every extent of a link, in the order in which they lie in the lender's pool."""

    lender: str
    lender_group: int
    borrower: str
    borrower_group: int
    extents: list[ExtentView]


class PoolView(Struct):
    model: str
    pool_bytes: int
    budget_bytes: int | None
    groups: list[GroupBlocks]
    lends: list[LinkExtents]
    borrows: list[LinkExtents]


class Latency(Struct):
    """Waits of clients since the node came up: the difference of two views is of the time between them."""

    count: int = 0
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds


class Figures(Struct):
    """An engine's figures as it last reported them. Totals are since it started; blocks are of all KV groups."""

    running: int
    waiting: int
    blocks: dict[str, int]
    """Number of blocks by state: free, used by running requests, cached for those to come."""
    prompt_tokens_total: int
    """Prompt tokens that were computed."""
    generation_tokens_total: int
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: dict[str, int]
    """Prompt tokens that were not computed, by where their KV lay: local, peer, storage."""
    preemptions_total: int


class ModelOverview(Struct):
    model: str
    max_model_len: int
    engine: EngineView
    figures: Figures | None
    """Null until the engine has reported any."""
    first_token: Latency
    """From a request's arrival to its first token."""
    between_tokens: Latency
    lending: ModelLending


class NodeOverview(Struct):
    version: str
    time_s: float
    """By a clock of the node's own: differences of two views are seconds."""
    lending_enabled: bool
    transport: str
    models: list[ModelOverview]


DOCUMENTED = (
    Completion, ChatCompletion, ResponseObject, MessageObject, TokenCount, ModelCard, ModelList, Tokenized, Detokenized,
    Health, Readiness, NotReady, Version, ErrorResponse, AnthropicError, LendingOverview, BudgetChange, PoolView,
    NodeOverview, RenderedPrompt, Loads, ModelStart, ModelChange, Sleeping, StoredFile,
    StoredFileList, FileDeleted, OfflineBatch, OfflineBatchList,
)  # fmt: skip


def openapi_components() -> dict[str, Any]:
    """The schemas of all answers, for the OpenAPI document."""
    _, components = msgspec.json.schema_components(DOCUMENTED, ref_template="#/components/schemas/{name}")
    return dict(components)
