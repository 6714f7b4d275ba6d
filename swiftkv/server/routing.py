"""Routes for programs that divide requests between servers: how busy a model is, and the tokens of a prompt.

`/v1/loads` is SGLang's, `/v1/completions/render` and `/v1/chat/completions/render` are vLLM's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from datetime import UTC, datetime
from typing import Annotated
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from swiftkv import __version__
from swiftkv.server.asked_model import asked_model
from swiftkv.server.body import body_document, parsed
from swiftkv.server.documented import BODY_ERRORS, documented
from swiftkv.server.models import ModelHandle, ModelTable
from swiftkv.server.prepare import prepare
from swiftkv.server.protocol import ChatBody, CompletionBody
from swiftkv.server.responses import Load, Loads, RenderedPrompt
from swiftkv.server.streaming import json_response, unless_gone

_SHORTEST_S = 0.5


def routing_router(models: ModelTable) -> APIRouter:
    router = APIRouter()
    throughputs: defaultdict[str, _Throughput] = defaultdict(_Throughput)

    @router.get("/v1/loads", responses=documented("Loads"))
    async def loads(request: Request) -> Response:
        """Show the load of each model, in the form in which SGLang shows its ranks."""
        name = request.path_params.get("name")
        asked = models.all() if name is None else [models.get(name)]
        now = datetime.now(UTC).isoformat()
        shown = [_load(rank, model, throughputs[model.name]) for rank, model in enumerate(asked)]
        return json_response(Loads(now, __version__, len(shown), shown))

    @router.post(
        "/v1/completions/render",
        responses=documented("RenderedPrompt", *BODY_ERRORS, several=True),
        openapi_extra=body_document(CompletionBody),
    )
    async def render(request: Request, body: Annotated[CompletionBody, parsed(CompletionBody)]) -> Response:
        """Return the tokens of each prompt of a completion, as the model would compute them."""
        model = asked_model(request, models, body.model)
        return json_response(await _rendered(request, model, body))

    @router.post(
        "/v1/chat/completions/render",
        responses=documented("RenderedPrompt", *BODY_ERRORS),
        openapi_extra=body_document(ChatBody),
    )
    async def render_chat(request: Request, body: Annotated[ChatBody, parsed(ChatBody)]) -> Response:
        """Return the tokens of a chat, as the model would compute them."""
        model = asked_model(request, models, body.model)
        (prompt,) = await _rendered(request, model, body)
        return json_response(prompt)

    return router


class _Throughput:
    """The tokens a second that an engine generated between its last two looks, at least half a second apart."""

    def __init__(self) -> None:
        self._seen_s = time.monotonic()
        self._total = 0
        self._rate = 0.0

    def look(self, total: int) -> float:
        now_s = time.monotonic()
        if now_s - self._seen_s >= _SHORTEST_S:
            self._rate = max(0, total - self._total) / (now_s - self._seen_s)
            self._seen_s, self._total = now_s, total
        return self._rate


def _load(rank: int, model: ModelHandle, throughput: _Throughput) -> Load:
    client = model.client
    load = Load(model.name, rank, max_running_requests=model.max_num_seqs)
    engine, stats = client.engine, client.stats
    load.num_waiting_uncached_tokens = client.outlook.queued.num_tokens
    if engine is None or stats is None:
        return load
    load.num_running_reqs, load.num_waiting_reqs = stats.num_running, stats.num_waiting
    load.max_total_num_tokens = engine.num_blocks * engine.block_size
    load.token_usage = stats.num_used_blocks / max(1, stats.num_blocks)
    load.num_used_tokens = round(load.token_usage * load.max_total_num_tokens)
    load.num_total_tokens = load.num_used_tokens + load.num_waiting_uncached_tokens
    load.cache_hit_rate = stats.prefix_hit_tokens_total / max(1, stats.prefix_query_tokens_total)
    load.utilization = stats.num_running / model.max_num_seqs
    load.gen_throughput = throughput.look(stats.generation_tokens_total)
    return load


async def _rendered(request: Request, model: ModelHandle, body: CompletionBody | ChatBody) -> list[RenderedPrompt]:
    prepared = await unless_gone(request.receive, prepare(model, body, request.state.num_body_bytes))
    kind = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
    return [RenderedPrompt(f"{kind}-{uuid4().hex}", model.name, prompt.token_ids) for prompt in prepared.prompts]
