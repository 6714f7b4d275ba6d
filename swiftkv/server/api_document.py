"""The OpenAPI document of a port, at `/openapi.json` and `/docs`, kept until models come or go."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import HTMLResponse, Response

from swiftkv.server.body import body_schemas
from swiftkv.server.docs_page import HEADERS, docs_page
from swiftkv.server.documented import documented_error
from swiftkv.server.middleware import ADMIN_PATH, PROTECTABLE_PATHS, is_open
from swiftkv.server.models import ModelTable
from swiftkv.server.responses import openapi_components


@dataclass(frozen=True)
class _Written:
    """The two documents of a port, valid while it serves `models`."""

    models: list[str]
    document: bytes
    page: bytes


class ApiDocument:
    """Describes the routes of one port to programs and to people.

    Anybody may ask for the document, and writing its quarter of a megabyte takes 150 ms: a thread writes it, and it is
    kept until models come or go.
    """

    def __init__(self, app: FastAPI, models: ModelTable, *, asks_for_key: bool, protects_metrics: bool) -> None:
        self._app = app
        self._models = models
        self._asks_for_key = asks_for_key
        self._protects_metrics = protects_metrics
        self._written: _Written | None = None
        self._lock = asyncio.Lock()

    def router(self) -> APIRouter:
        router = APIRouter(include_in_schema=False)

        @router.get("/openapi.json")
        async def document() -> Response:
            return Response((await self._current()).document, media_type="application/json")

        @router.get("/docs")
        async def docs() -> Response:
            return HTMLResponse((await self._current()).page, headers=HEADERS)

        return router

    async def _current(self) -> _Written:
        async with self._lock:
            names = self._models.names
            if self._written is None or self._written.models != names:
                self._written = await asyncio.to_thread(self._write, names)
            return self._written

    def _write(self, names: list[str]) -> _Written:
        document = self._document(names)
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        return _Written(names, text.encode(), docs_page(document).encode())

    def _document(self, models: list[str]) -> dict[str, Any]:
        """Return FastAPI's document with our answers, our errors (never its own 422), and our keys."""
        document = get_openapi(title=self._app.title, version=self._app.version, routes=self._app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(body_schemas())
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        for body in schemas.values():
            if "model" in body.get("properties", {}):
                body["properties"]["model"] = {"enum": [*models, None], "description": "The model that answers"}
        schemas.update(openapi_components())
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                for parameter in operation.get("parameters", ()):
                    if parameter["in"] == "path" and parameter["name"] not in ("file_id", "batch_id", "pin_id"):
                        parameter["schema"]["enum"] = models
                if refused := self._guard(operation, path):
                    operation["responses"][str(refused)] = documented_error(path)
        bearer = {"type": "http", "scheme": "bearer"}
        schemes: dict[str, Any] = {"admin": bearer}
        if self._asks_for_key:
            schemes |= {"bearer": bearer, "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
        document["components"]["securitySchemes"] = schemes
        return document

    def _guard(self, operation: dict[str, Any], path: str) -> int | None:
        """Note which key an operation needs; return the status without the key, or `None` if it needs none."""
        admins_key: dict[str, list[str]] = {"admin": []}
        models_keys: list[dict[str, list[str]]] = [{"bearer": []}, {"x-api-key": []}] if self._asks_for_key else []
        if path.startswith(f"{ADMIN_PATH}/"):
            security = [admins_key]
        elif path in PROTECTABLE_PATHS and self._protects_metrics:
            security = [*models_keys, admins_key]
        else:
            security = [] if is_open(path) else models_keys
        if not security:
            return None
        operation["security"] = security
        return 401
