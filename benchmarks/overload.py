"""Measure refusals on arrival in virtual time, with the real scheduler and no model:

    python benchmarks/overload.py mooncake_conversation.jsonl

A trace comes at several loads, in parts of what the engine can do. Each load has three runs. In the first, no request
is refused. In the second, a request that has no first token when it is due is given up. In the third, as in a gateway
and by the same code, a request that is forecast to be late is refused on arrival (swiftkv/server/forecast.py), and one
that waits until it is too late to begin is refused then (swiftkv/server/last_starts.py).

A step's time follows a formula, which the engine is taken to have learnt, plus noise. A first token is due within
--target-s, or within --times-alone the time that it takes alone if that is more, and each further token within 0.3 s on
average. The figures do not depend on the machine. Columns, in parts of all requests: refused or given up, and of these,
refused while they waited; served late; in time. Recall is the part named of the requests that were late in the run
without refusals, precision the part that was late of those named: by the forecast on arrival alone (with the best
recall that a threshold reaches at a precision of 0.95), and by it or while they waited. Then come the part of the
refused that missed in that run; the part of all computed tokens that belong to requests which were not in time; how
busy the engine was in the 10 s after each refusal (one that oscillates stands still then); and the number of requests
refused or late, in relation to the run that gives up late ones.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, get_args

import numpy as np
import numpy.typing as npt
from lending_node import say, table
from policies import shortened, trace_parser

from swiftkv import _core
from swiftkv.bench.traces import Arrival, read_trace, spread_ties
from swiftkv.policies import SchedulingPolicy
from swiftkv.server.forecast import Forecast, ForecastLimits, NewPrompt
from swiftkv.simulate.doors import OpenDoor, Target
from swiftkv.simulate.simulator import EngineRun, Outcome, serve_alone

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.forecasting_door import ForecastingDoor

_MAX_MODEL_LEN = 16_384
_BLOCK_SIZE = 16
MAX_NUM_BATCHED_TOKENS = 2048
_STEP_LIMIT_S = 0.25
_TARGET_TPOT_S = 1.2 * _STEP_LIMIT_S
_LAW = _core.StepTime([1.27e-3, 2.5e-7, 2.5e-7, 0.0, 0.0, 0.0225])  # as in policies.py
_WINDOW_S = 10.0
_PRECISION = 0.95
_MOST_RATIO = 1.5  # of forecast and target: the highest threshold that is tried


class LateDoor(OpenDoor):
    """Gives up each request whose first token has not come when it is due."""

    def __init__(self, target_ttft_s: Target) -> None:
        super().__init__(target_ttft_s)
        self._waiting: set[int] = set()
        self._due: list[tuple[float, int]] = []

    def lets_in(self, request_id: int, arrival: Arrival, now_s: float) -> bool:
        self._waiting.add(request_id)
        heapq.heappush(self._due, (now_s + self.target_ttft_s(arrival), request_id))
        return True

    def token(self, request_id: int, now_s: float) -> None:
        self._waiting.discard(request_id)

    def dropped(self, now_s: float) -> list[int]:
        dropped = []
        while self._due and self._due[0][0] < now_s:
            _, request_id = heapq.heappop(self._due)
            if request_id in self._waiting:
                self._waiting.discard(request_id)
                dropped.append(request_id)
        return dropped


class OracleDoor(ForecastingDoor):
    """Knows exactly when a first token would come if no other request came: a copy of the process goes on without any.

    It knows the lengths of answers, what is cached, and the noise of steps; no forecast can know more of the past.
    """

    run: EngineRun
    _asked: int | None = None  # in the copy: the request in question

    def forecast_of(self, request_id: int, new: NewPrompt, now_s: float) -> Forecast:
        forecast = super().forecast_of(request_id, new, now_s)
        if self._asked is not None:
            return forecast
        assert new.due_s is not None
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._asked, self._asked_s, self._answer_fd = request_id, now_s, write_fd
            self._give_up_s = now_s + _MOST_RATIO * new.due_s
            self.run.end_arrivals()
            return replace(forecast, hopeful_ttft_s=0.0)  # it is let in
        os.close(write_fd)
        ttft_s = struct.unpack("d", os.read(read_fd, 8))[0]
        os.close(read_fd)
        os.waitpid(pid, 0)
        return replace(forecast, ttft_s=min(ttft_s, 1e6), hopeful_ttft_s=ttft_s)

    def token(self, request_id: int, now_s: float) -> None:
        super().token(request_id, now_s)
        if request_id == self._asked:
            self._answer(now_s - self._asked_s)

    def dropped(self, now_s: float) -> list[int]:
        if self._asked is not None and now_s > self._give_up_s:
            self._answer(math.inf)
        dropped = super().dropped(now_s)
        if self._asked in dropped:
            self._answer(math.inf)
        return dropped

    def _answer(self, ttft_s: float) -> NoReturn:
        """Report the time from the copy, and end it."""
        os.write(self._answer_fd, struct.pack("d", ttft_s))
        os._exit(0)


@dataclass(frozen=True)
class Setting:
    """The engine, and the targets of its requests."""

    policy: SchedulingPolicy
    max_num_seqs: int
    pool_tokens: int
    noise: float
    seed: int
    target_ttft_s: Target
    step_limit_s: float | None = _STEP_LIMIT_S
    has_oracle: bool = False

    def serve(
        self, arrivals: Sequence[Arrival], door: OpenDoor, make_run: Callable[..., EngineRun] = EngineRun
    ) -> Outcome:
        rng = np.random.default_rng(self.seed)
        scheduler = _core.Scheduler(
            [_core.GroupSpec(1, self.pool_tokens // _BLOCK_SIZE)],
            block_size=_BLOCK_SIZE,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=_MAX_MODEL_LEN,
            scheduling_policy=self.policy,
            target_tpot_s=self.step_limit_s,
        )
        scheduler.remember_step_time(_LAW.coefficients)

        def step_s(plan: _core.StepPlan) -> float:
            return _LAW.predict(plan.work) * float(rng.lognormal(0.0, self.noise))

        run = make_run(scheduler, _MAX_MODEL_LEN, step_s, arrivals, door=door)
        if isinstance(door, OracleDoor):
            door.run = run
        return serve_alone(run)

    def door(self, *, refuses: bool) -> ForecastingDoor:
        limits = ForecastLimits(
            policy=self.policy,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            block_size=_BLOCK_SIZE,
            step_limit_s=self.step_limit_s,
        )
        make = OracleDoor if self.has_oracle else ForecastingDoor
        return make(limits, _LAW, self.pool_tokens, target_ttft_s=self.target_ttft_s, refuses=refuses)


def alone_s(num_tokens: int) -> float:
    """Return how long a prompt takes with no other requests."""
    work = _core.StepWork()
    work.add_row(0, num_tokens)
    num_steps = -(-num_tokens // MAX_NUM_BATCHED_TOKENS)
    return _LAW.predict(work) + (num_steps - 1) * _LAW.coefficients[-1]


@dataclass(frozen=True)
class Verdict:
    """The outcome for each request of a run, [N]."""

    outcome: Outcome
    target_s: npt.NDArray[np.float64]

    @property
    def is_refused(self) -> npt.NDArray[np.bool_]:
        return np.isnan(self.outcome.end_s)

    @property
    def is_late(self) -> npt.NDArray[np.bool_]:
        """Whether the first token was late; false for requests that had none."""
        return np.nan_to_num(self.outcome.ttft_s, nan=-1.0) > self.target_s

    @property
    def is_missed(self) -> npt.NDArray[np.bool_]:
        """Whether the first token or those after it were late."""
        tokens = np.maximum(self.outcome.output_tokens - 1, 1)
        tpot_s = (self.outcome.end_s - self.outcome.first_token_s) / tokens
        return self.is_late | (np.nan_to_num(tpot_s, nan=0.0) > _TARGET_TPOT_S)

    @property
    def wasted_part(self) -> float:
        """The part of the computed tokens whose requests were not in time."""
        computed = self.outcome.computed_tokens
        return float(computed[self.is_refused | self.is_missed].sum() / computed.sum())

    @property
    def busy_after_part(self) -> float:
        """The busy part of the seconds after refusals. If refusals oscillate, the engine stands still then."""
        outcome = self.outcome
        begin_s, end_s = outcome.step_end_s - outcome.step_s, outcome.step_end_s
        refused_s = outcome.arrival_s[self.is_refused]
        shares = [
            np.clip(np.minimum(end_s, at_s + _WINDOW_S) - np.maximum(begin_s, at_s), 0, None).sum() / _WINDOW_S
            for at_s in refused_s
        ]
        return float(np.mean(shares)) if shares else float("nan")


def parts(hits: npt.NDArray[np.bool_], of: npt.NDArray[np.bool_]) -> float:
    """Return the part of `of` that is also in `hits`; NaN if `of` is empty."""
    return float(hits[of].mean()) if of.any() else float("nan")


def best_recall(is_late: npt.NDArray[np.bool_], ratios: npt.NDArray[np.float64]) -> float:
    """Return the highest recall that a threshold on `ratios` reaches with a precision of at least 0.95."""
    named = [ratios > threshold for threshold in np.linspace(0.5, _MOST_RATIO, 101)]
    return max((parts(each, is_late) for each in named if parts(is_late, each) >= _PRECISION), default=0.0)


def study(setting: Setting, arrivals: Sequence[Arrival]) -> dict[str, dict[str, float]]:
    """Return the figures of the three runs."""
    target_s = np.array([setting.target_ttft_s(arrival) for arrival in arrivals])
    shadow = setting.door(refuses=False)
    unrefused = Verdict(setting.serve(arrivals, shadow), target_s)
    ratios = np.array([shadow.forecasts[i].hopeful_ttft_s for i in range(len(arrivals))]) / target_s
    named = ratios > 1
    waited = np.isin(np.arange(len(arrivals)), list(shadow.refused_waiting))
    found: dict[str, dict[str, float]] = {}
    refusing = setting.door(refuses=True)
    runs = {
        "nobody": unrefused,
        "when late": Verdict(setting.serve(arrivals, LateDoor(setting.target_ttft_s)), target_s),
        "forecast": Verdict(setting.serve(arrivals, refusing), target_s),
    }
    for name, run in runs.items():
        is_refused, is_missed = run.is_refused, run.is_missed
        found[name] = {
            "refused": float(is_refused.mean()),
            "missed": float(is_missed.mean()),
            "in_time": float((~is_refused & ~is_missed).mean()),
            "would_have_missed": parts(unrefused.is_missed, is_refused),
            "wasted": run.wasted_part,
            "busy_after": run.busy_after_part,
        }
    found["nobody"] |= {
        "precision": parts(unrefused.is_late, named),
        "recall": parts(named, unrefused.is_late),
        "precision_waiting": parts(unrefused.is_late, named | waited),
        "recall_waiting": parts(named | waited, unrefused.is_late),
        "best_recall": best_recall(unrefused.is_late, ratios),
    }
    late, forecast = runs["when late"], runs["forecast"]
    failed = (forecast.is_refused | forecast.is_missed).sum()
    found["forecast"]["of_late_refusals"] = float(failed / max(1, (late.is_refused | late.is_missed).sum()))
    found["forecast"]["refused_waiting"] = len(refusing.refused_waiting) / len(arrivals)
    return found


def at_load(arrivals: Sequence[Arrival], load: float, busy_s: float) -> list[Arrival]:
    """Return the requests at `load` of what the engine can do, which needs `busy_s` for all of them."""
    span_s = arrivals[-1].time_s - arrivals[0].time_s
    return [replace(a, time_s=(a.time_s - arrivals[0].time_s) * busy_s / (span_s * load)) for a in arrivals]


def rows_of(load: float, policy: str, runs: dict[str, dict[str, float]]) -> list[list[str]]:
    def part(value: float | None) -> str:
        return "" if value is None or np.isnan(value) else f"{value:.1%}"

    keys = (
        *("refused", "refused_waiting", "missed", "in_time"),
        *("precision", "recall", "best_recall", "precision_waiting", "recall_waiting"),
        *("would_have_missed", "wasted", "busy_after"),
    )
    rows = []
    for name, run in runs.items():
        ratio = run.get("of_late_refusals")
        cells = [part(run.get(key)) for key in keys]
        rows.append([f"{load:g}", policy, name, *cells, "" if ratio is None else f"x {ratio:.3f}"])
    return rows


def study_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of programs that serve a trace under targets in virtual time."""
    parser = trace_parser(doc)
    parser.set_defaults(seqs=64, pool_tokens=256_000)
    parser.add_argument("--target-s", type=float, default=10.0, help="seconds within which a first token is due")
    parser.add_argument(
        "--times-alone",
        type=float,
        default=3.0,
        help="a first token is due within this multiple of its time alone, if that is longer",
    )
    parser.add_argument("--noise", type=float, default=0.05, help="standard deviation of the logarithm of step times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write every figure here, as JSON")
    return parser


def target_of(args: argparse.Namespace) -> Target:
    """Return the time within which a first token is due: a fixed one, or a multiple of its time alone."""
    return lambda arrival: float(max(args.target_s, args.times_alone * alone_s(arrival.input_tokens)))


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument(
        "--loads",
        type=float,
        nargs="+",
        default=[0.8, 1.0, 1.3, 2.0],
        help="loads, as multiples of what the engine can do",
    )
    parser.add_argument("--policies", nargs="+", choices=get_args(SchedulingPolicy), default=["hrrn", "fcfs"])
    parser.add_argument(
        "--oracle",
        action="store_true",
        help="refuse by an exact forecast, which lacks only the requests that come later",
    )
    args = parser.parse_args()
    trace = spread_ties(read_trace(args.trace), np.random.default_rng(args.seed))[: args.requests]
    arrivals = [shortened(arrival, args.shrink) for arrival in trace]

    target_ttft_s = target_of(args)
    rows: list[list[str]] = []
    results: dict[str, Any] = {}
    for policy in args.policies:
        setting = Setting(
            policy, args.seqs, args.pool_tokens, args.noise, args.seed, target_ttft_s, has_oracle=args.oracle
        )
        busy_s = setting.serve(at_load(arrivals, 100.0, 1.0), OpenDoor()).busy_s
        for load in args.loads:
            runs = study(setting, at_load(arrivals, load, busy_s))
            results[f"{policy} {load:g}"] = runs
            rows += rows_of(load, policy, runs)
    heads = (
        *("load", "policy", "", "refused", "waiting", "late", "in time"),
        *("precision", "recall", "best recall", "or waiting: precision", "recall"),
        *("rightly", "wasted", "busy after", "failed, of when late"),
    )
    say(table(heads, rows))
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
