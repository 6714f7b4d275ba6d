"""The routes of `/admin`. `AdminMiddleware` has already decided who may use them."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Literal, Protocol

import msgspec
from fastapi import APIRouter, Depends, Path, Query
from pydantic import WithJsonSchema
from starlette.responses import Response

from swiftkv.server.body import body_document, parsed
from swiftkv.server.documented import BODY_ERRORS, documented
from swiftkv.server.engine_state import EngineState
from swiftkv.server.lending import NodeLending
from swiftkv.server.middleware import ADMIN_PATH
from swiftkv.server.models import ModelTable
from swiftkv.server.node_views import ModelChange, ModelFiles, ModelFilesList, ModelStart, Sleeping, StorageOverview
from swiftkv.server.overview import Overviews
from swiftkv.server.parameters import no_unknown_parameters
from swiftkv.server.protocol import BudgetBody, ModelSection, StorageSection, Switch
from swiftkv.server.sleep import SleepLevel
from swiftkv.server.streaming import json_response
from swiftkv.units import DURATION_PATTERN, parse_duration

Name = Annotated[str, Path(description="Name of the model")]
DryRun = Annotated[
    Switch, Query(description="Only say what would be recalled"), WithJsonSchema({"type": "boolean", "default": False})
]
Level = Annotated[
    Literal["1", "2"], Query(description="1: the engine keeps its pool and lends it; 2: its process ends")
]
Timeout = Annotated[
    str,
    Query(
        description="How long to wait for requests in flight, such as 500ms, 60s or 2m",
        pattern=DURATION_PATTERN,
    ),
]
Now = Annotated[
    Switch, Query(description="Abort requests in flight"), WithJsonSchema({"type": "boolean", "default": False})
]


class ModelChanges(Protocol):
    """Adds models to the node, removes them and loads them anew; see `swiftkv.model_changes`."""

    async def add(self, section: object) -> str: ...

    async def remove(self, name: str, timeout_s: float, *, now: bool) -> None: ...

    async def reload(self, name: str, timeout_s: float, *, now: bool) -> None: ...


def admin_router(models: ModelTable, lending: NodeLending, changes: ModelChanges) -> APIRouter:
    router = APIRouter(prefix=ADMIN_PATH, dependencies=[Depends(no_unknown_parameters)])
    for part in (
        _model_changes_router(models, changes),
        _sleep_router(models),
        _lending_router(models, lending),
        _storage_router(models),
    ):
        router.include_router(part)
    return router


def _model_changes_router(models: ModelTable, changes: ModelChanges) -> APIRouter:
    router = APIRouter()

    @router.get("/models", responses=documented("ModelFilesList"))
    async def show_models() -> Response:
        """Show where the files of every model are."""
        files = [ModelFiles(model.name, list(model.names), str(model.model_dir)) for model in models.all()]
        return json_response(ModelFilesList(files))

    @router.post(
        "/models", status_code=201, responses=documented("ModelChange", *BODY_ERRORS, 409, ok=201),
        openapi_extra=body_document(ModelSection),
    )  # fmt: skip
    async def add_model(body: Annotated[ModelSection, parsed(ModelSection)]) -> Response:
        """Add a model: the body is its section of the node's file. The answer comes once the model serves."""
        begun_s = time.monotonic()
        name = await changes.add(body.model_extra)
        return json_response(_change(models, name, begun_s), 201)

    @router.delete("/models/{model}", responses=documented("ModelChange", 400, 404, 409))
    async def remove_model(model: Name, timeout: Timeout = "30s", now: Now = "false") -> Response:
        """Remove a model once its requests in flight have ended and the memory that it lends is back."""
        begun_s = time.monotonic()
        await changes.remove(model, parse_duration(timeout), now=now == "true")
        return json_response(ModelChange(model, "removed", time.monotonic() - begun_s))

    @router.post("/models/{model}/reload", responses=documented("ModelChange", 400, 404, 409, 503))
    async def reload_model(model: Name, timeout: Timeout = "30s", now: Now = "false") -> Response:
        """Serve a model from the files that are in its directory now. The answer comes once the model serves."""
        begun_s = time.monotonic()
        await changes.reload(model, parse_duration(timeout), now=now == "true")
        return json_response(_change(models, model, begun_s))

    return router


def _sleep_router(models: ModelTable) -> APIRouter:
    """Return the routes that start a model which is down, put one to sleep and wake it."""
    router = APIRouter()

    @router.post("/models/{model}/start", status_code=202, responses=documented("ModelStart", 404, 409, ok=202))
    async def start_model(model: Name) -> Response:
        """Start a model that stays down, for instance because its engine had died too often."""
        client = models.get(model).client
        client.want()
        return json_response(ModelStart(model, str(EngineState.RESTARTING)), 202)

    @router.post("/models/{model}/sleep", responses=documented("ModelChange", 400, 404, 409))
    async def put_to_sleep(model: Name, level: Level = "1", timeout: Timeout = "30s", now: Now = "false") -> Response:
        """Put a model to sleep once its requests in flight have ended; others may use its memory until it is woken."""
        handle = models.get(model)
        begun_s = time.monotonic()
        await handle.sleeper.sleep(SleepLevel(int(level)), parse_duration(timeout), now=now == "true")
        return json_response(_change(models, model, begun_s))

    @router.post("/models/{model}/wake", responses=documented("ModelChange", 404, 503))
    @router.post("/models/{model}/wake_up", responses=documented("ModelChange", 404, 503))
    async def wake(model: Name) -> Response:
        """Wake a model. The answer comes when it serves."""
        begun_s = time.monotonic()
        await models.get(model).sleeper.wake()
        return json_response(_change(models, model, begun_s))

    @router.get("/models/{model}/is_sleeping", responses=documented("Sleeping", 404))
    async def is_sleeping(model: Name) -> Response:
        """Tell whether a model sleeps."""
        return json_response(Sleeping(models.get(model).client.state is EngineState.ASLEEP))

    return router


def _lending_router(models: ModelTable, lending: NodeLending) -> APIRouter:
    """Return the routes that show what models do and lend, and the one that changes how much."""
    router = APIRouter()
    overviews = Overviews(models, lending)

    @router.get("/overview", responses=documented("NodeOverview"))
    async def show_overview() -> Response:
        """Show what all models do now: their engines, requests, pools, waits and lending."""
        return Response(await overviews.latest(), media_type="application/json")

    @router.get("/lending", responses=documented("LendingOverview"))
    async def show_lending() -> Response:
        """Show what every model lends and borrows now."""
        return json_response(await lending.overview())

    @router.patch(
        "/lending/{worker}",
        responses=documented("BudgetChange", *BODY_ERRORS, 409, 429, 503),
        openapi_extra=body_document(BudgetBody),
    )
    async def set_budget(
        worker: Name, body: Annotated[BudgetBody, parsed(BudgetBody)], dry_run: DryRun = "false"
    ) -> Response:
        """Set the most that a worker lends. Memory lent beyond that is recalled before the answer comes."""
        change = lending.try_budget if dry_run == "true" else lending.set_budget
        return json_response(await change(worker, body.budget))

    @router.get("/pools/{model}", responses=documented("PoolView", 404, 409, 503))
    async def show_pool(model: Name) -> Response:
        """Show every extent of a model's links, its owner and epoch, and the blocks of its pool by state."""
        pool = await lending.pool(model)
        # A large pool that is lent in small extents has a million extents.
        return Response(await asyncio.to_thread(msgspec.json.encode, pool), media_type="application/json")

    return router


def _storage_router(models: ModelTable) -> APIRouter:
    router = APIRouter()

    @router.get("/storage", responses=documented("StorageOverview"))
    async def show_storage() -> Response:
        """Show the storage that is attached to every model."""
        return json_response(StorageOverview([model.storage.view() for model in models.all()]))

    @router.post(
        "/storage/{model}/attach", responses=documented("StorageChange", *BODY_ERRORS, 409, 503),
        openapi_extra=body_document(StorageSection),
    )  # fmt: skip
    async def attach_storage(model: Name, body: Annotated[StorageSection, parsed(StorageSection)]) -> Response:
        """Attach storage to a model: the body is a `tiers.storage` section. Requests in flight go on."""
        return json_response(await models.get(model).storage.attach(body.model_extra or {}))

    @router.post("/storage/{model}/detach", responses=documented("StorageChange", 404, 409, 503))
    async def detach_storage(model: Name) -> Response:
        """Detach the storage of a model; the storage keeps its blocks. Requests in flight go on."""
        return json_response(await models.get(model).storage.detach())

    return router


def _change(models: ModelTable, name: str, begun_s: float) -> ModelChange:
    return ModelChange(name, str(models.get(name).client.state), time.monotonic() - begun_s)
