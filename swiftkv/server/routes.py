"""OpenAI's routes, vLLM's and Anthropic's beside them, for the models of one port."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Request
from starlette.responses import Response

from swiftkv.server.asked_model import as_sent, asked_model, awake
from swiftkv.server.body import body_document, parsed
from swiftkv.server.documented import GENERATION_ERRORS, documented
from swiftkv.server.errors import fields_named
from swiftkv.server.messages_api.answer import MessagesAnswer
from swiftkv.server.messages_api.body import FIELD_OF_CHAT as messages_names
from swiftkv.server.messages_api.body import MessagesBody
from swiftkv.server.messages_api.objects import AnthropicModel, AnthropicModelList
from swiftkv.server.models import ModelHandle, ModelTable
from swiftkv.server.prepare import AnswerMaker, begin, check, prepare, wanted_targets
from swiftkv.server.protocol import ChatBody, CompletionBody
from swiftkv.server.request_log import RequestRecord
from swiftkv.server.responses import ModelCard, ModelList
from swiftkv.server.responses_api.answer import ResponsesAnswer
from swiftkv.server.responses_api.body import FIELD_OF_CHAT as responses_names
from swiftkv.server.responses_api.body import ResponsesBody
from swiftkv.server.streaming import json_response, streamed_answer, unless_gone, whole_answer
from swiftkv.server.targets import asked_targets
from swiftkv.server.token_routes import token_router
from swiftkv.server.waking import PROGRESS_HEADER, WakingStream

AnthropicVersion = Annotated[str | None, Header(description="With it, the answer has Anthropic's shape")]


def openai_router(models: ModelTable) -> APIRouter:
    """Return routes that find their model by the path parameter `name`, if they have one, or the body's `model`."""
    router = APIRouter()
    for part in (_list_router, _generation_router, token_router):
        router.include_router(part(models))
    return router


def _list_router(models: ModelTable) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", responses=documented("ModelList", 404, anthropic="AnthropicModelList"))
    async def list_models(request: Request, anthropic_version: AnthropicVersion = None) -> Response:
        name = request.path_params.get("name")
        listed = models.all() if name is None else [models.get(name)]
        cards = [card for model in listed for card in model.cards()]
        return json_response(ModelList(cards) if anthropic_version is None else _anthropic_list(cards))

    @router.get("/v1/models/{model_id:path}", responses=documented("ModelCard", 404, anthropic="AnthropicModel"))
    async def retrieve_model(request: Request, model_id: str, anthropic_version: AnthropicVersion = None) -> Response:
        model = asked_model(request, models, model_id) if "name" in request.path_params else models.get(model_id)
        card = model.card(model_id)
        return json_response(card if anthropic_version is None else _anthropic_model(card))

    return router


def _anthropic_list(cards: Sequence[ModelCard]) -> AnthropicModelList:
    data = [_anthropic_model(card) for card in cards]
    return AnthropicModelList(data, data[0].id if data else None, data[-1].id if data else None)


def _anthropic_model(card: ModelCard) -> AnthropicModel:
    created = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(card.id, card.id, created, card.max_model_len, card.max_model_len)


def _generation_router(models: ModelTable) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/completions",
        responses=documented("Completion", *GENERATION_ERRORS, stream=True),
        openapi_extra=body_document(CompletionBody),
    )
    async def complete(request: Request, body: Annotated[CompletionBody, parsed(CompletionBody)]) -> Response:
        return await _generate(request, models, asked_model(request, models, body.model), body)

    @router.post(
        "/v1/chat/completions",
        responses=documented("ChatCompletion", *GENERATION_ERRORS, stream=True),
        openapi_extra=body_document(ChatBody),
    )
    async def chat(request: Request, body: Annotated[ChatBody, parsed(ChatBody)]) -> Response:
        return await _generate(request, models, asked_model(request, models, body.model), body)

    @router.post(
        "/v1/responses",
        responses=documented("ResponseObject", *GENERATION_ERRORS, stream=True),
        openapi_extra=body_document(ResponsesBody),
    )
    async def respond(request: Request, body: Annotated[ResponsesBody, parsed(ResponsesBody)]) -> Response:
        model = asked_model(request, models, body.model)
        with fields_named(responses_names):
            return await _generate(request, models, model, body.chat, partial(ResponsesAnswer, body))

    @router.post(
        "/v1/messages",
        responses=documented("MessageObject", *GENERATION_ERRORS, stream=True, path="/v1/messages"),
        openapi_extra=body_document(MessagesBody),
    )
    async def answer_messages(request: Request, body: Annotated[MessagesBody, parsed(MessagesBody)]) -> Response:
        model = asked_model(request, models, body.model)
        with fields_named(messages_names):
            return await _generate(request, models, model, body.chat, MessagesAnswer)

    return router


async def _generate(
    request: Request,
    models: ModelTable,
    model: ModelHandle,
    body: CompletionBody | ChatBody,
    make_answer: AnswerMaker | None = None,
) -> Response:
    model = as_sent(request, model)
    model.check_task("generate")
    if make_answer is None and body.stream and model.must_wake and PROGRESS_HEADER in request.headers:
        return WakingStream(request, models, model, lambda awoken: _answer(request, models, awoken, body, None))
    model = await awake(request, models, model)
    return await _answer(request, models, model, body, make_answer)


async def _answer(
    request: Request,
    models: ModelTable,
    model: ModelHandle,
    body: CompletionBody | ChatBody,
    make_answer: AnswerMaker | None,
) -> Response:
    began_s = time.perf_counter()
    record: RequestRecord = request.state.record
    is_awake, prepared_for = True, None
    while prepared_for is not model.tokenizer:  # it was reloaded meanwhile
        targets = wanted_targets(model, body, asked_targets(request.headers))
        check(model, body, targets)
        prepared = await unless_gone(request.receive, prepare(model, body, request.state.num_body_bytes))
        prepared_for = model.tokenizer
        is_awake &= not model.must_wake
        model = await awake(request, models, model)  # it may have been put to sleep while nothing was in flight
    answer = begin(
        model, body, prepared, record.request_id,
        make_answer=make_answer, targets=targets, is_traced=record.is_traced,
    )  # fmt: skip
    if is_awake:
        model.client.metrics.observe_handed_over(request.state.reading_s + time.perf_counter() - began_s)
    record.finished = answer.generation.finished
    model.client.cache.remember(record.request_id, answer.generation.request_ids)
    if body.stream:
        return await streamed_answer(request, answer)
    return await whole_answer(request, answer)
