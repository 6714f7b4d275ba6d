"""Random histories of real engines answer as the plainest engine does, and leave nothing behind."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.engine.histories import Checkpoints, History, adventurous_planner
from tests.support.node_process import remove, short_temporary_directory

NUM_EVENTS = 80


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoints]:
    made = Checkpoints(tmp_path_factory.mktemp("histories"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have storage read what a random planner says."""
    monkeypatch.setattr("swiftkv.engine.tier.LoadPlanner", adventurous_planner(random.Random(0)))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))])
def test_answers_are_those_of_the_plainest_engine(checkpoints: Checkpoints, seed: int) -> None:
    """Prints how often a history came to what is rare."""
    directory = short_temporary_directory()
    try:
        history = History(seed, checkpoints, directory)
        history.run(NUM_EVENTS)
    finally:
        remove(directory)
    print(history.model, dict(+history.reached))
