"""The number of lines of batches that may begin beside what a model does already."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv.server.batches.room import Load, Room

ROOM = Room.of(64, None)


def load(**fields: float) -> Load:
    values: dict[str, float] = {"waiting": 0, "online": 0, "offline": 0, "beginning": 0, "kv_usage": 0.0}
    return Load(**{**values, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "num_lines"),
    [
        ({}, 32),
        ({"offline": 30}, 2),
        ({"offline": 32}, 0),
        ({"waiting": 1}, 0),
        ({"kv_usage": 0.9}, 0),
        ({"online": 1}, 1),
        ({"online": 1, "offline": 7}, 1),
        ({"online": 1, "offline": 8}, 0),
        ({"online": 1, "offline": 1, "beginning": 1}, 0),
        ({"online": 1, "offline": 32}, 0),
        ({"online": 55}, 1),
        ({"online": 56}, 0),
        ({"online": 100}, 0),
    ],
)
def test_num_lines(fields: dict[str, float], num_lines: int) -> None:
    assert ROOM.num_lines(load(**fields)) == num_lines


def test_the_limit_can_be_set() -> None:
    assert Room.of(64, 5).num_lines(load()) == 5
    assert Room.of(64, 500).num_lines(load()) == 56
    assert Room.of(1, None).num_lines(load()) == 1
    assert Room.of(1, None).num_lines(load(online=1)) == 0


@given(
    slots=st.integers(1, 256),
    limit=st.none() | st.integers(1, 256),
    online=st.integers(0, 300),
    offline=st.integers(0, 300),
    beginning=st.integers(0, 3),
)
def test_a_slot_in_eight_is_left_to_clients(
    slots: int, limit: int | None, online: int, offline: int, beginning: int
) -> None:
    num_lines = Room.of(slots, limit).num_lines(load(online=online, offline=offline, beginning=beginning))
    assert num_lines >= 0
    if num_lines:
        assert online + offline + num_lines <= slots - slots // 8
        assert limit is None or offline + num_lines <= limit
        assert not online or num_lines == 1
