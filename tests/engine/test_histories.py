"""Random histories of real engines answer as the plainest engine does, and leave nothing behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.histories import Checkpoints, History, adventurous_planner

NUM_EVENTS = 80
WITH_HOST = 1000
"""From this seed on, there is host memory in any case, and steps attend to blocks there if the model allows it."""
SEEDS = (0, 2, 4, 8, WITH_HOST, WITH_HOST + 1)
"""The histories that are not slow."""
SLOW_SEEDS = [seed for seed in (*range(40), *range(WITH_HOST, WITH_HOST + 40)) if seed not in SEEDS]
RARE = {
    *("local", "peer", "preempted", "displaced", "window missed", "extents shared", "copies failed"),
    *("guesses right", "guesses wrong", "attended in host memory"),
}
"""States that `SEEDS` come to, whatever the timing: a change after which none of them does tests less than before."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoints]:
    made = Checkpoints(tmp_path_factory.mktemp("histories"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have storage read what a random planner says."""
    monkeypatch.setattr("swiftkv.engine.tier.LoadPlanner", adventurous_planner(random.Random(0)))


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW_SEEDS)])
def test_answers_are_those_of_the_plainest_engine(
    checkpoints: Checkpoints, seed: int, reached: dict[int, set[str]], temporary: Path
) -> None:
    history = History(seed, checkpoints, temporary, has_host=seed >= WITH_HOST)
    history.run(NUM_EVENTS)
    print(history.model, dict(+history.reached))
    reached[seed] = set(+history.reached)


def test_the_histories_came_to_what_is_rare(reached: dict[int, set[str]]) -> None:
    """After the others."""
    if not reached.keys() >= set(SEEDS):
        pytest.skip("needs the histories before it")
    assert set().union(*(reached[seed] for seed in SEEDS)) >= RARE
