"""OpenAI's routes and vLLM's beside them, for the models of one port."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from swiftkv.server.answer import Answer, ChatAnswer, CompletionAnswer, Prompt
from swiftkv.server.errors import ApiError
from swiftkv.server.models import ModelHandle, ModelTable
from swiftkv.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from swiftkv.server.responses import Detokenized, ModelList, Tokenized
from swiftkv.server.sampling import sequence_requests
from swiftkv.server.streaming import json_response, streamed_answer, whole_answer

_SERVER_SENT_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def documented(schema: str, *error_statuses: int, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """A route's answers for the OpenAPI document."""
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    if stream:
        content = {**content, "text/event-stream": {"schema": _SERVER_SENT_EVENT}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
    return {
        200: {"description": "OK", "content": content},
        **{status: {"description": "Error", "content": error} for status in error_statuses},
    }


GENERATION_ERRORS = (400, 404, 413, 429, 503)
BODY_ERRORS = (400, 404, 413)


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

    @router.post("/v1/completions", responses=documented("Completion", *GENERATION_ERRORS, stream=True))
    async def complete(request: Request, body: CompletionBody) -> Response:
        model = pick(request, body.model)
        model.client.check_available()
        prompts = await asyncio.gather(*(_completion_prompt(model, body, prompt) for prompt in body.prompts))
        return await _generate(request, model, body, prompts)

    @router.post("/v1/chat/completions", responses=documented("ChatCompletion", *GENERATION_ERRORS, stream=True))
    async def chat(request: Request, body: ChatBody) -> Response:
        model = pick(request, body.model)
        model.client.check_available()
        messages = [message.for_template() for message in body.messages]
        token_ids = await model.tokenizer.encode_chat(messages, max_tokens=model.max_model_len)
        return await _generate(request, model, body, [Prompt(token_ids)])

    @router.post("/tokenize", responses=documented("Tokenized", *BODY_ERRORS))
    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        model = pick(request, body.model)
        token_ids = await _tokenize(model, body)
        strings = model.tokenizer.token_strings(token_ids) if body.return_token_strs else None
        return json_response(Tokenized(len(token_ids), model.max_model_len, token_ids, strings))

    @router.post("/detokenize", responses=documented("Detokenized", *BODY_ERRORS))
    async def detokenize(request: Request, body: DetokenizeBody) -> Response:
        model = pick(request, body.model)
        if (largest := max(body.tokens, default=0)) >= model.vocab_size:
            raise ApiError(400, f"token id {largest} is not in the model's vocabulary", param="tokens")
        return json_response(Detokenized(await model.tokenizer.decode(body.tokens)))

    return router


async def _generate(
    request: Request, model: ModelHandle, body: CompletionBody | ChatBody, prompts: list[Prompt]
) -> Response:
    requests = sequence_requests(model, body, [prompt.token_ids for prompt in prompts])
    generation = model.client.generate(requests, cache_salt=body.cache_salt or "", priority=body.priority or 0)
    model.client.metrics.request_n.observe(body.n or 1)
    answer: Answer
    if isinstance(body, ChatBody):
        answer = ChatAnswer(model, body, prompts, generation)
    else:
        answer = CompletionAnswer(model, body, prompts, generation)
    if body.stream:
        return await streamed_answer(request, answer)
    return await whole_answer(request, answer)


async def _completion_prompt(model: ModelHandle, body: CompletionBody, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        add_special_tokens = body.add_special_tokens is not False
        token_ids = await model.tokenizer.encode(
            prompt, max_tokens=model.max_model_len, add_special_tokens=add_special_tokens
        )
        return Prompt(token_ids, prompt)
    return Prompt(prompt, await model.tokenizer.decode(prompt) if body.echo else "")


async def _tokenize(model: ModelHandle, body: TokenizeBody) -> list[int]:
    # Unlike a generation, this need not fit the model; what a body may hold bounds it.
    unlimited = 1 << 40
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either field 'prompt' or field 'messages'", param="prompt")
    if body.messages is None:
        add_special_tokens = body.add_special_tokens is not False
        assert body.prompt is not None
        return await model.tokenizer.encode(body.prompt, max_tokens=unlimited, add_special_tokens=add_special_tokens)
    messages = [message.for_template() for message in body.messages]
    add_generation_prompt = body.add_generation_prompt is not False
    return await model.tokenizer.encode_chat(
        messages, max_tokens=unlimited, add_generation_prompt=add_generation_prompt
    )
