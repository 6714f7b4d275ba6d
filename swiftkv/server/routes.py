"""OpenAI's routes and vLLM's beside them, for the models of one port."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from swiftkv.server.answer import Answer, ChatAnswer, CompletionAnswer, Prompt, make_choices
from swiftkv.server.body import body_document, parsed
from swiftkv.server.choices import Choice
from swiftkv.server.errors import ApiError
from swiftkv.server.generation import SequenceRequest
from swiftkv.server.models import ModelHandle, ModelTable
from swiftkv.server.price import check_detokenize, check_messages, check_stops, check_tokenize, max_tokenize_chars
from swiftkv.server.protocol import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from swiftkv.server.request_log import RequestRecord
from swiftkv.server.responses import Detokenized, ModelList, Tokenized
from swiftkv.server.sampling import sequence_requests
from swiftkv.server.streaming import json_response, streamed_answer, unless_gone, whole_answer
from swiftkv.server.targets import target_ttft_s
from swiftkv.server.tiers import priority_in, tier_of

T = TypeVar("T")

_SERVER_SENT_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def documented(
    schema: str, *error_statuses: int, stream: bool = False, ok: int = 200
) -> dict[int | str, dict[str, Any]]:
    """A route's answers for the OpenAPI document; `ok` is the status of success."""
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    if stream:
        content = {**content, "text/event-stream": {"schema": _SERVER_SENT_EVENT}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
    return {
        ok: {"description": "OK", "content": content},
        **{status: {"description": "Error", "content": error} for status in error_statuses},
    }


GENERATION_ERRORS = (400, 404, 413, 429, 503)
BODY_ERRORS = (400, 404, 413, 429)


def openai_router(models: ModelTable) -> APIRouter:
    """Routes that find their model by the path parameter ``name``, if mounted under one, or by the body's ``model``."""
    router = APIRouter()

    def pick(request: Request, in_body: str | None) -> ModelHandle:
        return models.pick(request.path_params.get("name"), in_body)

    @router.get("/v1/models", responses=documented("ModelList", 404))
    async def list_models(request: Request) -> Response:
        name = request.path_params.get("name")
        listed = models.all() if name is None else [models.get(name)]
        return json_response(ModelList([model.card() for model in listed]))

    @router.get("/v1/models/{model_id:path}", responses=documented("ModelCard", 404))
    async def retrieve_model(request: Request, model_id: str) -> Response:
        if "name" in request.path_params:
            return json_response(pick(request, model_id).card())
        return json_response(models.get(model_id).card())

    @router.post(
        "/v1/completions",
        responses=documented("Completion", *GENERATION_ERRORS, stream=True),
        openapi_extra=body_document(CompletionBody),
    )
    async def complete(request: Request, body: Annotated[CompletionBody, parsed(CompletionBody)]) -> Response:
        model = pick(request, body.model)
        return await _generate(request, model, body, lambda: _completion_prompts(model, body))

    @router.post(
        "/v1/chat/completions",
        responses=documented("ChatCompletion", *GENERATION_ERRORS, stream=True),
        openapi_extra=body_document(ChatBody),
    )
    async def chat(request: Request, body: Annotated[ChatBody, parsed(ChatBody)]) -> Response:
        model = pick(request, body.model)
        return await _generate(request, model, body, lambda: [_chat_prompt(model, body)])

    @router.post(
        "/tokenize", responses=documented("Tokenized", *BODY_ERRORS), openapi_extra=body_document(TokenizeBody)
    )
    async def tokenize(request: Request, body: Annotated[TokenizeBody, parsed(TokenizeBody)]) -> Response:
        model = pick(request, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either field 'prompt' or field 'messages'", param="prompt")
        return await _in_threads(request, model, lambda: json_response(_tokenized(model, body)))

    @router.post(
        "/detokenize", responses=documented("Detokenized", *BODY_ERRORS), openapi_extra=body_document(DetokenizeBody)
    )
    async def detokenize(request: Request, body: Annotated[DetokenizeBody, parsed(DetokenizeBody)]) -> Response:
        model = pick(request, body.model)
        check_detokenize(len(body.tokens), model.max_model_len)
        return await _in_threads(request, model, lambda: json_response(_detokenized(model, body)))

    return router


async def _in_threads(request: Request, model: ModelHandle, work: Callable[[], T]) -> T:
    """Do `work` in the model's threads, unless the client hangs up before it has begun."""
    return await unless_gone(request, model.threads.run(work, request.state.num_body_bytes))


async def _generate(
    request: Request, model: ModelHandle, body: CompletionBody | ChatBody, read_prompts: Callable[[], list[Prompt]]
) -> Response:
    record: RequestRecord = request.state.record
    record.model = model.name
    model.client.check_available()
    _check_policy(model, body)
    check_stops(body.stops)
    wanted_s = target_ttft_s(request.headers)

    def prepare() -> tuple[list[Prompt], list[SequenceRequest], list[Choice]]:
        prompts = read_prompts()
        sequences = sequence_requests(model, body, [prompt.token_ids for prompt in prompts])
        return prompts, sequences, make_choices(model, body, prompts)

    prompts, sequences, choices = await _in_threads(request, model, prepare)
    generation = model.client.generate(
        sequences,
        cache_salt=body.cache_salt or "",
        priority=priority_in(tier_of(body.service_tier, model.policy.allow_priority), body.priority or 0),
        target_ttft_s=wanted_s if model.policy.allow_priority else None,
    )
    record.finished = generation.finished
    model.client.metrics.request_n.observe(body.n or 1)
    answer: Answer
    if isinstance(body, ChatBody):
        answer = ChatAnswer(model, body, prompts, choices, generation)
    else:
        answer = CompletionAnswer(model, body, prompts, choices, generation)
    if body.stream:
        return await streamed_answer(request, answer)
    return await whole_answer(request, answer)


def _check_policy(model: ModelHandle, body: GenerationBody) -> None:
    if body.priority and not model.policy.allow_priority:
        raise ApiError(
            400,
            "field 'priority' is off on this node, so that nobody goes before others: leave it out, or set "
            "node.allow_priority",
            param="priority",
        )


def _completion_prompts(model: ModelHandle, body: CompletionBody) -> list[Prompt]:
    for text in body.prompts:
        if isinstance(text, str):
            model.tokenizer.refuse_hopeless(len(text), model.max_model_len, "prompt")
    return [_completion_prompt(model, body, prompt) for prompt in body.prompts]


def _completion_prompt(model: ModelHandle, body: CompletionBody, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        add_special_tokens = body.add_special_tokens is not False
        return Prompt(model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens), prompt)
    if not body.echo:
        return Prompt(prompt)
    check_detokenize(len(prompt), model.max_model_len)
    return Prompt(prompt, model.tokenizer.decode(prompt))


def _chat_prompt(model: ModelHandle, body: ChatBody) -> Prompt:
    messages = _conversation(body.messages)
    # A template may leave out parts of a message, so only its result can be too long.
    max_chars = model.tokenizer.max_chars(model.max_model_len)
    return Prompt(model.tokenizer.encode_chat(messages, max_chars=max_chars))


def _tokenized(model: ModelHandle, body: TokenizeBody) -> Tokenized:
    token_ids = _tokenize(model, body)
    strings = model.tokenizer.token_strings(token_ids) if body.return_token_strs else None
    return Tokenized(len(token_ids), model.max_model_len, token_ids, strings)


def _tokenize(model: ModelHandle, body: TokenizeBody) -> list[int]:
    if body.messages is None:
        assert body.prompt is not None
        check_tokenize(len(body.prompt), model.max_model_len, "prompt")
        return model.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    messages = _conversation(body.messages)
    check_tokenize(_num_chars(messages), model.max_model_len, "messages")
    return model.tokenizer.encode_chat(
        messages,
        max_chars=max_tokenize_chars(model.max_model_len),
        add_generation_prompt=body.add_generation_prompt is not False,
    )


def _detokenized(model: ModelHandle, body: DetokenizeBody) -> Detokenized:
    if (largest := max(body.tokens, default=0)) >= model.vocab_size:
        raise ApiError(400, f"token id {largest} is not in the model's vocabulary", param="tokens")
    return Detokenized(model.tokenizer.decode(body.tokens))


def _conversation(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    check_messages(sum(message.num_parts for message in messages))
    return [message.for_template() for message in messages]


def _num_chars(messages: Sequence[Mapping[str, str]]) -> int:
    return sum(len(message["content"]) for message in messages)
