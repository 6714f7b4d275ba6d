"""OpenAI's routes for files and batches, the same on every port of a node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from swiftkv.server.batches.objects import UPLOAD_PURPOSE, OfflineBatch, new_id, now_s
from swiftkv.server.batches.storage import Storage
from swiftkv.server.batches.upload import receive_upload
from swiftkv.server.body import body_document, parsed
from swiftkv.server.documented import documented
from swiftkv.server.errors import ApiError
from swiftkv.server.limits import NodeLimits
from swiftkv.server.middleware import UPLOAD_PATH
from swiftkv.server.protocol import BatchBody
from swiftkv.server.streaming import json_response

_WINDOW_S = 24 * 3600
_MAX_FILES_IN_PAGE = 10_000
_MAX_BATCHES_IN_PAGE = 100
_PIECE_BYTES = 64 << 10
_BUSY_RETRY_S = 1.0
_BINARY = "application/octet-stream"

FileId = Annotated[str, Path(description="Id of the file", max_length=256)]
BatchId = Annotated[str, Path(description="Id of the batch", max_length=256)]
After = Annotated[str | None, Query(description="Id of the last object of the previous page", max_length=256)]
FilesLimit = Annotated[int, Query(ge=1, le=_MAX_FILES_IN_PAGE, description="The most objects in a page")]
BatchesLimit = Annotated[int, Query(ge=1, le=_MAX_BATCHES_IN_PAGE, description="The most objects in a page")]
Order = Annotated[Literal["asc", "desc"], Query(description="asc: the oldest first; desc: the newest first")]
Purpose = Annotated[Literal["batch", "batch_output"] | None, Query(description="Only files of this purpose")]

_UPLOAD_FORM = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "Requests, one JSON object a line"},
        "purpose": {"type": "string", "enum": [UPLOAD_PURPOSE]},
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}
_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD_FORM}}}}
_STORAGE_ERRORS = (503, 507)
_CONTENT: dict[int | str, dict[str, Any]] = {
    **documented("ErrorResponse", 400, 404, *_STORAGE_ERRORS),
    200: {
        "description": "OK",
        "content": {_BINARY: {"schema": {"type": "string", "format": "binary"}}},
    },
}


def batches_router(storage: Storage, limits: NodeLimits) -> APIRouter:
    router = APIRouter()
    router.include_router(_files_router(storage, limits))
    router.include_router(_jobs_router(storage))
    return router


def _files_router(storage: Storage, limits: NodeLimits) -> APIRouter:
    router = APIRouter()

    @router.post(
        UPLOAD_PATH, responses=documented("StoredFile", 400, 403, 413, 429, *_STORAGE_ERRORS), openapi_extra=_UPLOAD
    )
    async def upload_file(request: Request) -> Response:
        """Keep a file of requests for a batch."""
        with _place_of_file(limits):
            return json_response(await receive_upload(request, storage))

    @router.get(UPLOAD_PATH, responses=documented("StoredFileList", 400, *_STORAGE_ERRORS))
    async def list_files(
        after: After = None, limit: FilesLimit = _MAX_FILES_IN_PAGE, order: Order = "desc", purpose: Purpose = None
    ) -> Response:
        return await storage.call(lambda store: json_response(store.files(after, limit, order, purpose)))

    @router.get("/v1/files/{file_id}", responses=documented("StoredFile", 400, 404, *_STORAGE_ERRORS))
    async def retrieve_file(file_id: FileId) -> Response:
        return json_response(await storage.call(lambda store: store.file(file_id)))

    @router.delete("/v1/files/{file_id}", responses=documented("FileDeleted", 400, 404, 409, *_STORAGE_ERRORS))
    async def delete_file(file_id: FileId) -> Response:
        """Delete a file, unless a batch that has not ended reads it."""
        deleted, num_bytes = await storage.call(lambda store: store.delete_file(file_id))
        storage.release(num_bytes)
        return json_response(deleted)

    @router.get("/v1/files/{file_id}/content", responses=_CONTENT, response_class=StreamingResponse)
    async def download_file(file_id: FileId) -> Response:
        with ExitStack() as held:
            held.enter_context(_place_of_file(limits))
            content = held.enter_context(await storage.call(lambda store: store.open_file(file_id)))
            return _Download(content, held.pop_all())

    return router


def _jobs_router(storage: Storage) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/batches",
        responses=documented("OfflineBatch", 400, 404, 413, 429, *_STORAGE_ERRORS),
        openapi_extra=body_document(BatchBody),
    )
    async def create_batch(body: Annotated[BatchBody, parsed(BatchBody)]) -> Response:
        """Begin a batch: the requests of its file are checked, then run in the capacity that other requests leave."""
        created_s = now_s()
        batch = OfflineBatch(
            new_id("batch_"),
            body.endpoint,
            body.input_file_id,
            created_s,
            created_s + _WINDOW_S,
            metadata=body.metadata,
        )
        await storage.call(lambda store: store.add_batch(batch))
        storage.changed.set()
        return json_response(batch)

    @router.get("/v1/batches", responses=documented("OfflineBatchList", 400, *_STORAGE_ERRORS))
    async def list_batches(after: After = None, limit: BatchesLimit = 20) -> Response:
        return await storage.call(lambda store: json_response(store.batches(after, limit)))

    @router.get("/v1/batches/{batch_id}", responses=documented("OfflineBatch", 400, 404, *_STORAGE_ERRORS))
    async def retrieve_batch(batch_id: BatchId) -> Response:
        return json_response(await storage.call(lambda store: store.batch(batch_id)))

    @router.post("/v1/batches/{batch_id}/cancel", responses=documented("OfflineBatch", 400, 404, 409, *_STORAGE_ERRORS))
    async def cancel_batch(batch_id: BatchId) -> Response:
        """Cancel a batch. Its results so far become files."""
        batch = await storage.call(lambda store: store.cancel(batch_id))
        storage.changed.set()
        return json_response(batch)

    return router


@contextmanager
def _place_of_file(limits: NodeLimits) -> Iterator[None]:
    """Count a file that a request holds open. Raises `ApiError` 503 if the node has no descriptor for it."""
    if not limits.take_file():
        message = "this node has too many connections and files open; try again"
        raise ApiError(503, message, code="too_many_connections", retry_after_s=_BUSY_RETRY_S)
    try:
        yield
    finally:
        limits.leave_file()


class _Download(StreamingResponse):
    """Sends a file, and closes it however the response ends: sent, failed, or the client gone.

    There is no Content-Length: a client that knew the length would send its next request after the last byte, perhaps
    before the response has ended here.
    """

    def __init__(self, content: BinaryIO, held: ExitStack) -> None:
        """`held` closes it."""
        super().__init__(_pieces(content), media_type=_BINARY)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


async def _pieces(content: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(content.read, _PIECE_BYTES):
        yield piece
