"""The tasks that run as long as the node does, in one place that notices when one of them fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class Tasks:
    """Long-lived tasks. If a task raises, or is cancelled by other code, it has failed, and so has the node.

    Create it inside the event loop.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure.add_done_callback(lambda failure: failure.exception())  # it counts as seen: it was logged

    @property
    def failure(self) -> asyncio.Future[None]:
        """A future that is done when a task has failed, with that task's exception."""
        return self._failure

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._on_end)
        return task

    async def end(self, task: asyncio.Task[None]) -> None:
        """Cancel one of the tasks, which does not count as a failure."""
        self._running.discard(task)
        task.cancel()
        await asyncio.wait({task})

    async def close(self) -> None:
        """Cancel the tasks that still run."""
        running = list(self._running)
        self._running.clear()
        for task in running:
            task.cancel()
        for task, outcome in zip(running, await asyncio.gather(*running, return_exceptions=True), strict=True):
            if isinstance(outcome, Exception):
                logger.error("%s failed while it was being stopped", task.get_name(), exc_info=outcome)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        is_ours = task not in self._running
        self._running.discard(task)
        if is_ours:
            return
        error = RuntimeError("it was cancelled") if task.cancelled() else task.exception()
        if error is None:
            return
        logger.critical("%s failed, which ends the node", task.get_name(), exc_info=error)
        if not self._failure.done():
            self._failure.set_exception(error)
