"""The routes of models that embed or score: OpenAI's embeddings, vLLM's scores, Jina's and Cohere's rankings."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from swiftkv.policies import Task
from swiftkv.server.asked_model import as_sent, asked_model, awake
from swiftkv.server.body import body_document, parsed
from swiftkv.server.documented import GENERATION_ERRORS, documented
from swiftkv.server.models import ModelHandle, ModelTable
from swiftkv.server.pooling.bodies import EmbeddingBody, PooledBody, RerankBody, ScoreBody
from swiftkv.server.pooling.embed import embed
from swiftkv.server.pooling.rank import rerank, score
from swiftkv.server.prepare import check_admission
from swiftkv.server.request_log import RequestRecord
from swiftkv.server.streaming import unless_gone

B = TypeVar("B", bound=PooledBody)

_RANKING_TASKS: tuple[Task, ...] = ("score", "embed")


def pooling_router(models: ModelTable) -> APIRouter:
    """Return routes that find their model as those of completions do."""
    router = APIRouter()

    async def answered(
        request: Request,
        body: B,
        tasks: tuple[Task, ...],
        answer: Callable[[ModelHandle, B, int, RequestRecord], Coroutine[Any, Any, bytes]],
    ) -> Response:
        model = as_sent(request, asked_model(request, models, body.model))
        record: RequestRecord = request.state.record
        model.check_task(*tasks)
        model = await awake(request, models, model)
        check_admission(model, body.priority)
        content = await unless_gone(request.receive, answer(model, body, request.state.num_body_bytes, record))
        return Response(content, media_type="application/json")

    @router.post(
        "/v1/embeddings",
        responses=documented("EmbeddingList", *GENERATION_ERRORS),
        openapi_extra=body_document(EmbeddingBody),
    )
    async def embeddings(request: Request, body: Annotated[EmbeddingBody, parsed(EmbeddingBody)]) -> Response:
        return await answered(request, body, ("embed",), embed)

    @router.post("/score", include_in_schema=False)
    @router.post(
        "/v1/score",
        responses=documented("ScoreList", *GENERATION_ERRORS),
        openapi_extra=body_document(ScoreBody),
    )
    async def scores(request: Request, body: Annotated[ScoreBody, parsed(ScoreBody)]) -> Response:
        return await answered(request, body, _RANKING_TASKS, score)

    @router.post("/rerank", include_in_schema=False)
    @router.post("/v2/rerank", include_in_schema=False)
    @router.post(
        "/v1/rerank",
        responses=documented("Ranking", *GENERATION_ERRORS),
        openapi_extra=body_document(RerankBody),
    )
    async def ranked(request: Request, body: Annotated[RerankBody, parsed(RerankBody)]) -> Response:
        return await answered(request, body, _RANKING_TASKS, rerank)

    return router
