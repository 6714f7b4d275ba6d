from __future__ import annotations

import pytest

from swiftkv.server.limits import FREE_BODY_BYTES, BodyBudget, NodeLimits

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
