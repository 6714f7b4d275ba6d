"""The text of the metrics: made once for all scrapes that wait for it, in short slices of time, and not too often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

SLICE_S = 0.0005
"""Rendering lets the rest of the event loop run after this time, at the end of a piece."""


class ScrapePace:
    """The pace that all ports of a node share: one rendering at a time, with a rest after each."""

    def __init__(self, part_of_time: float = 0.1, interval_s: float = 0.0) -> None:
        """Limit rendering to `part_of_time` of the event loop's time, and to one in `interval_s`, however many ask."""
        self.part_of_time = part_of_time
        self.interval_s = interval_s
        self.lock = asyncio.Lock()
        self.not_before_s = 0.0

    def rest_after(self, rendering_s: float) -> None:
        """Note that a rendering has ended now, which took the event loop for `rendering_s`."""
        rest_s = rendering_s * (1 / self.part_of_time - 1)
        self.not_before_s = time.monotonic() + max(rest_s, self.interval_s)


class Scrapes:
    """Answers scrapes with fresh metrics. Each rendering serves all scrapes that came before it began."""

    def __init__(
        self, observe: Callable[[], Awaitable[None]], render: Callable[[], Iterable[bytes]], pace: ScrapePace
    ) -> None:
        """`observe` brings the figures up to date, `render` makes their text, piece by piece.

        Figures may change between two pieces.
        """
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
            text, rendering_s = await _joined(self._render())
            self._pace.rest_after(rendering_s)
            return text


async def _joined(pieces: Iterable[bytes]) -> tuple[bytes, float]:
    """Return the whole text, and the seconds that making it took, without those in which other tasks ran."""
    made: list[bytes] = []
    total_s = 0.0
    begun_s = time.monotonic()
    for piece in pieces:
        made.append(piece)
        slice_s = time.monotonic() - begun_s
        if slice_s >= SLICE_S:
            total_s += slice_s
            await asyncio.sleep(0)
            begun_s = time.monotonic()
    return b"".join(made), total_s + time.monotonic() - begun_s
