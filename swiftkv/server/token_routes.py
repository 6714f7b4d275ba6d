"""Routes that turn text into tokens and back, and generate nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from swiftkv.server.asked_model import asked_model, in_threads
from swiftkv.server.body import body_document, parsed
from swiftkv.server.documented import BODY_ERRORS, documented
from swiftkv.server.errors import ApiError, fields_named
from swiftkv.server.messages_api.body import FIELD_OF_CHAT, CountTokensBody
from swiftkv.server.messages_api.objects import TokenCount
from swiftkv.server.models import ModelHandle, ModelTable
from swiftkv.server.prepare import conversation
from swiftkv.server.price import check_detokenize, check_tokenize, max_tokenize_chars
from swiftkv.server.protocol import ChatBody, DetokenizeBody, PromptBody, TokenizeBody
from swiftkv.server.responses import Detokenized, Tokenized
from swiftkv.server.streaming import json_response
from swiftkv.server.templating import templating
from swiftkv.server.tools import template_tools


def token_router(models: ModelTable) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/messages/count_tokens",
        responses=documented("TokenCount", *BODY_ERRORS, path="/v1/messages"),
        openapi_extra=body_document(CountTokensBody),
    )
    async def count_tokens(request: Request, body: Annotated[CountTokensBody, parsed(CountTokensBody)]) -> Response:
        model = asked_model(request, models, body.model)
        chat = body.chat
        with fields_named(FIELD_OF_CHAT):
            ids = await in_threads(request, model, lambda: _chat_ids(model, chat))
        return json_response(TokenCount(len(ids)))

    @router.post(
        "/tokenize", responses=documented("Tokenized", *BODY_ERRORS), openapi_extra=body_document(TokenizeBody)
    )
    async def tokenize(request: Request, body: Annotated[TokenizeBody, parsed(TokenizeBody)]) -> Response:
        model = asked_model(request, models, body.model)
        return await in_threads(request, model, lambda: json_response(_tokenized(model, body)))

    @router.post(
        "/detokenize", responses=documented("Detokenized", *BODY_ERRORS), openapi_extra=body_document(DetokenizeBody)
    )
    async def detokenize(request: Request, body: Annotated[DetokenizeBody, parsed(DetokenizeBody)]) -> Response:
        model = asked_model(request, models, body.model)
        check_detokenize(len(body.tokens), model.max_model_len)
        return await in_threads(request, model, lambda: json_response(_detokenized(model, body)))

    return router


def _tokenized(model: ModelHandle, body: TokenizeBody) -> Tokenized:
    token_ids = prompt_ids(model, body)
    strings = model.tokenizer.token_strings(token_ids) if body.return_token_strs else None
    return Tokenized(len(token_ids), model.max_model_len, token_ids, strings)


def prompt_ids(model: ModelHandle, body: PromptBody) -> list[int]:
    """Return the token ids of a prompt that is only tokenized, and may be longer than the model takes.

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
    """Return the token ids of a chat that is only tokenized, and may be longer than the model takes."""
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
