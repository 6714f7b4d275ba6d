"""The queue for a few permits to work. Senders take turns in it, and none can fill it for another."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from swiftkv.server.errors import ApiError
from swiftkv.server.tenants import ANYBODY, Sender

_BUSY_RETRY_S = 1.0
_Flow = tuple[str | None, int]  # the tenant, `None` where there are none, and the number of the flow


@dataclass(eq=False, slots=True)
class _Waiting:
    """A piece of work that waits."""

    num_bytes: int
    permit: asyncio.Future[None]


class FairQueue:
    """Gives permits to pieces of work, the oldest of each sender in turn. Use it from one event loop.

    Work whose caller is cancelled while it waits leaves the queue at once, with everything that it holds.
    """

    def __init__(self, purpose: str, *, num_permits: int, max_waiting: int, max_bytes: int) -> None:
        """Every permit is free at first. `purpose` completes "too many requests wait for …".

        `max_waiting` and `max_bytes` bound the work that waits: its pieces, and the bytes that these were said to hold.
        Tenants divide both by their weights; each may always have one piece waiting.
        """
        self._purpose = purpose
        self._num_free = num_permits
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._queues: OrderedDict[_Flow, list[_Waiting]] = OrderedDict()  # none is empty; the next turn is the first's
        self.is_closed = False
        """Whether no more permits are given."""

    async def take(self, sender: Sender = ANYBODY, num_bytes: int = 0) -> None:
        """Take a permit for work that holds about `num_bytes` while it waits. The caller must `give_back` the permit.

        Raises:
            ApiError: 429 if too much of the sender's work waits already, 503 if the queue is closed.
        """
        if self.is_closed:
            raise self._closed()
        if self._num_free:
            self._num_free -= 1
            return
        if not self._has_room(sender, num_bytes):
            raise ApiError(
                429, f"too many requests wait for {self._purpose}", code="queue_full", retry_after_s=_BUSY_RETRY_S
            )
        flow = sender.name, sender.flow
        waiting = _Waiting(num_bytes, asyncio.get_running_loop().create_future())
        self._queues.setdefault(flow, []).append(waiting)
        try:
            await waiting.permit
        except asyncio.CancelledError:
            if waiting.permit.cancelled():
                self._leave(flow, waiting)
            elif waiting.permit.exception() is None:  # the permit came before the loop told the caller
                self.give_back()
            raise
        if self.is_closed:  # since the permit came, before the loop told the caller
            raise self._closed()

    def give_back(self) -> None:
        """Give a permit back: to the work whose turn it is, if any waits."""
        while self._queues:
            flow, queue = self._queues.popitem(last=False)
            waiting = queue.pop(0)
            if queue:
                self._queues[flow] = queue
            if not waiting.permit.done():  # its caller may have been cancelled, and not have left yet
                waiting.permit.set_result(None)
                return
        self._num_free += 1

    @property
    def num_waiting(self) -> int:
        """The number of pieces of work that wait."""
        return sum(map(len, self._queues.values()))

    def close(self) -> None:
        """Refuse the work that waits, and all that comes."""
        self.is_closed = True
        for queue in self._queues.values():
            for waiting in queue:
                if not waiting.permit.done():
                    waiting.permit.set_exception(self._closed())
        self._queues.clear()

    def _has_room(self, sender: Sender, num_bytes: int) -> bool:
        own = [each for (tenant, _), queue in self._queues.items() if tenant == sender.name for each in queue]
        total_bytes = sum(each.num_bytes for each in own) + num_bytes
        fits = len(own) < sender.part * self._max_waiting and total_bytes <= sender.part * self._max_bytes
        return fits or not own

    def _leave(self, flow: _Flow, waiting: _Waiting) -> None:
        queue = self._queues.get(flow, [])
        if waiting in queue:  # not if its permit came as its caller was cancelled
            queue.remove(waiting)
            if not queue:
                del self._queues[flow]

    def _closed(self) -> ApiError:
        return ApiError(503, f"{self._purpose} has stopped; try again", retry_after_s=_BUSY_RETRY_S)
