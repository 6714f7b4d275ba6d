"""The rules of `benchmarks/replay_rules.py`: what they find where there is room for all, for nothing, and for one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.programs import imported


@pytest.fixture(scope="module")
def rules() -> Iterator[Any]:
    with imported("replay_rules") as module:
        yield module


def random_paths(count: int) -> list[tuple[int, ...]]:
    """Return prompts that begin like one another; a node's number says all that is before it."""
    generator = np.random.default_rng(0)
    numbers: dict[tuple[int, ...], int] = {}
    paths = []
    for _ in range(count):
        choices = tuple(generator.integers(0, 2, generator.integers(1, 9)).tolist())
        prefixes = [choices[: length + 1] for length in range(len(choices))]
        paths.append(tuple(numbers.setdefault(prefix, len(numbers)) for prefix in prefixes))
    return paths


def longest_known(paths: list[tuple[int, ...]]) -> list[int]:
    seen: set[int] = set()
    found = []
    for path in paths:
        found.append(sum(node in seen for node in path))
        seen.update(path)
    return found


def test_with_room_for_all_the_longest_known_prefix_is_found(rules: Any) -> None:
    paths, sizes = random_paths(200), rules.Sizes(node=10, tail=3)
    expected = longest_known(paths)
    assert rules.replay_recency(paths, sizes, 10**6, rules.every_tail) == expected
    assert rules.Clairvoyant(paths, sizes, 10**6).replay() == expected
    for tails in (rules.latest_tail, rules.end_and_branch):
        found = rules.replay_recency(paths, sizes, 10**6, tails)
        assert all(few <= most for few, most in zip(found, expected, strict=True))


def test_without_room_nothing_is_found(rules: Any) -> None:
    paths, sizes = random_paths(50), rules.Sizes(node=10, tail=3)
    assert not any(rules.replay_recency(paths, sizes, 0, rules.end_and_branch))
    assert not any(rules.Clairvoyant(paths, sizes, 0).replay())


def test_who_knows_the_future_keeps_what_is_wanted_first(rules: Any) -> None:
    """Recency, with room for one of three conversations, forgets the one that goes on next."""
    paths, sizes = [(1, 2), (3, 4), (5, 6), (1, 2, 7), (3, 4, 8)], rules.Sizes(node=10, tail=3)
    assert rules.replay_recency(paths, sizes, 25, rules.latest_tail) == [0, 0, 0, 0, 0]
    assert rules.Clairvoyant(paths, sizes, 25).replay() == [0, 0, 0, 2, 0]
