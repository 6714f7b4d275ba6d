"""Threads with a bounded queue. Work that comes when it is full is refused; work whose caller leaves is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from swiftkv.server.errors import ApiError

T = TypeVar("T")

_BUSY_RETRY_S = 1.0


class BoundedThreads:
    """A few threads for one kind of work, used from one event loop. The queue is here and not in the executor.

    So work whose caller has gone is dropped at once, with everything that it holds.
    """

    def __init__(self, purpose: str, *, workers: int = 2, max_waiting: int = 1024, max_bytes: int = 64 << 20) -> None:
        """Start no thread yet. `purpose` completes "too many requests wait for …".

        `max_waiting` and `max_bytes` bound the work that waits: its pieces, and the bytes that these were said to hold.
        """
        self._purpose = purpose
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._num_waiting = 0
        self._bytes_waiting = 0
        self.is_closed = False
        """Whether the threads begin nothing more."""
        self._free = asyncio.Semaphore(workers)
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix=purpose.replace(" ", "-"))

    async def run(self, work: Callable[[], T], num_bytes: int = 0) -> T:
        """Return the result of `work`, which holds about `num_bytes` while it waits.

        When the caller is cancelled, work that has not begun never does.

        Raises:
            ApiError: 429 if too many wait already, 503 if the threads are closed before the work begins.
        """
        is_full = self._num_waiting >= self._max_waiting or self._bytes_waiting + num_bytes > self._max_bytes
        if self._num_waiting and is_full:
            raise ApiError(
                429, f"too many requests wait for {self._purpose}", code="queue_full", retry_after_s=_BUSY_RETRY_S
            )
        self._num_waiting += 1
        self._bytes_waiting += num_bytes
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
            self._bytes_waiting -= num_bytes
        if self.is_closed:
            self._free.release()
            raise ApiError(503, f"{self._purpose} has stopped; try again", retry_after_s=_BUSY_RETRY_S)
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        future.add_done_callback(self._ended)
        return await asyncio.shield(future)

    def close(self) -> None:
        """End the threads once they have finished the work that they have begun."""
        self.is_closed = True
        self._executor.shutdown(wait=False)

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._free.release()
        if not future.cancelled():
            future.exception()  # the caller may be gone; otherwise `run` raises it there
