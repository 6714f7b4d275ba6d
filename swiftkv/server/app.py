"""The applications: one for the node's port, and one for each model that has a port of its own."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from swiftkv import __version__
from swiftkv.server.admin import ModelChanges, admin_router
from swiftkv.server.api_document import ApiDocument
from swiftkv.server.batches.routes import batches_router
from swiftkv.server.batches.storage import Storage
from swiftkv.server.batches.upload import FORM_OVERHEAD_BYTES
from swiftkv.server.body import body_threads
from swiftkv.server.cache_routes import cache_router
from swiftkv.server.errors import ApiError, install_error_handlers
from swiftkv.server.lending import NodeLending
from swiftkv.server.limits import NodeLimits
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.server.middleware import (
    AdminMiddleware,
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    CutOffMiddleware,
    HostMiddleware,
    ProtectedPathsMiddleware,
)
from swiftkv.server.models import ModelHandle, ModelTable
from swiftkv.server.node_page import page_router
from swiftkv.server.pooling.routes import pooling_router
from swiftkv.server.protocol import explain_invalid
from swiftkv.server.request_log import RequestIdMiddleware, RequestLog
from swiftkv.server.routes import openai_router
from swiftkv.server.routing import routing_router
from swiftkv.server.status_routes import status_router
from swiftkv.server.streaming import ClientGone
from swiftkv.server.tenants import ANYBODY, Sender
from swiftkv.server.tracing import TraceMiddleware, TraceSink

_MODEL_ROUTERS = (openai_router, routing_router, pooling_router)
"""The routes that find their model by their path or body."""


@dataclass(frozen=True)
class ServerSettings:
    """The settings of every port.

    A request with neither `api_key` nor the key of one of `tenants` is answered with 401; without such keys, every
    request is let in. `admin_key` is the key of `/admin`; if none is given, it is random and nobody knows it.
    `allowed_hosts` are the names that requests may be sent to, beside those of the loopback interface; `None` allows
    any. `request_log` gets a line for each request, `trace_sink` a trace. Without `storage` there are no files and
    batches. With `protect_metrics`, metrics and the documents of the API need `api_key`, a tenant's key or `admin_key`.
    """

    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 16 << 20
    admin_key: str = field(default_factory=secrets.token_urlsafe, repr=False)
    allowed_hosts: tuple[str, ...] | None = ()
    limits: NodeLimits = field(default_factory=NodeLimits)
    request_log: RequestLog | None = None
    storage: Storage | None = None
    trace_sink: TraceSink | None = None
    protect_metrics: bool = False
    tenants: Mapping[str, Sender] = field(default_factory=dict, repr=False)
    """The senders of the tenants, by key."""

    @property
    def keys(self) -> Mapping[str, Sender]:
        """The senders by the keys that let them in."""
        return self.tenants if self.api_key is None else {self.api_key: ANYBODY, **self.tenants}


def create_app(
    table: ModelTable, settings: ServerSettings, metrics: GatewayMetrics, lending: NodeLending, changes: ModelChanges
) -> FastAPI:
    """Make the app of the node's port: models by their name in the body and under `/models/{name}`; `/admin`.

    `table` holds the node's models, which `changes` adds and removes.
    """
    app = _new_app(table, settings, has_admin=True)
    status = status_router(table, metrics, lending, admin_key=settings.admin_key, only_model=None)
    app.include_router(status)  # first: routes are tried in order, and monitoring must not wait for the other routes
    for make_router in _MODEL_ROUTERS:
        app.include_router(make_router(table))
        app.include_router(make_router(table), prefix="/models/{name}", dependencies=[Depends(_named_model)])
    app.include_router(admin_router(table, lending, changes))
    app.include_router(cache_router(table))
    app.include_router(page_router())
    app.include_router(status, prefix="/models/{name}", include_in_schema=False)  # /openapi.json shows it once
    return app


def create_model_app(
    table: ModelTable, name: str, settings: ServerSettings, metrics: GatewayMetrics, lending: NodeLending
) -> FastAPI:
    """Make the app of a model's own port, where requests need not name the model: `table` has no other."""
    app = _new_app(table, settings, has_admin=False)
    for make_router in _MODEL_ROUTERS:
        app.include_router(make_router(table))
    app.include_router(status_router(table, metrics, lending, admin_key=settings.admin_key, only_model=name))
    return app


def _new_app(models: ModelTable, settings: ServerSettings, has_admin: bool) -> FastAPI:
    app = FastAPI(title="swiftkv", version=__version__, openapi_url=None)  # `ApiDocument` serves it
    app.state.body_threads = body_threads()
    app.state.rounds = settings.limits.rounds
    install_error_handlers(app)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return explain_invalid(error.errors()).response(request.url.path)

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it

    storage = settings.storage
    app.add_middleware(
        BodyLimitMiddleware,
        max_bytes=settings.max_body_bytes,
        limits=settings.limits,
        max_upload_bytes=None if storage is None else storage.limits.max_file_bytes + FORM_OVERHEAD_BYTES,
    )
    if storage is not None:
        app.include_router(batches_router(storage, settings.limits))
    if settings.protect_metrics:
        app.add_middleware(ProtectedPathsMiddleware, keys=[*settings.keys, settings.admin_key])
    if settings.keys:
        app.add_middleware(ApiKeyMiddleware, keys=settings.keys)
    if settings.allowed_hosts is not None:
        app.add_middleware(HostMiddleware, allowed_hosts=settings.allowed_hosts)
    if has_admin:
        app.add_middleware(AdminMiddleware, admin_key=settings.admin_key)
    app.add_middleware(CutOffMiddleware)
    if settings.trace_sink is not None:
        app.add_middleware(TraceMiddleware, sink=settings.trace_sink)
    app.add_middleware(RequestIdMiddleware, log=settings.request_log)  # added last, it sees a request first
    app.include_router(
        ApiDocument(app, models, asks_for_key=bool(settings.keys), protects_metrics=settings.protect_metrics).router()
    )
    return app


def _named_model(name: Annotated[str, Path(description="Name of the model")]) -> None:
    """Put the path parameter into the OpenAPI document; the routes read it from the path."""


__all__ = [
    "ApiError",
    "GatewayMetrics",
    "ModelChanges",
    "ModelHandle",
    "ServerSettings",
    "create_app",
    "create_model_app",
]
