"""Prompts that wait are given up when it is too late to begin with them, and not before."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from swiftkv.server.forecast import EngineForecast, ForecastLimits, NewPrompt
from swiftkv.server.last_starts import LastStarts

TOKEN_S, STEP_S = 0.001, 0.02
BUDGET = 400  # tokens in a step
FULL_STEP_S = STEP_S + BUDGET * TOKEN_S


def forecast() -> EngineForecast:
    made = EngineForecast(ForecastLimits("hrrn", max_num_batched_tokens=BUDGET))
    made.learn([TOKEN_S, 0.0, 0.0, 0.0, 0.0, STEP_S])
    return made


def computing_s(num_tokens: int) -> float:
    return num_tokens * TOKEN_S + math.ceil(num_tokens / BUDGET) * STEP_S


def test_it_is_too_late_when_a_step_and_the_prompt_take_longer_than_what_is_left() -> None:
    of = forecast()
    starts = LastStarts(of)
    of.add(1, NewPrompt(1000, num_cached=200), 0.0)
    starts.add(1, 5.0)
    last_s = 5.0 - FULL_STEP_S - computing_s(800)
    assert starts.passed(last_s - 0.001) == []
    assert starts.passed(last_s + 0.001) == [1]
    assert starts.passed(last_s + 0.002) == []  # each only once


def test_sequences_that_have_ended_take_no_memory_however_late_they_were_due() -> None:
    of = forecast()
    starts = LastStarts(of)

    def serve(request_ids: range) -> int:
        """Let sequences come, wait and end; return the bytes that Python then holds."""
        for request_id in request_ids:
            of.add(request_id, NewPrompt(100), 0.0)
            starts.add(request_id, 1e6)
            assert starts.passed(1.0) == []
            of.end(request_id, 1.0)
            starts.end(request_id)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = serve(range(1000))
        assert serve(range(1000, 6000)) - before < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seed", range(20))
def test_those_too_late_are_those_that_a_plain_search_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    of = forecast()
    starts = LastStarts(of)
    lasts_s: dict[int, float] = {}
    now_s, num_passed = 0.0, 0
    for request_id in range(300):
        now_s += float(rng.exponential(0.3))
        num_tokens = int(rng.integers(1, 3000))
        due_s = now_s + float(rng.exponential(8.0))
        of.add(request_id, NewPrompt(num_tokens), now_s)
        starts.add(request_id, due_s)
        lasts_s[request_id] = due_s - FULL_STEP_S - computing_s(num_tokens)
        gone = int(rng.choice(list(lasts_s)))
        if rng.random() < 0.3:
            starts.admitted(gone, now_s)
            del lasts_s[gone]
        elif rng.random() < 0.3:
            of.end(gone, now_s)
            starts.end(gone)
            del lasts_s[gone]
        expected = {i for i, last_s in lasts_s.items() if last_s <= now_s}
        passed = starts.passed(now_s)
        assert sorted(passed) == sorted(expected)
        num_passed += len(passed)
        lasts_s = {i: last_s for i, last_s in lasts_s.items() if i not in expected}
    assert num_passed > 30


def learn_from(starts: LastStarts, of: EngineForecast, ratio: float) -> None:
    """Have enough prompts alike take `ratio` times as long as computing them does."""
    for request_id in range(1000, 1016):
        of.add(request_id, NewPrompt(800), 0.0)
        starts.add(request_id, 1e6)
        starts.admitted(request_id, 0.0)
        taken_s = ratio * computing_s(800)
        of.token(request_id, taken_s)
        starts.token(request_id, taken_s)
        of.end(request_id, taken_s)
        starts.end(request_id)


@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_what_prompts_alike_took_is_allowed_for(ratio: float) -> None:
    """A prompt is never expected to take less than its computing."""
    of = forecast()
    starts = LastStarts(of)
    learn_from(starts, of, ratio)
    of.add(1, NewPrompt(800), 100.0)
    starts.add(1, 110.0)
    last_s = 110.0 - FULL_STEP_S - max(1.0, ratio) * computing_s(800)
    assert starts.passed(last_s - 0.001) == []
    assert starts.passed(last_s + 0.001) == [1]


def test_nobody_is_too_late_while_the_times_of_steps_are_unknown() -> None:
    of = EngineForecast()
    starts = LastStarts(of)
    of.add(1, NewPrompt(1000), 0.0)
    starts.add(1, 5.0)
    assert starts.passed(6.0) == []


def test_whoever_is_given_up_counts_as_late_for_the_next_forecast() -> None:
    of = forecast()
    for request_id in range(16):
        found = of.of(NewPrompt(500), 0.0)
        assert found is not None
        of.add(request_id, NewPrompt(500), 0.0, found.ttft_s)
        of.miss(request_id, 4.0)
        of.end(request_id, 4.0)
    found = of.of(NewPrompt(500), 5.0)
    assert found is not None
    assert found.hopeful_ttft_s == pytest.approx(4.0 + computing_s(500))
