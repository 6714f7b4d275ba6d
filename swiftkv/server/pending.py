"""Calls to another process that wait for their answers, which come as messages with the number of the call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class PendingCalls(Generic[T]):
    """The calls that wait, by number. Use it from one event loop."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[T]] = {}

    @contextmanager
    def new(self) -> Iterator[tuple[int, asyncio.Future[T]]]:
        """Return the number of a new call, and its answer to be; the call waits until the context ends."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            yield number, answer
        finally:
            del self._waiting[number]
            if answer.done() and not answer.cancelled():
                answer.exception()  # asyncio logs an exception that nobody asked for

    def answered(self, number: int, answer: T) -> None:
        """Hand an answer to the call that waits for it, if it still does."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Fail all calls that wait: nobody will answer them."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
