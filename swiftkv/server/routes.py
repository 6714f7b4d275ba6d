"""OpenAI's routes, vLLM's and Anthropic's beside them, for the models of one port."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from swiftkv.server.body import body_document, parsed
from swiftkv.server.errors import ApiError, fields_named, speaks_anthropic
from swiftkv.server.messages_api.answer import MessagesAnswer
from swiftkv.server.messages_api.body import FIELD_OF_CHAT as messages_names
from swiftkv.server.messages_api.body import CountTokensBody, MessagesBody
from swiftkv.server.messages_api.objects import TokenCount
from swiftkv.server.models import ModelHandle, ModelTable
from swiftkv.server.prepare import AnswerMaker, begin, check, conversation, prepare, wanted_targets
from swiftkv.server.price import check_detokenize, check_tokenize, max_tokenize_chars
from swiftkv.server.protocol import ChatBody, CompletionBody, DetokenizeBody, PromptBody, TokenizeBody
from swiftkv.server.request_log import RequestRecord
from swiftkv.server.responses import Detokenized, ModelList, Tokenized
from swiftkv.server.responses_api.answer import ResponsesAnswer
from swiftkv.server.responses_api.body import FIELD_OF_CHAT as responses_names
from swiftkv.server.responses_api.body import ResponsesBody
from swiftkv.server.streaming import json_response, streamed_answer, unless_gone, whole_answer
from swiftkv.server.targets import asked_targets
from swiftkv.server.templating import templating
from swiftkv.server.tenants import sender_of
from swiftkv.server.tools import template_tools

T = TypeVar("T")

_SERVER_SENT_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def documented_error(path: str = "") -> dict[str, Any]:
    """Return an error of the route at `path` for the OpenAPI document."""
    schema = "AnthropicError" if speaks_anthropic(path) else "ErrorResponse"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": "Error", "content": content}


def documented(
    schema: str, *error_statuses: int, stream: bool = False, several: bool = False, ok: int = 200, path: str = ""
) -> dict[int | str, dict[str, Any]]:
    """Return a route's answers for the OpenAPI document: one of `schema`, or a list of `several`.

    Args:
        ok: The status of success.
        path: The route's, where errors depend on it.
    """
    reference: dict[str, Any] = {"$ref": f"#/components/schemas/{schema}"}
    shape = {"type": "array", "items": reference} if several else reference
    content: dict[str, Any] = {"application/json": {"schema": shape}}
    if stream:
        content = {**content, "text/event-stream": {"schema": _SERVER_SENT_EVENT}}
    return {
        ok: {"description": "OK", "content": content},
        **{status: documented_error(path) for status in error_statuses},
    }


GENERATION_ERRORS = (400, 404, 413, 429, 503)
BODY_ERRORS = (400, 404, 413, 429)


def openai_router(models: ModelTable) -> APIRouter:
    """Return routes that find their model by the path parameter ``name``, if they have one, or the body's ``model``."""
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
        return await _generate(request, model, body)

    @router.post(
        "/v1/chat/completions",
        responses=documented("ChatCompletion", *GENERATION_ERRORS, stream=True),
        openapi_extra=body_document(ChatBody),
    )
    async def chat(request: Request, body: Annotated[ChatBody, parsed(ChatBody)]) -> Response:
        model = pick(request, body.model)
        return await _generate(request, model, body)

    @router.post(
        "/v1/responses",
        responses=documented("ResponseObject", *GENERATION_ERRORS, stream=True),
        openapi_extra=body_document(ResponsesBody),
    )
    async def respond(request: Request, body: Annotated[ResponsesBody, parsed(ResponsesBody)]) -> Response:
        model = pick(request, body.model)
        with fields_named(responses_names):
            return await _generate(request, model, body.chat, partial(ResponsesAnswer, body))

    @router.post(
        "/v1/messages",
        responses=documented("MessageObject", *GENERATION_ERRORS, stream=True, path="/v1/messages"),
        openapi_extra=body_document(MessagesBody),
    )
    async def answer_messages(request: Request, body: Annotated[MessagesBody, parsed(MessagesBody)]) -> Response:
        model = pick(request, body.model)
        with fields_named(messages_names):
            return await _generate(request, model, body.chat, MessagesAnswer)

    @router.post(
        "/v1/messages/count_tokens",
        responses=documented("TokenCount", *BODY_ERRORS, path="/v1/messages"),
        openapi_extra=body_document(CountTokensBody),
    )
    async def count_tokens(request: Request, body: Annotated[CountTokensBody, parsed(CountTokensBody)]) -> Response:
        model = pick(request, body.model)
        chat = body.chat
        with fields_named(messages_names):
            ids = await in_threads(request, model, lambda: _chat_ids(model, chat))
        return json_response(TokenCount(len(ids)))

    @router.post(
        "/tokenize", responses=documented("Tokenized", *BODY_ERRORS), openapi_extra=body_document(TokenizeBody)
    )
    async def tokenize(request: Request, body: Annotated[TokenizeBody, parsed(TokenizeBody)]) -> Response:
        model = pick(request, body.model)
        return await in_threads(request, model, lambda: json_response(_tokenized(model, body)))

    @router.post(
        "/detokenize", responses=documented("Detokenized", *BODY_ERRORS), openapi_extra=body_document(DetokenizeBody)
    )
    async def detokenize(request: Request, body: Annotated[DetokenizeBody, parsed(DetokenizeBody)]) -> Response:
        model = pick(request, body.model)
        check_detokenize(len(body.tokens), model.max_model_len)
        return await in_threads(request, model, lambda: json_response(_detokenized(model, body)))

    return router


def as_sent(request: Request, model: ModelHandle) -> ModelHandle:
    """Return the model with its policy for the request's sender; note both in the request's record."""
    record: RequestRecord = request.state.record
    sender = sender_of(request)
    record.model, record.tenant = model.name, sender.name
    return model.serving(sender)


async def wake_if_asked(request: Request, model: ModelHandle) -> None:
    """Wake a model whose requests may wake it, again and again if somebody puts it to sleep meanwhile."""
    while model.must_wake:
        await unless_gone(request, model.sleeper.wake_for_request())


async def in_threads(request: Request, model: ModelHandle, work: Callable[[], T]) -> T:
    """Do `work` in the model's threads, unless the client hangs up before it has begun."""
    return await unless_gone(request, model.threads.run(work, request.state.num_body_bytes))


async def _generate(
    request: Request,
    model: ModelHandle,
    body: CompletionBody | ChatBody,
    make_answer: AnswerMaker | None = None,
) -> Response:
    record: RequestRecord = request.state.record
    model = as_sent(request, model)
    model.check_task("generate")
    await wake_if_asked(request, model)
    targets = wanted_targets(model, body, asked_targets(request.headers))
    check(model, body, targets)
    prepared = await unless_gone(request, prepare(model, body, request.state.num_body_bytes))
    await wake_if_asked(request, model)  # it may have been put to sleep, for nothing was in flight
    answer = begin(model, body, prepared, make_answer=make_answer, targets=targets, is_traced=record.is_traced)
    record.finished = answer.generation.finished
    model.client.cache.remember(record.request_id, answer.generation.request_ids)
    if body.stream:
        return await streamed_answer(request, answer)
    return await whole_answer(request, answer)


def _tokenized(model: ModelHandle, body: TokenizeBody) -> Tokenized:
    token_ids = prompt_ids(model, body)
    strings = model.tokenizer.token_strings(token_ids) if body.return_token_strs else None
    return Tokenized(len(token_ids), model.max_model_len, token_ids, strings)


def prompt_ids(model: ModelHandle, body: PromptBody) -> list[int]:
    """Return the token ids of a prompt that is not generated from: it may be longer than the model takes.

    Raises:
        ApiError: 400 for a field that does not fit the others, or a prompt that is far too long.
    """
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either field 'prompt' or field 'messages'", param="prompt")
    if body.prompt is not None:
        check_tokenize(len(body.prompt), model.max_model_len, "prompt")
        return model.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    if body.chat_template is not None:
        raise ApiError(400, "field 'chat_template' is for chats only", param="chat_template", code="unsupported_field")
    if body.add_special_tokens:
        message = "field 'add_special_tokens' is for 'prompt': a chat template writes its own special tokens"
        raise ApiError(400, message, param="add_special_tokens", code="unsupported_field")
    return _chat_ids(model, body)


def _chat_ids(model: ModelHandle, body: PromptBody | ChatBody) -> list[int]:
    """Return the token ids of a chat that is not generated from: it may be longer than the model takes."""
    assert body.messages is not None
    shown = conversation(body.messages)
    check_tokenize(_num_chars(shown), model.max_model_len, "messages")
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    return model.tokenizer.encode_chat(
        shown,
        tools=template_tools(body),
        max_chars=max_tokenize_chars(model.max_model_len),
        given=templating(body, model.tokenizer.chat_template, effort),
    )


def _detokenized(model: ModelHandle, body: DetokenizeBody) -> Detokenized:
    if (largest := max(body.tokens, default=0)) >= model.vocab_size:
        raise ApiError(400, f"token id {largest} is not in the model's vocabulary", param="tokens")
    return Detokenized(model.tokenizer.decode(body.tokens))


def _num_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(message["content"]) for message in messages)
