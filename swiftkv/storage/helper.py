"""A second thread for calls that are large enough to be divided."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from swiftkv.latency import prefer_latency

T = TypeVar("T")


class Helper:
    """Does one half of a call while the caller does the other.

    It helps one call at a time; others do both halves themselves. The thread begins with the first call, and ends with
    the process if something keeps it.
    """

    def __init__(self) -> None:
        self._is_free = threading.Lock()
        self._wanted: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # under `_is_free`

    def both(self, mine: Callable[[], T], other: Callable[[], T]) -> tuple[T, T]:
        """Return the results of both, once both have ended; raise what either raised."""
        if not self._is_free.acquire(blocking=False):
            return mine(), other()
        try:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="storage helper", daemon=True)
                self._thread.start()
            done: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._wanted.put((other, done))
            try:
                first = mine()
            finally:
                second = done.get()
        finally:
            self._is_free.release()
        if isinstance(second, Exception):
            raise second
        return first, second

    def close(self) -> None:
        """End the thread, once what it does is done."""
        self._wanted.put(None)

    def _run(self) -> None:
        prefer_latency()  # as the thread that waits for it
        while (wanted := self._wanted.get()) is not None:
            work, done = wanted
            try:
                done.put(work())
            except Exception as error:  # noqa: BLE001 (the caller raises it)
                done.put(error)
