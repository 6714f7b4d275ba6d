"""Loading and computing at once, in virtual time: never much slower than the better of both, and faster often."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support.programs import imported


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    with imported("tier_meeting") as module:
        yield module


@pytest.mark.parametrize("num_blocks", [64, 256])
@pytest.mark.parametrize("multiple", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_the_choice_is_at_most_as_slow_as_the_better_of_both(
    program: ModuleType, multiple: float, num_blocks: int
) -> None:
    chosen, _ = program.of_the_better(num_blocks, multiple, slowness=1.0)
    assert chosen <= 1.05
    if multiple == 1.0 or (num_blocks == 256 and multiple in (0.5, 2.0)):
        assert chosen <= 0.75


@pytest.mark.parametrize("multiple", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_steps_that_take_longer_than_expected_leave_more_to_storage(program: ModuleType, multiple: float) -> None:
    chosen, best = program.of_the_better(1024, multiple, slowness=1.5)
    assert chosen <= best + 0.05
