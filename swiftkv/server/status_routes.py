"""The routes for monitoring: whether the gateway lives, whether engines serve, and the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from fastapi import APIRouter, Request
from starlette.responses import Response

from swiftkv import __version__
from swiftkv.server.documented import documented
from swiftkv.server.engine_state import EngineState
from swiftkv.server.errors import ErrorDetail
from swiftkv.server.lending import NodeLending
from swiftkv.server.metrics import CONTENT_TYPE, GatewayMetrics
from swiftkv.server.middleware import has_bearer_key
from swiftkv.server.models import ModelTable
from swiftkv.server.node_views import EngineView, Health, NotReady, Readiness, Version
from swiftkv.server.scrape import Scrapes
from swiftkv.server.streaming import json_response

_NOT_READY = {"description": "Error", "content": documented("NotReady")[200]["content"]}
_METRICS_TEXT = {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}


def status_router(
    models: ModelTable, metrics: GatewayMetrics, lending: NodeLending, *, admin_key: str, only_model: str | None
) -> APIRouter:
    """Return routes about the model of the path parameter `name`; without one about `only_model`, or all models."""
    router = APIRouter()
    router.include_router(_readiness_router(models, only_model))
    router.include_router(_metrics_router(models, metrics, lending, admin_key, only_model))
    return router


def _readiness_router(models: ModelTable, only_model: str | None) -> APIRouter:
    router = APIRouter()

    # Load balancers and `wget --spider` ask with HEAD.
    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=documented("Health"))
    async def health() -> Response:
        """Say that the gateway is alive."""
        return json_response(Health())

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", responses={**documented("Readiness"), 503: _NOT_READY})
    async def ready(request: Request) -> Response:
        """Tell whether every engine serves or was put to sleep; if not, which one does not, and why.

        On a path or port of one model, a model that is asleep counts as ready only if requests wake it.
        """
        return _readiness(models, _asked_for(request, only_model))

    @router.get("/version", responses=documented("Version"))
    async def version() -> Response:
        return json_response(Version(__version__))

    return router


def _metrics_router(
    models: ModelTable, metrics: GatewayMetrics, lending: NodeLending, admin_key: str, only_model: str | None
) -> APIRouter:
    router = APIRouter()

    @cache
    def scrapes_of(only: str | None, names_tenants: bool) -> Scrapes:
        async def observe() -> None:
            metrics.engines.observe_all(models.engines())
            await lending.observe(metrics.lending, only)

        def render() -> Iterator[bytes]:
            yield from metrics.render(only)
            if names_tenants:
                yield from metrics.render_tenants(only)

        return Scrapes(observe, render, metrics.scrape_pace)

    @router.get("/metrics", responses={200: _METRICS_TEXT}, response_class=Response)
    async def scrape(request: Request) -> Response:
        """Return metrics for Prometheus. Those that name tenants need the key of `/admin`."""
        only = _asked_for(request, only_model)
        models.only(only)
        scrapes = scrapes_of(only, has_bearer_key(request.headers, admin_key))
        return Response(await scrapes.text(), media_type=CONTENT_TYPE)

    return router


def _asked_for(request: Request, only_model: str | None) -> str | None:
    """Return the only model that a request asks about, or `None` for all."""
    name: str | None = request.path_params.get("name", only_model)
    return name


def _readiness(models: ModelTable, only: str | None) -> Response:
    engines = models.only(only).engines()
    states = {name: engine.state for name, engine in engines.items()}
    not_serving = [
        _describe(name, engine)
        for name, engine in engines.items()
        if not (models.get(name).takes_requests if only else EngineState(engine.state).is_as_wanted)
    ]
    if not not_serving:
        return json_response(Readiness("ready", states, engines))
    detail = ErrorDetail(f"not ready: {', '.join(not_serving)}", "service_unavailable_error", None, "not_ready")
    response = json_response(NotReady(detail, states, engines), 503)
    response.headers["Retry-After"] = "1"
    return response


def _describe(name: str, engine: EngineView) -> str:
    return f"'{name}' is {engine.state}" + (f" ({engine.why})" if engine.why else "")
