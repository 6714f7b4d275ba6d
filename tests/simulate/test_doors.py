"""Forecasts beside what the real scheduler then does, in virtual time, and refusals by them."""

from __future__ import annotations

import numpy as np
import pytest

from swiftkv._core import GroupSpec, Scheduler, StepPlan, StepTime
from swiftkv.bench.traces import BLOCK_TOKENS, Arrival
from swiftkv.policies import SchedulingPolicy
from swiftkv.server.forecast import ForecastLimits
from swiftkv.simulate.doors import OpenDoor, same_for_all
from swiftkv.simulate.simulator import Outcome, simulate
from tests.support.forecasting_door import ForecastingDoor

MAX_MODEL_LEN = 8192
NUM_BLOCKS = 8192
STEP_LIMIT_S = 0.25
TARGET_S = 8.0
LAW = StepTime([1.27e-3, 2.5e-7, 2.5e-7, 0.0, 0.0, 0.0225])


def traffic(load: float, seed: int = 0, count: int = 400) -> list[Arrival]:
    """Requests at random times, a third of which go on with a prompt that came before."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6.3, 0.9, count), 16, 3000).astype(int)
    times_s = np.cumsum(rng.exponential(1.0, count)) * (1.27e-3 * lengths.mean() * 1.15) / load
    arrivals: list[Arrival] = []
    for i, (time_s, length) in enumerate(zip(times_s, lengths, strict=True)):
        num_blocks = -(-int(length) // BLOCK_TOKENS)
        blocks = tuple(range(100 * i, 100 * i + num_blocks))
        if arrivals and rng.random() < 1 / 3:
            earlier = arrivals[int(rng.integers(len(arrivals)))].blocks
            blocks = (*earlier[: num_blocks - 1], *blocks)[:num_blocks]
        arrivals.append(Arrival(float(time_s), int(length), int(rng.integers(1, 60)), blocks))
    return arrivals


def serve(arrivals: list[Arrival], policy: SchedulingPolicy, door: OpenDoor) -> Outcome:
    scheduler = Scheduler(
        [GroupSpec(1, NUM_BLOCKS)],
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=MAX_MODEL_LEN,
        target_tpot_s=STEP_LIMIT_S,
        scheduling_policy=policy,
    )
    scheduler.remember_step_time(LAW.coefficients)

    def step_s(plan: StepPlan) -> float:
        return LAW.predict(plan.work)

    return simulate(scheduler, MAX_MODEL_LEN, step_s, arrivals, door=door)


def door(policy: SchedulingPolicy, *, refuses: bool) -> ForecastingDoor:
    limits = ForecastLimits(policy=policy, step_limit_s=STEP_LIMIT_S)
    target = same_for_all(TARGET_S)
    return ForecastingDoor(limits, LAW, NUM_BLOCKS * 16, target_ttft_s=target, refuses=refuses)


@pytest.mark.parametrize("policy", ["fcfs", "hrrn"])
def test_the_forecast_names_those_that_miss(policy: SchedulingPolicy) -> None:
    arrivals = traffic(load=1.1)
    shadow = door(policy, refuses=False)
    outcome = serve(arrivals, policy, shadow)
    on_arrival = np.array([shadow.forecasts[i].hopeful_ttft_s for i in range(len(arrivals))]) > TARGET_S
    named = on_arrival | np.isin(np.arange(len(arrivals)), list(shadow.refused_waiting))
    missed = outcome.ttft_s > TARGET_S
    assert missed.sum() > 40
    assert missed[named].mean() > 0.95
    assert named[missed].mean() > 0.95
    assert on_arrival[missed].mean() > 0.8


@pytest.mark.parametrize("policy", ["fcfs", "hrrn"])
def test_those_that_are_let_in_are_in_time(policy: SchedulingPolicy) -> None:
    arrivals = traffic(load=1.4)
    outcome = serve(arrivals, policy, door(policy, refuses=True))
    is_served = ~np.isnan(outcome.end_s)
    assert 0.5 < is_served.mean() < 0.9
    assert (outcome.ttft_s[is_served] <= 1.1 * TARGET_S).mean() > 0.95
    assert outcome.computed_tokens[~is_served].sum() == 0
    unrefused = serve(arrivals, policy, OpenDoor())
    assert (unrefused.ttft_s <= TARGET_S).mean() < 0.6


def test_a_short_prompt_is_forecast_to_interrupt_a_long_one() -> None:
    arrivals = [Arrival(0.0, 6000, 1, tuple(range(12))), Arrival(1.0, 200, 1, (100,))]
    shadow = door("hrrn", refuses=False)
    outcome = serve(arrivals, "hrrn", shadow)
    long_s = outcome.end_s[0]
    assert outcome.end_s[1] < long_s
    assert shadow.forecasts[1].ttft_s < 0.5 * long_s


def test_an_engine_with_little_to_do_refuses_nobody() -> None:
    outcome = serve(traffic(load=0.1), "hrrn", door("hrrn", refuses=True))
    assert not np.isnan(outcome.end_s).any()


def test_a_door_hears_of_every_request_and_its_end() -> None:
    heard: list[tuple[str, int]] = []

    class Listening(OpenDoor):
        def begun(self, request_id: int, num_cached: int, now_s: float) -> None:
            heard.append(("begun", request_id))

        def token(self, request_id: int, now_s: float) -> None:
            heard.append(("token", request_id))

        def ended(self, request_id: int, now_s: float) -> None:
            heard.append(("ended", request_id))

    serve([Arrival(0.0, 100, 2, (0,)), Arrival(50.0, 100, 1, (1,))], "hrrn", Listening())
    assert heard == [("begun", 0), ("token", 0), ("token", 0), ("ended", 0), ("begun", 1), ("token", 1), ("ended", 1)]


def test_whoever_is_given_up_takes_no_more_time() -> None:
    class Impatient(OpenDoor):
        def dropped(self, now_s: float) -> list[int]:
            return [1] if now_s > 1.0 else []

    arrivals = [Arrival(0.0, 4000, 1, tuple(range(8))), Arrival(0.1, 4000, 1, tuple(range(8, 16)))]
    outcome = serve(arrivals, "fcfs", Impatient())
    assert np.isnan(outcome.end_s).tolist() == [False, True]
    assert outcome.computed_tokens.tolist() == [4000, 0]
