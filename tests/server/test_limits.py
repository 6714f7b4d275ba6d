from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from swiftkv.server.limits import FREE_BODY_BYTES, Admission, BodyBudget, NodeLimits, Rounds

MIB = 1 << 20


def upload(limits: NodeLimits, declared_bytes: int, received_bytes: int) -> BodyBudget:
    budget = BodyBudget(limits, declared_bytes)
    assert budget.take(received_bytes)
    return budget


def test_large_bodies_leave_room_for_smaller_ones() -> None:
    """However many uploads of 16 MiB lack their last byte, a history of 1 MiB still comes through, and a small body."""
    limits = NodeLimits(max_bodies=128 * MIB)
    uploads = [BodyBudget(limits, 16 * MIB) for _ in range(16)]
    assert [one.take(16 * MIB - 1) for one in uploads].count(True) == 7
    medium = [BodyBudget(limits, MIB) for _ in range(32)]
    assert 8 <= [one.take(MIB - 1) for one in medium].count(True) < 32
    assert all(BodyBudget(limits, FREE_BODY_BYTES).take(FREE_BODY_BYTES) for _ in range(10_000))
    for one in [*uploads, *medium]:
        one.release()
    assert limits.body_bytes == 0


def test_a_body_that_is_alone_may_take_the_whole_budget() -> None:
    limits = NodeLimits(max_bodies=16 * MIB)
    whole = upload(limits, 16 * MIB, 16 * MIB)
    assert limits.body_bytes == 16 * MIB
    assert not BodyBudget(limits, MIB).take(1)
    whole.release()
    whole.release()
    assert limits.body_bytes == 0


def test_a_model_that_is_added_takes_descriptors_from_clients() -> None:
    limits = NodeLimits(max_connections=100, max_files=30)
    assert [limits.take_file() for _ in range(31)].count(False) == 1
    assert not limits.take_files_of_model(1)  # clients hold all of them
    for _ in range(10):
        limits.leave_file()
    assert limits.take_files_of_model(10)
    assert not limits.take_file()
    assert limits.admit() is Admission.SPARE
    limits.leave()
    limits.leave_files_of_model(10)
    assert limits.admit() is Admission.REGULAR
    assert not NodeLimits(max_files=24).take_files_of_model(24)  # clients must have some


@pytest.mark.parametrize("declared_bytes", [0, FREE_BODY_BYTES], ids=["chunked", "more than it declared"])
def test_a_body_counts_from_its_first_byte_once_it_is_not_small(declared_bytes: int) -> None:
    limits = NodeLimits(max_bodies=MIB)
    budget = upload(limits, declared_bytes, FREE_BODY_BYTES)
    assert limits.body_bytes == 0
    assert budget.take(1)
    assert limits.body_bytes == FREE_BODY_BYTES + 1


def test_a_refused_body_takes_no_more() -> None:
    limits = NodeLimits(max_bodies=MIB)
    first = upload(limits, 900 << 10, 900 << 10)
    second = BodyBudget(limits, 0)
    assert second.take(FREE_BODY_BYTES)
    assert not second.take(200 << 10)
    assert limits.body_bytes == 900 << 10
    second.release()
    first.release()
    assert limits.body_bytes == 0


def test_a_few_requests_begin_in_each_round_of_the_event_loop() -> None:
    rounds = Rounds(per_round=2)
    num_rounds = 0
    begun: list[tuple[int, int]] = []  # request, round

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def count() -> None:
            nonlocal num_rounds
            num_rounds += 1
            loop.call_soon(count)

        count()
        for number in range(100):
            rounds.enter(number, lambda number=number: begun.append((number, num_rounds)))
        rounds.leave(50)
        while len(begun) < 99:
            await asyncio.sleep(0)

    asyncio.run(run())
    assert [number for number, _ in begun] == [number for number in range(100) if number != 50]
    assert max(Counter(round for _, round in begun).values()) == 2
    assert begun[0][1] == 1


def test_who_gives_up_waiting_takes_no_place() -> None:
    rounds = Rounds(per_round=1)

    async def run() -> None:
        tasks = [asyncio.create_task(rounds.take()) for _ in range(4)]
        await asyncio.sleep(0)
        for task in tasks[1:3]:
            task.cancel()
        await asyncio.wait(tasks)
        assert [task.cancelled() for task in tasks] == [False, True, True, False]

    asyncio.run(run())


def test_who_comes_alone_does_not_wait() -> None:
    rounds = Rounds(per_round=1)

    async def run() -> None:
        for _ in range(3):
            begun: list[bool] = []
            rounds.enter("one", lambda begun=begun: begun.append(True))
            assert begun
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(run())
