"""A simulation predicts steps as the engine does whose metrics it has read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swiftkv._core import StepTime, StepWork
from swiftkv.engine.messages import STEP_TIME_TERMS, TOKEN_POINTS, EngineStats
from swiftkv.errors import ConfigError
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.simulate.step_times import make_step_time, parse_step_times, read_step_times

COSTS = [1e-3, 2e-7, 3e-7, 1e-4, 2e-4, 0.02]
RATIOS = [1 + 0.01 * point for point in range(len(TOKEN_POINTS))]


def work_of(num_tokens: int) -> StepWork:
    work = StepWork()
    work.add_row(100, num_tokens)
    return work


def test_what_an_engine_has_learnt_comes_through_its_metrics(tmp_path: Path) -> None:
    metrics = GatewayMetrics()
    metrics.for_model("new").observe_engine(EngineStats(*[0] * 12))
    stats = EngineStats(*[0] * 12, usual_step_time_s=COSTS, usual_token_ratios=RATIOS)
    metrics.for_model("known").observe_engine(stats)
    terms = parse_step_times(b"".join(metrics.render()).decode())
    assert terms.keys() == {"known"}
    (tmp_path / "saved.json").write_text(json.dumps(terms))
    own, read = StepTime(COSTS, RATIOS), make_step_time("known", read_step_times(str(tmp_path / "saved.json")))
    assert [read.predict(work_of(n)) for n in range(1, 3000)] == [own.predict(work_of(n)) for n in range(1, 3000)]
    assert own.predict(work_of(16)) != StepTime(COSTS).predict(work_of(16))


def test_a_burst_is_not_what_the_gateway_usually_takes() -> None:
    metrics = GatewayMetrics()
    of_model = metrics.for_model("m")
    of_model.observe_engine(EngineStats(*[0] * 12, usual_step_time_s=COSTS, usual_token_ratios=RATIOS))
    for _ in range(10):
        of_model.observe_handed_over(0.003)
    usual = parse_step_times(b"".join(metrics.render()).decode())["m"]["gateway_request"]
    assert usual == pytest.approx(0.003)
    for _ in range(20):
        of_model.observe_handed_over(5.0)
    assert parse_step_times(b"".join(metrics.render()).decode())["m"]["gateway_request"] < 4 * usual


def test_a_file_without_ratios_is_a_line() -> None:
    terms = dict(zip(STEP_TIME_TERMS, COSTS, strict=True))
    read = make_step_time("known", {"known": terms})
    assert [read.predict(work_of(n)) for n in (1, 50)] == [StepTime(COSTS).predict(work_of(n)) for n in (1, 50)]
    with pytest.raises(ConfigError, match="no step times of model 'other'"):
        make_step_time("other", {"known": terms})


@pytest.mark.parametrize("seconds", [-1e-3, 1e308])
def test_times_that_no_step_takes_are_a_mistake(seconds: float, tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text(json.dumps({"known": dict.fromkeys(STEP_TIME_TERMS, 0.1) | {"step": seconds}}))
    with pytest.raises(ConfigError, match=r"--step-time: .*times\.json has no step times: Expected `float` [<>]= .*"):
        read_step_times(str(file))


def test_points_have_ratios_of_their_own() -> None:
    assert len(TOKEN_POINTS) == len(StepTime(COSTS).token_ratios)
    by_line = StepTime(COSTS)
    for point, tokens in [*enumerate(TOKEN_POINTS)][:-1:2]:
        ratios = [1.0] * len(TOKEN_POINTS)
        ratios[point] = 2.0
        twice = StepTime(COSTS, ratios)
        assert twice.predict(work_of(int(tokens))) > 1.2 * by_line.predict(work_of(int(tokens)))
        assert twice.predict(work_of(2 * int(tokens))) == by_line.predict(work_of(2 * int(tokens)))
