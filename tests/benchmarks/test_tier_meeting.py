"""Loading and computing at once, in virtual time: never much slower than the better of both, and faster often."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support.programs import imported

MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    with imported("tier_meeting") as module:
        yield module


@pytest.mark.parametrize("model", ["dense", "hybrid"])
@pytest.mark.parametrize("num_blocks", [64, 256, 1024])
def test_the_choice_is_at_most_as_slow_as_the_better_of_both(program: ModuleType, model: str, num_blocks: int) -> None:
    """Both together take at most 0.75 of the time of the better way wherever they could take 0.7."""
    for multiple in MULTIPLES:
        chosen, best = program.of_the_better(program.MODELS[model], num_blocks, multiple, slowness=1.0)
        assert chosen <= 1.05
        if best <= 0.7:
            assert chosen <= 0.75


@pytest.mark.parametrize("model", ["dense", "hybrid"])
@pytest.mark.parametrize("slowness", [0.67, 1.5])
def test_steps_that_take_another_time_than_expected_cost_little(
    program: ModuleType, model: str, slowness: float
) -> None:
    for num_blocks in (64, 256, 1024):
        for multiple in MULTIPLES:
            chosen, _ = program.of_the_better(program.MODELS[model], num_blocks, multiple, slowness)
            assert chosen <= 1.05


def test_steps_that_take_longer_than_expected_leave_more_to_storage(program: ModuleType) -> None:
    for multiple in MULTIPLES:
        chosen, best = program.of_the_better(program.MODELS["dense"], 1024, multiple, slowness=1.5)
        assert chosen <= best + 0.05
