"""The text of the metrics, made once for all scrapes that wait for it, and not too often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class ScrapePace:
    """The pace that all ports of a node share: one scrape is answered at a time, and not before its time."""

    def __init__(self, part_of_time: float = 0.1, interval_s: float = 0.0) -> None:
        """However often somebody asks, rendering takes at most `part_of_time` of the event loop's time, and between
        two of them there are `interval_s`."""
        self.part_of_time = part_of_time
        self.interval_s = interval_s
        self.lock = asyncio.Lock()
        self.not_before_s = 0.0


class Scrapes:
    """Answers scrapes with fresh metrics. Each rendering serves all scrapes that came before it began."""

    def __init__(self, observe: Callable[[], Awaitable[None]], render: Callable[[], bytes], pace: ScrapePace) -> None:
        """`observe` brings the figures up to date, `render` makes the text of them."""
        self._observe = observe
        self._render = render
        self._pace = pace
        self._next: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        """Return the metrics of some moment after this call."""
        if self._next is None:
            self._next = asyncio.create_task(self._answer_all())
        return await asyncio.shield(self._next)

    async def _answer_all(self) -> bytes:
        async with self._pace.lock:
            await asyncio.sleep(max(0.0, self._pace.not_before_s - time.monotonic()))
            self._next = None
            await self._observe()
            started_s = time.monotonic()
            text = self._render()
            ended_s = time.monotonic()
            rest_s = (ended_s - started_s) * (1 / self._pace.part_of_time - 1)
            self._pace.not_before_s = ended_s + max(rest_s, self._pace.interval_s)
            return text
