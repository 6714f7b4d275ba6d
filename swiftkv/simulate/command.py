"""`swiftkv simulate`: a node's models, each alone, serve a trace in virtual time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from swiftkv._core import StepPlan, StepTime
from swiftkv.bench.datasets import DatasetError
from swiftkv.bench.traces import Arrival, read_trace, spread_ties
from swiftkv.config import Config
from swiftkv.errors import ConfigError
from swiftkv.model_config import ModelConfig
from swiftkv.planning.models import ModelPlan, SizedPlan
from swiftkv.policies import SchedulingPolicy
from swiftkv.simulate.doors import OpenDoor, same_for_all
from swiftkv.simulate.report import Targets, as_table, figures
from swiftkv.simulate.simulator import Outcome, longest_alone, make_scheduler, simulate
from swiftkv.simulate.step_times import make_step_time, read_step_times


@dataclass(frozen=True)
class Options:
    """The choices of the command line."""

    trace: Path
    step_time: str
    rate: float = 1.0
    """The trace's requests come so many times as fast."""
    requests: int | None = None
    """Only so many, from the start."""
    clients: int | None = None
    """The number of clients, each of which sends its next request when it has an answer; `None`: the trace's times."""
    policy: SchedulingPolicy | None = None
    """In place of the file's `scheduling_policy`."""
    seed: int = 0
    targets: Targets = field(default_factory=Targets)
    save_step_time: Path | None = None


def simulate_node(config: Config, plans: tuple[ModelPlan, ...], models: list[str], options: Options) -> dict[str, Any]:
    """Serve the trace with each of `models` (all, if it is empty), and return their figures.

    Raises `ConfigError` for a model, a trace, or step times that are not there.
    """
    known = read_step_times(options.step_time)
    if options.save_step_time is not None:
        options.save_step_time.write_text(json.dumps(known, indent=1) + "\n")
    arrivals = _arrivals(options)
    outcomes: dict[str, Outcome] = {}
    for model, plan in _chosen(config, plans, models):
        print(f"{plan.name}: {len(arrivals):,} requests …", file=sys.stderr)
        step_time = make_step_time(plan.name, known)
        scheduler = make_scheduler(model, plan, options.policy)
        outcomes[plan.name] = simulate(
            scheduler,
            longest_alone(plan),
            _predictor(step_time),
            arrivals,
            num_clients=options.clients,
            door=OpenDoor(same_for_all(model.due_s)),
        )
    try:
        return {name: figures(outcome, options.targets) for name, outcome in outcomes.items()}
    except ValueError as error:
        raise ConfigError(f"--trace: {error}") from None


def _predictor(step_time: StepTime) -> Callable[[StepPlan], float]:
    return lambda plan: step_time.predict(plan.work)


def print_figures(models: dict[str, Any]) -> None:
    """Print the figures as a table."""
    from rich.console import Console

    Console(highlight=False).print(as_table(models))


def _chosen(config: Config, plans: tuple[ModelPlan, ...], names: list[str]) -> list[tuple[ModelConfig, SizedPlan]]:
    known = [model.name for model in config.models]
    for name in names:
        if name not in known:
            raise ConfigError(f"--model: no model '{name}'; there is: {', '.join(known)}")
    chosen = []
    for index, (model, plan) in enumerate(zip(config.models, plans, strict=True)):
        if names and model.name not in names:
            continue
        if not isinstance(plan, SizedPlan):
            raise ConfigError(
                f"models[{index}].kv_cache.memory: {plan.memory} of a GPU is a number of bytes only once the model is "
                "loaded; write a size such as 40GiB to simulate it"
            )
        chosen.append((model, plan))
    return chosen


def _arrivals(options: Options) -> list[Arrival]:
    """Return the trace's requests in their own order, requests of one instant spread, at the rate asked for."""
    try:
        arrivals = spread_ties(read_trace(options.trace), np.random.default_rng(options.seed))
    except DatasetError as error:
        raise ConfigError(f"--trace: {error}") from None
    return [replace(arrival, time_s=arrival.time_s / options.rate) for arrival in arrivals[: options.requests]]
