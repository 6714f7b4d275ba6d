"""The routes of `/admin`. `AdminMiddleware` has decided before who may ask."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query
from pydantic import WithJsonSchema
from starlette.responses import Response

from swiftkv.server.body import body_document, parsed
from swiftkv.server.engine_state import EngineState
from swiftkv.server.lending import NodeLending
from swiftkv.server.middleware import ADMIN_PATH
from swiftkv.server.models import ModelTable
from swiftkv.server.overview import Overviews
from swiftkv.server.protocol import BudgetBody, Switch
from swiftkv.server.responses import ModelStart
from swiftkv.server.routes import BODY_ERRORS, documented
from swiftkv.server.streaming import json_response

Name = Annotated[str, Path(description="Name of the model")]
DryRun = Annotated[
    Switch, Query(description="Only say what would be recalled"), WithJsonSchema({"type": "boolean", "default": False})
]


def admin_router(models: ModelTable, lending: NodeLending) -> APIRouter:
    router = APIRouter(prefix=ADMIN_PATH)
    overviews = Overviews(models, lending)

    @router.post("/models/{model}/start", status_code=202, responses=documented("ModelStart", 404, 409, ok=202))
    async def start_model(model: Name) -> Response:
        """Start a model that stays down, for instance because its engine had died too often."""
        client = models.get(model).client
        client.want()
        return json_response(ModelStart(model, str(EngineState.RESTARTING)), 202)

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
        """Set the most that a worker lends. What it lends beyond that is recalled before the answer comes."""
        return json_response(await lending.set_budget(worker, body.budget, dry_run == "true"))

    @router.get("/pools/{model}", responses=documented("PoolView", 404, 409, 503))
    async def show_pool(model: Name) -> Response:
        """Show every extent of a model's links, its owner and epoch, and the blocks of its pool by state."""
        pool = await lending.pool(model)
        # A large pool lent by small extents has a million of them.
        return Response(await asyncio.to_thread(msgspec.json.encode, pool), media_type="application/json")

    return router
