"""The choice that `benchmarks/offline.py` makes among figures that are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.programs import imported


@pytest.fixture(scope="module")
def offline() -> Iterator[Any]:
    with imported("offline") as module:
        yield module


@pytest.mark.parametrize(
    ("missed", "best"),
    [
        ({1: 0.0, 2: 0.0, 4: 0.0}, 4),
        ({1: 0.0, 2: 0.02, 4: 0.01, 8: 0.02, 16: 0.03}, 4),  # one that misses may be noise
        ({1: 0.0, 2: 0.02, 4: 0.02, 8: 0.0}, 1),
        ({1: 0.02, 2: 0.02}, 0),
    ],
)
def test_the_most_lines_that_clients_bear(offline: Any, missed: dict[int, float], best: int) -> None:
    def run(_: object, count: int) -> dict[str, float]:
        return {"missed": missed.get(count, 0.0), "tokens_per_s": 100.0 * count}

    assert offline.most(offline.OURS, missed, 0.01, run)[0] == best
