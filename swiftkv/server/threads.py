"""Threads with a bounded queue, in which senders take turns. Work that has not begun is dropped with its caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from swiftkv.server.fair_queue import FairQueue
from swiftkv.server.tenants import ANYBODY, Sender

T = TypeVar("T")


class BoundedThreads:
    """A few threads for one kind of work, used from one event loop."""

    def __init__(self, purpose: str, *, workers: int = 2, max_waiting: int = 1024, max_bytes: int = 64 << 20) -> None:
        """Start no thread yet. `purpose`, `max_waiting` and `max_bytes` are as in `FairQueue`."""
        self._queue = FairQueue(purpose, num_permits=workers, max_waiting=max_waiting, max_bytes=max_bytes)
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix=purpose.replace(" ", "-"))

    @property
    def is_closed(self) -> bool:
        """Whether the threads begin nothing more."""
        return self._queue.is_closed

    @property
    def num_waiting(self) -> int:
        """The number of pieces of work that have not begun."""
        return self._queue.num_waiting

    async def run(self, work: Callable[[], T], num_bytes: int = 0, sender: Sender = ANYBODY) -> T:
        """Return the result of `work`, which holds about `num_bytes` while it waits.

        When the caller is cancelled, work that has not begun never does.

        Raises:
            ApiError: 429 if too much of the sender's work waits, 503 if the threads are closed before the work begins.
        """
        await self._queue.take(sender, num_bytes)
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        future.add_done_callback(self._ended)
        return await asyncio.shield(future)

    def close(self) -> None:
        """End the threads once they have finished the work that they have begun."""
        self._queue.close()
        self._executor.shutdown(wait=False)

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._queue.give_back()
        if not future.cancelled():
            future.exception()  # the caller may be gone; otherwise `run` raises it there
