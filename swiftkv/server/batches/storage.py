"""Access to a `Store` from an event loop: its own thread, the room that is left, and errors that say what to do."""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from swiftkv.errors import ConfigError
from swiftkv.server.batches.store import Store
from swiftkv.server.errors import ApiError
from swiftkv.server.threads import BoundedThreads
from swiftkv.units import format_size

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_S = 5.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """The most bytes of one file, of all files and of one line, and the most requests of one batch."""

    max_file_bytes: int = 200 << 20
    max_storage_bytes: int = 10 << 30
    max_line_bytes: int = 16 << 20
    max_requests: int = 50_000


class Storage:
    """Files and batches, for routes and for the runner. Call its methods from one event loop.

    `changed` is set when the runner may have something to do.
    """

    @classmethod
    async def open(cls, directory: Path, limits: StorageLimits) -> Storage:
        """Open the files and batches of a directory. Raises `ConfigError` if it cannot be read or written."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        loop = asyncio.get_running_loop()
        try:
            store = await loop.run_in_executor(thread, lambda: Store(directory))
            num_bytes = await loop.run_in_executor(thread, lambda: store.num_bytes)
        except (OSError, sqlite3.Error) as error:
            message = f"node.state_dir: {directory} cannot be used: {error}; free some space, or name another directory"
            raise ConfigError(message) from None
        return cls(limits, thread, store, num_bytes)

    def __init__(self, limits: StorageLimits, thread: ThreadPoolExecutor, store: Store, num_bytes: int) -> None:
        self.limits = limits
        self.changed = asyncio.Event()
        self.upload_threads = BoundedThreads("the writing of uploads", workers=2)
        self._thread = thread
        self._store = store
        self._num_bytes = num_bytes

    async def call(self, work: Callable[[Store], T]) -> T:
        """Return the result of `work`, which has the store to itself. Work whose caller has gone never begins.

        Raises:
            ApiError: what `work` raised; 507 if the disk is full, 503 if it fails otherwise.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._store))
        except (OSError, sqlite3.Error) as error:
            raise failure(error) from error

    async def close(self) -> None:
        """Close the store once its earlier calls are done; an error is logged, for nobody could handle it."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        except (OSError, sqlite3.Error) as error:
            logger.warning("the database of files and batches was not closed properly: %s", error)
        finally:
            self._thread.shutdown(wait=False)  # it may hang with the disk

    def reserve(self, num_bytes: int) -> None:
        """Reserve room for `num_bytes` more of files; `release` them when they are gone.

        Raises:
            ApiError: 507 if files have no more room.
        """
        if self._num_bytes + num_bytes > self.limits.max_storage_bytes:
            raise ApiError(
                507,
                f"files and uploads take {format_size(self._num_bytes)} of "
                f"{format_size(self.limits.max_storage_bytes)}; delete some, or raise node.batches.max_storage",
                code="storage_full",
            )
        self._num_bytes += num_bytes

    def note(self, num_bytes: int) -> None:
        """Count bytes of files that are there already."""
        self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes


def failure(error: OSError | sqlite3.Error) -> ApiError:
    """Return the error to report when the disk fails."""
    if isinstance(error, OSError):
        is_full, reason = error.errno in _FULL, error.strerror or str(error)
    else:
        is_full, reason = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL, str(error)
    if is_full:
        message = "the disk that keeps this node's files (node.state_dir) is full; free some space"
        return ApiError(507, message, code="disk_full", retry_after_s=_RETRY_S)
    message = f"the disk that keeps this node's files (node.state_dir) fails: {reason}"
    return ApiError(503, message, code="storage_failed", retry_after_s=_RETRY_S)
