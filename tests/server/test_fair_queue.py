"""The queue for permits to work: no permit is lost, senders take turns, and none fills the queue for another."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from swiftkv.server.errors import ApiError
from swiftkv.server.fair_queue import FairQueue
from swiftkv.server.tenants import ANYBODY, Sender

FEW = 8
SENDERS = [
    Sender(flow=0, name="large", part=0.75),
    Sender(flow=1, name="small", part=0.25),
    ANYBODY,
    Sender(flow=7),  # without tenants, a header's flow has turns of its own, but no part
]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@dataclass(eq=False)
class Taking:
    sender: Sender
    num_bytes: int
    task: asyncio.Task[None]


class History:
    """A fair queue with two permits, beside the tasks that hold them or wait, oldest first."""

    def __init__(self) -> None:
        self.queue = FairQueue("this", num_permits=2, max_waiting=FEW, max_bytes=100)
        self.holding: list[Taking] = []
        self.waiting: list[Taking] = []
        self.passed: dict[Taking, Counter[Sender]] = {}

    async def take(self, sender: Sender, num_bytes: int) -> None:
        own = [each for each in self.waiting if each.sender.name == sender.name]
        taking = Taking(sender, num_bytes, asyncio.create_task(self.queue.take(sender, num_bytes)))
        await settle()
        if len(self.holding) < 2:
            assert taking.task.done()
            self.holding.append(taking)
            return
        used_bytes = sum(each.num_bytes for each in own)
        if own and (len(own) >= sender.part * FEW or used_bytes + num_bytes > sender.part * 100):
            error = taking.task.exception()
            assert isinstance(error, ApiError)
            assert error.status == 429
            return
        assert not taking.task.done()
        self.waiting.append(taking)
        self.passed[taking] = Counter()

    async def cancel(self, number: int) -> None:
        if self.waiting:
            taking = self.waiting.pop(number % len(self.waiting))
            taking.task.cancel()
            await settle()
            assert taking.task.cancelled()

    async def give_back(self) -> None:
        if self.holding:
            self.holding.pop(0)
            self.queue.give_back()
            await self.somebody_is_served()

    async def cancel_as_a_permit_comes_free(self, number: int, *, cancel_first: bool) -> None:
        """Cancel the one whose turn it is, or another, before the loop has told it."""
        if self.holding and self.waiting:
            taking = self.waiting.pop(number % len(self.waiting))
            self.holding.pop(0)
            if cancel_first:
                taking.task.cancel()
            self.queue.give_back()
            taking.task.cancel()
            await settle()
            assert taking.task.cancelled()
            await self.somebody_is_served()

    async def somebody_is_served(self) -> None:
        await settle()
        served = [each for each in self.waiting if each.task.done()]
        assert len(served) == min(1, len(self.waiting))
        for taking in served:
            own = [each for each in self.waiting if each.sender == taking.sender]
            assert taking is own[0]
            self.waiting.remove(taking)
            self.holding.append(taking)
            oldest = {each.sender: each for each in reversed(self.waiting)}
            for sender, other in oldest.items():
                if sender != taking.sender:
                    self.passed[other][taking.sender] += 1
                    assert self.passed[other][taking.sender] == 1  # it has a turn before another has two


@pytest.mark.parametrize("seed", range(100))
def test_no_history_loses_a_permit_or_a_turn(seed: int) -> None:
    random = Random(seed)

    async def go() -> None:
        history = History()
        for _ in range(60):
            match random.choice(["take", "take", "take", "cancel", "both", "give back"]):
                case "take":
                    await history.take(random.choice(SENDERS), random.choice([0, 1, 5, 60]))
                case "cancel":
                    await history.cancel(random.randrange(FEW))
                case "both":
                    first = random.random() < 0.5
                    await history.cancel_as_a_permit_comes_free(random.randrange(FEW), cancel_first=first)
                case "give back":
                    await history.give_back()
        while history.holding:
            await history.give_back()
        assert not history.waiting
        await history.take(SENDERS[0], 0)
        await history.take(SENDERS[1], 0)

    run(go())


def test_senders_take_turns_however_much_one_of_them_asks() -> None:
    async def go() -> None:
        queue = FairQueue("this", num_permits=1, max_waiting=100, max_bytes=0)
        await queue.take()
        order: list[int] = []

        async def work(sender: Sender) -> None:
            await queue.take(sender)
            order.append(sender.flow)
            queue.give_back()

        flows = [1, 1, 1, 1, 2, 2, 3]
        tasks = [asyncio.create_task(work(Sender(flow=flow))) for flow in flows]
        await settle()
        queue.give_back()
        await asyncio.gather(*tasks)
        assert order == [1, 2, 3, 1, 2, 1, 1]

    run(go())


def test_a_closed_queue_refuses_what_waits_and_what_comes() -> None:
    async def go() -> None:
        queue = FairQueue("this", num_permits=1, max_waiting=2, max_bytes=0)
        await queue.take()
        waiting = deque(asyncio.create_task(queue.take()) for _ in range(2))
        await settle()
        queue.close()
        for task in waiting:
            with pytest.raises(ApiError, match="this has stopped"):
                await task
        queue.give_back()
        with pytest.raises(ApiError, match="this has stopped"):
            await queue.take()

    run(go())


def test_a_permit_that_comes_just_before_the_queue_is_closed_is_refused() -> None:
    async def go() -> None:
        queue = FairQueue("this", num_permits=1, max_waiting=2, max_bytes=0)
        await queue.take()
        waiting = asyncio.create_task(queue.take())
        await settle()
        queue.give_back()
        queue.close()
        with pytest.raises(ApiError, match="this has stopped"):
            await waiting

    run(go())
