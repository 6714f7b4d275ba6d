"""The figures of `benchmarks/model_cycles.py`, computed from times that are known."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.support.programs import imported


@pytest.fixture(scope="module")
def cycles() -> Iterator[Any]:
    with imported("model_cycles") as module:
        yield module


@pytest.fixture
def figures(cycles: Any) -> Any:
    """A calm time of 10 s, in which tokens come every second, and then a change up to 20 s with one every 3 s."""
    spans = [cycles.Span(0, "calm", 0.0, 10.0), cycles.Span(0, "add", 10.5, 20.0)]
    return cycles.Figures(spans, list(pairwise([*range(11), 13, 16, 19, 22])))


def test_a_change_counts_all_that_it_touches_and_a_calm_time_what_it_has(figures: Any) -> None:
    assert figures.gaps_s(["calm"]) == [1.0] * 10
    assert figures.gaps_s(["add"]) == [3.0] * 4
    assert figures.gaps_s(["add"], cycle=1) == []


def test_ratios_are_within_a_cycle(cycles: Any, figures: Any) -> None:
    figures.spans.append(cycles.Span(1, "wake", 14.0, 15.0))  # a cycle without a calm time says nothing
    assert figures.ratios(2) == [3.0]


def test_growth_is_of_the_least_in_each_half_over_all_cycles(cycles: Any) -> None:
    assert cycles.growth_kib([5 << 10, 1 << 10, 7 << 10, 9 << 10]) == 6.0
    assert cycles.growth_kib([1 << 20]) == 0.0
    assert cycles.growth_kib([cycle << 10 for cycle in range(1000)]) == 500.0


def test_what_has_come_and_gone_is_told(cycles: Any) -> None:
    before = cycles.Belongings(["engine", "old"], ["a"], [], {"chat": 9}, {"chat": 60})
    after = cycles.Belongings(["engine"], ["a", "b"], ["swiftkv-1"], {"chat": 10}, {"chat": 66})
    assert cycles.changed(before, after) == {
        "processes": ["- old"],
        "files": ["+ b"],
        "shared_memory": ["+ swiftkv-1"],
        "threads": [],
        "open_files": ["chat 60 -> 66"],
    }
    assert not any(cycles.changed(before, before).values())


def test_pools_hold_the_longest_sequence_and_are_never_smaller_than_asked(cycles: Any) -> None:
    chat = cycles.DEMO_CHECKPOINTS / "chat"  # 5 layers, 2 KV heads of 64, keys and values of 2 bytes: 2,560 a token
    assert cycles.pool_memory(chat, 8, 2048) == "8MiB"
    assert cycles.pool_memory(chat, 8, 8192) == "20MiB"
    assert cycles.pool_memory(chat, 8, 8193) == "21MiB"
