"""Random histories of ranks that borrow: tokens are those without lending, and nobody's memory is another's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftkv.storage.host_medium import make_host_memory
from tests.engine.rank_histories import Checkpoints, History

NUM_EVENTS = 100
SEEDS = range(16)
"""The histories that are not slow."""
RARE = {
    "attached",
    "attach failed on rank 0",
    "attach failed on another rank",
    "detached",
    "detached with blocks in use",
    "copies failed",
    "steps of copies alone",
    "streamed through one buffer",
    "streamed through two buffers",
    "planned ahead",
    "preempted",
    "recalled during a step that copies",
    "recalled while a rank had yet to attach",
    "a lender died with blocks in use",
    "a lender died during a step that copies",
    "rank 0 died",
    "another rank died",
    "a rank died during a step that copies",
    "a rank copied after another had died",
}
"""States that `SEEDS` come to: a change after which none of them does tests less than before."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoints]:
    made = Checkpoints(tmp_path_factory.mktemp("histories"))
    yield made
    made.close()


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(len(SEEDS), 150))]
)
def test_ranks_that_borrow_answer_as_ranks_with_room_for_everything(
    checkpoints: Checkpoints, seed: int, reached: dict[int, set[str]], temporary: Path
) -> None:
    history = History(seed, checkpoints, temporary)
    history.run(NUM_EVENTS)
    print(history.model, dict(+history.reached))
    reached[seed] = set(+history.reached)


@pytest.mark.parametrize("seed", [1000, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1001, 1040))])
def test_host_memory_under_them_changes_no_answer(checkpoints: Checkpoints, seed: int, temporary: Path) -> None:
    """Blocks are stored from the pools of all ranks and of lenders, and read again."""
    host_fd = make_host_memory(4 << 20, 4096)
    try:
        history = History(seed, checkpoints, temporary, host_fd)
        history.run(NUM_EVENTS)
    finally:
        os.close(host_fd)
    print(history.model, dict(+history.reached))


def test_the_histories_came_to_what_is_rare(reached: dict[int, set[str]]) -> None:
    """After the others."""
    if not reached.keys() >= set(SEEDS):
        pytest.skip("needs the histories before it")
    assert not RARE - set().union(*(reached[seed] for seed in SEEDS))
