"""When first tokens come, by hand; tests/simulate/test_doors.py has it beside the real scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from swiftkv._core import PRIORITIES_PER_CLASS
from swiftkv.policies import SchedulingPolicy
from swiftkv.server.forecast import EngineForecast, ForecastLimits, NewPrompt

TOKEN_S, STEP_S = 0.001, 0.02
COSTS = [TOKEN_S, 0.0, 0.0, 0.0, 0.0, STEP_S]


def forecast(policy: SchedulingPolicy = "fcfs", costs: Sequence[float] = COSTS, **limits: float) -> EngineForecast:
    made = EngineForecast(ForecastLimits(policy, **limits))  # type: ignore[arg-type]
    made.learn(costs)
    return made


def ttft_s(of: EngineForecast, prompt: NewPrompt, now_s: float = 0.0) -> float:
    found = of.of(prompt, now_s)
    assert found is not None
    return found.ttft_s


def test_nothing_is_forecast_before_the_times_of_steps_are_known() -> None:
    assert forecast(costs=[]).of(NewPrompt(10), 0.0) is None
    known = forecast()
    known.learn([])
    assert known.of(NewPrompt(10), 0.0) is not None
    known.forget_costs()
    assert known.of(NewPrompt(10), 0.0) is None


def test_a_prompt_alone_takes_its_tokens_and_its_steps() -> None:
    assert ttft_s(forecast(), NewPrompt(1000)) == pytest.approx(1.02)
    assert ttft_s(forecast(), NewPrompt(1000, num_cached=900)) == pytest.approx(0.12)
    assert ttft_s(forecast(max_num_batched_tokens=400), NewPrompt(1000)) == pytest.approx(1.06)


def test_what_is_in_the_cache_still_has_a_token_to_compute() -> None:
    assert ttft_s(forecast(), NewPrompt(64, num_cached=64)) == pytest.approx(TOKEN_S + STEP_S)


def test_first_come_first_served_waits_for_all_before() -> None:
    of = forecast()
    of.add(1, NewPrompt(2048), 0.0)
    of.add(2, NewPrompt(2048), 0.0)
    assert ttft_s(of, NewPrompt(100)) == pytest.approx(4.196 + 3 * STEP_S)


def test_answers_end_with_the_most_tokens_that_they_may_have() -> None:
    of = forecast(max_num_seqs=2)
    for request_id in (1, 2):
        of.add(request_id, NewPrompt(10, max_tokens=4), 0.0)
        of.token(request_id, 1.0)
    short_s = ttft_s(of, NewPrompt(10), 1.0)
    for request_id in (1, 2):
        of.end(request_id, 1.0)
        of.add(request_id, NewPrompt(10), 1.0)
        of.token(request_id, 2.0)
    assert short_s < 0.2 * ttft_s(of, NewPrompt(10), 2.0)
    found = of.of(NewPrompt(10, max_tokens=4), 2.0)
    assert found is not None
    assert found.answer_s == pytest.approx(4 * found.tpot_s)


def test_prompts_that_share_a_step_have_their_tokens_at_its_end() -> None:
    of = forecast("spf")
    of.add(1, NewPrompt(1500), 0.0)
    assert ttft_s(of, NewPrompt(100)) == pytest.approx(1.6 + STEP_S)


def test_the_time_that_has_passed_counts_for_the_prompt_that_is_computed() -> None:
    of = forecast()
    of.add(1, NewPrompt(2048), 0.0)
    of.admitted(1, 0, 0.0)
    before_s = ttft_s(of, NewPrompt(2048), 0.0)
    assert ttft_s(of, NewPrompt(2048), 1.0) == pytest.approx(before_s - 1.0, abs=2 * STEP_S)
    of.token(1, 2.1)
    assert ttft_s(of, NewPrompt(2048), 2.2) == pytest.approx(2.048 + 3 * STEP_S, abs=2 * STEP_S)


def test_what_the_engine_found_in_the_cache_counts_in_place_of_what_was_expected() -> None:
    of = forecast()
    of.add(1, NewPrompt(2048, num_cached=2000), 0.0)
    expected_s = ttft_s(of, NewPrompt(10))
    of.admitted(1, 0, 0.0)
    assert ttft_s(of, NewPrompt(10)) > expected_s + 1.9


def test_beside_answers_a_step_has_so_much_time_for_prompts() -> None:
    of = forecast(step_limit_s=0.1)
    of.add(1, NewPrompt(10), 0.0)
    of.token(1, 0.0)
    # The answer takes 21 of every 100 ms, and prompts 79.
    assert ttft_s(of, NewPrompt(790)) == pytest.approx(1.0, abs=0.13)


def test_short_prompts_pass_long_ones_until_these_have_waited() -> None:
    of = forecast("hrrn")
    of.add(1, NewPrompt(20_000), 0.0)
    assert ttft_s(of, NewPrompt(100), 0.001) == pytest.approx(2 * (2.048 + STEP_S))  # one passes before it is next
    assert ttft_s(of, NewPrompt(19_000), 0.001) > 39
    of.add(2, NewPrompt(20_000), 0.0)
    assert ttft_s(of, NewPrompt(5000), 1000.0) > 45  # which a prompt of a quarter would overtake after 333 s


@pytest.mark.parametrize("policy", ["priority", "spf", "hrrn", "turns", "deadline"])
def test_who_matters_more_goes_first(policy: SchedulingPolicy) -> None:
    of = forecast(policy)
    for request_id in range(4):
        of.add(request_id, NewPrompt(2048), 0.0)
    assert ttft_s(of, NewPrompt(2048, priority=-1), 5.0) < 2.1 + 2 * STEP_S
    assert ttft_s(of, NewPrompt(1, priority=1), 5.0) > 8


def test_who_is_due_earlier_goes_first() -> None:
    of = forecast("deadline")
    of.add(1, NewPrompt(2048, due_s=5.0), 0.0)
    assert ttft_s(of, NewPrompt(2048, due_s=1.0)) < 2.2
    assert ttft_s(of, NewPrompt(2048, due_s=9.0)) > 4


def test_without_a_slot_one_waits_for_an_answer_to_end() -> None:
    of = forecast(max_num_seqs=2)
    for request_id in range(2):
        of.add(request_id, NewPrompt(10), 0.0)
        of.token(request_id, 0.1)
    assert ttft_s(of, NewPrompt(10), 0.2) > 1
    of.end(0, 0.2)
    assert ttft_s(of, NewPrompt(10), 0.2) < 0.1


def test_without_memory_one_waits_for_an_answer_to_end() -> None:
    of = forecast()
    of.pool_tokens = 1000
    of.add(1, NewPrompt(900), 0.0)
    of.token(1, 1.0)
    assert ttft_s(of, NewPrompt(500), 1.1) > 2
    assert ttft_s(of, NewPrompt(50), 1.1) < 0.2


@pytest.mark.parametrize("policy", ["priority", "spf", "hrrn", "turns", "deadline"])
def test_work_of_a_lower_class_leaves_its_slot_and_its_memory(policy: SchedulingPolicy) -> None:
    of = forecast(policy, max_num_seqs=2)
    of.pool_tokens = 1000
    for request_id in range(2):
        of.add(request_id, NewPrompt(400, priority=2 * PRIORITIES_PER_CLASS), 0.0)
        of.token(request_id, 1.0)
    assert ttft_s(of, NewPrompt(500), 1.1) < 0.6
    assert ttft_s(of, NewPrompt(500, priority=2 * PRIORITIES_PER_CLASS - 1), 1.1) > 1  # of the same class


def test_a_token_takes_at_least_as_long_as_a_step_with_all_answers() -> None:
    of = forecast(costs=[0.001, 0.0, 1e-5, 0.002, 0.0, 0.02])
    for request_id in range(3):
        of.add(request_id, NewPrompt(99), 0.0)
        of.token(request_id, 0.1)
    found = of.of(NewPrompt(100), 1.0)
    assert found is not None
    assert found.tpot_s == pytest.approx(0.02 + 4 * 0.003 + 400e-5)
    assert found.alone_tpot_s == pytest.approx(0.02 + 0.003 + 100e-5)


@pytest.mark.parametrize("tokens_a_step", [1, 4])
def test_several_tokens_a_step_come_sooner_and_end_the_answer_sooner(tokens_a_step: int) -> None:
    of = forecast(max_num_seqs=1)
    of.add(1, NewPrompt(10), 0.0)
    for step in range(1, 501):
        for _ in range(tokens_a_step):
            of.token(1, step * STEP_S)
    now_s = 500 * STEP_S
    found = of.of(NewPrompt(10), now_s)
    assert found is not None
    assert found.tpot_s == pytest.approx((STEP_S + 2 * TOKEN_S) / tokens_a_step, rel=0.01)
    # The answer ends after 128 tokens, for all that is known, and leaves its slot.
    assert found.ttft_s == pytest.approx(128 * (STEP_S + TOKEN_S) / tokens_a_step, rel=0.1)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "hrrn", "deadline"])
def test_a_flood_of_another_flow_is_ahead_by_its_share_only(policy: SchedulingPolicy) -> None:
    of = forecast(policy)
    for request_id in range(100):
        of.add(request_id, NewPrompt(1000, flow=1), 0.001 * request_id)
    alone_s = 1.02
    assert ttft_s(of, NewPrompt(1000, flow=1), 0.2) > 50
    assert ttft_s(of, NewPrompt(1000, flow=2), 0.2) == pytest.approx(2 * alone_s, abs=0.05)
    assert ttft_s(of, NewPrompt(1000, flow=2, flow_weight=4.0), 0.2) == pytest.approx(1.25 * alone_s, abs=0.05)
    of.add(100, NewPrompt(500, flow=3), 0.1)
    assert ttft_s(of, NewPrompt(1000, flow=2), 0.2) == pytest.approx(2 * alone_s + 0.5, abs=0.05)


def test_sequences_that_are_gone_leave_nothing() -> None:
    of = forecast("priority", step_limit_s=0.1)
    rng = np.random.default_rng(0)
    alone_s = ttft_s(of, NewPrompt(500), 99.0)
    for request_id in range(300):
        of.add(request_id, NewPrompt(int(rng.integers(1, 5000))), 0.01 * request_id)
    for request_id in rng.permutation(300).tolist():
        how_far = request_id % 4
        if how_far:
            of.admitted(request_id, 0, 4.0)
        for _ in range(how_far - 1):
            of.token(request_id, 5.0)
        of.end(request_id, 6.0)
        of.end(request_id, 6.0)
    of.admitted(7, 0, 6.0)  # it was aborted when the engine began with it
    assert ttft_s(of, NewPrompt(500), 99.0) == pytest.approx(alone_s)


def test_a_forecast_learns_from_those_that_were_forecast_and_got_a_token() -> None:
    of = EngineForecast(ForecastLimits("fcfs"))
    of.learn([0.001, 0.0, 0.0, 0.0, 0.0, 0.02])
    for request_id in range(60):
        now_s = 100.0 * request_id
        found = of.of(NewPrompt(500), now_s)
        assert found is not None
        if request_id < 48:
            assert found.hopeful_ttft_s == found.ttft_s
        has_forecast, is_answered = request_id % 3 > 0, request_id % 3 > 1
        of.add(request_id, NewPrompt(500), now_s, found.ttft_s if has_forecast else None)
        if is_answered or not has_forecast:
            of.token(request_id, now_s + 3 * found.ttft_s)
        of.end(request_id, now_s + 4 * found.ttft_s)
    found = of.of(NewPrompt(500), 1e4)
    assert found is not None
    assert found.hopeful_ttft_s == pytest.approx(3 * found.ttft_s)
