"""Files and batches as OpenAI's clients see them."""

from __future__ import annotations

import time
import uuid
from typing import Literal

from msgspec import Raw, Struct, field

UPLOAD_PURPOSE = "batch"

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def now_s() -> int:
    """Return the time as OpenAI's objects have it: whole seconds since 1970."""
    return int(time.time())


class StoredFile(Struct):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class StoredFileList(Struct):
    data: list[StoredFile]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class FileDeleted(Struct):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class LineError(Struct):
    """A mistake in a batch's input file. `line` counts from 1; null is for mistakes of the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class LineErrors(Struct):
    data: list[LineError]
    object: Literal["list"] = "list"


class RequestCounts(Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class OfflineBatch(Struct):
    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    object: Literal["batch"] = "batch"
    errors: LineErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    def enter(self, status: Status) -> None:
        """Change the status, and note when."""
        self.status = status
        setattr(self, f"{status}_at", now_s())


class OfflineBatchList(Struct):
    data: list[OfflineBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class LineResponse(Struct):
    status_code: int
    request_id: str
    body: Raw


class LineFailure(Struct):
    """The reason why a line has no response."""

    code: str
    message: str


class LineResult(Struct):
    """One line of an output file or an error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineFailure | None
