"""The routes of `/admin/cache`: show and empty caches, explain why a request found no more there, pin prefixes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import Response

from swiftkv.engine.messages import CacheReport, CacheStop, EngineStats, Explanation, PinView
from swiftkv.server.asked_model import in_threads
from swiftkv.server.body import body_document, parsed
from swiftkv.server.cache_views import (
    CacheCleared,
    CacheOverview,
    ModelCache,
    ModelMatch,
    PinChange,
    PinnedPrefix,
    RequestMatch,
    SequenceMatch,
)
from swiftkv.server.documented import BODY_ERRORS, documented
from swiftkv.server.errors import ApiError
from swiftkv.server.middleware import ADMIN_PATH
from swiftkv.server.models import ModelHandle, ModelTable
from swiftkv.server.parameters import no_unknown_parameters
from swiftkv.server.protocol import PinBody
from swiftkv.server.streaming import json_response
from swiftkv.server.token_routes import prompt_ids
from swiftkv.units import DURATION_PATTERN, parse_duration

T = TypeVar("T")

_PREFIX = f"{ADMIN_PATH}/cache"

Name = Annotated[str, Path(description="Name of the model")]
PinId = Annotated[str, Path(description="Number of the pin", pattern="^[0-9]{1,18}$")]
TimeToLive = Annotated[str, Query(description="How long to keep it, such as 90s, 30m or 24h", pattern=DURATION_PATTERN)]
RequestId = Annotated[
    str, Path(description="The request's id: the `X-Request-Id` header of its answer, which may have slashes")
]


class _RequestIdConvertor(Convertor[str]):
    """Takes ids with slashes, unless they end in `/pin`, which is another route."""

    regex = "(?!.*/pin$).+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("request_id", _RequestIdConvertor())

MEANINGS: dict[CacheStop, str] = {
    "complete": "no more can be found: only whole blocks match, and the last token is always computed",
    "prompt_logprobs": "the request asked for prompt_logprobs, so all of its prompt was computed",
    "tail_gone": "the next blocks are cached, but the sliding-window KV that is needed to continue after them is gone",
    "late": "a tier below the pool took too long, so the request stopped waiting for it: see prefetch_policy",
    "corrupt": "a block in a tier below the pool did not match its checksum, and was dropped",
    "failed": "a tier below the pool failed, or is not used for a while because it failed",
    "declined": "a tier below the pool had more, but computing it was expected to be as fast",
    "evicted": "the next block was evicted from the pool, and no tier below it had the block",
    "other_salt": "other prompts began with the same tokens under another cache_salt, and salts share no blocks",
    "never_stored": "no remembered request has computed the next block",
}


def cache_router(models: ModelTable) -> APIRouter:
    router = APIRouter(dependencies=[Depends(no_unknown_parameters)])
    router.include_router(_contents_router(models))
    router.include_router(_pins_router(models))
    return router


def _contents_router(models: ModelTable) -> APIRouter:
    router = APIRouter(prefix=_PREFIX)

    @router.get("", responses=documented("CacheOverview"))
    async def show() -> Response:
        """Show how much every model's cache holds, and what prompts found there."""
        reported = ((model.name, model.client.stats) for model in models.all())
        return json_response(CacheOverview([_view(name, stats) for name, stats in reported if stats is not None]))

    @router.get("/requests/{request_id:request_id}", responses=documented("RequestMatch", 404, 503))
    async def why(request_id: RequestId) -> Response:
        """Explain why a recent request found no more of its prompt in the cache."""

        async def ask(model: ModelHandle) -> ModelMatch | None:
            report = await model.client.cache.explain(request_id)
            if report is None or not report.explanations:
                return None
            return ModelMatch(model.name, [_match(explanation) for explanation in report.explanations])

        first, *others = [found async for found in _answers(models, ask, request_id)]
        return json_response(RequestMatch(request_id, first.model, first.sequences, others))

    @router.post("/{model}/clear", responses=documented("CacheCleared", 404, 503))
    async def clear(model: Name) -> Response:
        """Forget every cached block that no running request holds. Tiers below the pool keep theirs."""
        client = models.get(model).client
        client.check_available()
        report = await client.cache.clear()
        return json_response(CacheCleared(model, report.cleared_blocks))

    return router


def _pins_router(models: ModelTable) -> APIRouter:
    router = APIRouter(prefix=_PREFIX)

    @router.post("/requests/{request_id:path}/pin", responses=documented("PinChange", 400, 404, 409, 503))
    async def pin(request_id: RequestId, ttl: TimeToLive = "1h") -> Response:
        """Pin what the model's pool has of a request's prompt, until it is unpinned or its time is over."""

        async def ask(model: ModelHandle) -> PinChange | None:
            report = await model.client.cache.pin(request_id, parse_duration(ttl))
            return None if report is None else _pinned(model.name, report)

        async with aclosing(_answers(models, ask, request_id)) as answers:
            return json_response(await anext(answers))

    @router.post(
        "/{model}/pin",
        responses=documented("PinChange", *BODY_ERRORS, 409, 503),
        openapi_extra=body_document(PinBody),
    )
    async def pin_prompt(
        request: Request, model: Name, body: Annotated[PinBody, parsed(PinBody)], ttl: TimeToLive = "1h"
    ) -> Response:
        """Pin what the model's pool has of a prompt or of a chat, until it is unpinned or its time is over."""
        handle = models.pick(model, body.model)
        handle.client.check_available()
        token_ids = await in_threads(request, handle, lambda: prompt_ids(handle, body))
        report = await handle.client.cache.pin_prompt(token_ids, body.cache_salt or "", parse_duration(ttl))
        return json_response(_pinned(handle.name, report))

    @router.delete("/{model}/pins/{pin_id}", responses=documented("PinChange", 400, 404, 503))
    async def unpin(model: Name, pin_id: PinId) -> Response:
        """End a pin. Its blocks are cached like others from then on."""
        client = models.get(model).client
        client.check_available()
        report = await client.cache.unpin(int(pin_id))
        if report.why_not is not None:
            raise ApiError(404, f"model '{model}': {report.why_not}", param="pin_id", code="unknown_pin")
        return json_response(PinChange(model, int(pin_id), "unpinned", None, None))

    return router


async def _answers(
    models: ModelTable, ask: Callable[[ModelHandle], Awaitable[T | None]], request_id: str
) -> AsyncGenerator[T, None]:
    """Yield the models' answers about a request, one at least: several models may have had requests with this id.

    Raises `ApiError`: that of the first model which knows the request if none can answer, 404 if none knows it.
    """
    errors: list[ApiError] = []
    has_answer = False
    for model in models.all():
        try:
            answer = await ask(model)
        except ApiError as error:
            errors.append(error)
            continue
        if answer is not None:
            has_answer = True
            yield answer
    if not has_answer:
        raise errors[0] if errors else _unknown(request_id)


def _pinned(model: str, report: CacheReport) -> PinChange:
    if report.pin is None:
        raise ApiError(409, f"model '{model}': {report.why_not}", code="not_pinned")
    return PinChange(model, report.pin.pin_id, "pinned", report.pin.num_tokens, _seconds_left(report.pin))


def _seconds_left(pin: PinView) -> float:
    """Return the seconds from now until the time of a pin is over; its engine may have reported it long ago."""
    return round(max(0.0, pin.ends_s - time.monotonic()), 3)


def _unknown(request_id: str) -> ApiError:
    return ApiError(
        404, f"no recent request has the id '{request_id}'; an engine remembers at most its last 1,024 sequences",
        param="request_id", code="unknown_request",
    )  # fmt: skip


def _view(name: str, stats: EngineStats) -> ModelCache:
    return ModelCache(
        model=name,
        blocks={"free": stats.num_free_blocks, "used": stats.num_used_blocks, "cached": stats.num_cached_blocks},
        tokens={"local": stats.kv_tokens_local, "peer": stats.kv_tokens_peer, "host": stats.kv_tokens_host},
        query_tokens_total=stats.prefix_query_tokens_total,
        hit_tokens_total=stats.hit_tokens_by_tier(),
        pinned_blocks=sum(group.pinned for group in stats.groups),
        pins=[
            PinnedPrefix(pin.pin_id, pin.num_tokens, _seconds_left(pin), "lost" if pin.is_lost else "kept")
            for pin in stats.pins
        ],
    )


def _match(found: Explanation) -> SequenceMatch:
    return SequenceMatch(found.prompt_tokens, found.cached_tokens, found.reason, MEANINGS[found.reason], found.age_s)
