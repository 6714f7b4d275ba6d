"""`swiftkv simulate`: a node's models serve traces in virtual time, each alone or all together."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from swiftkv._core import StepPlan, StepTime
from swiftkv.bench.datasets import DatasetError
from swiftkv.bench.traces import Arrival, read_trace, spread_ties
from swiftkv.config import Config
from swiftkv.engine.messages import STEP_TIME_TERMS
from swiftkv.engine_configs import compile_engines
from swiftkv.errors import ConfigError
from swiftkv.lease.messages import LendingSpec
from swiftkv.model_config import ModelConfig
from swiftkv.planning.models import ModelPlan, SizedPlan
from swiftkv.policies import SchedulingPolicy
from swiftkv.simulate.cores import CoreShare, CoreUser
from swiftkv.simulate.doors import OpenDoor, same_for_all
from swiftkv.simulate.node import SimulatedModel, simulate_together
from swiftkv.simulate.plots import check_can_draw, draw
from swiftkv.simulate.report import Targets, as_table, figures, node_figures
from swiftkv.simulate.simulator import Outcome, longest_alone, make_scheduler, simulate
from swiftkv.simulate.step_times import make_gateway_time, make_step_time, read_step_times
from swiftkv.tables import console_for
from swiftkv.transport.topology import TransportChoice
from swiftkv.units import LARGEST_COUNT

AnyOutcome = TypeVar("AnyOutcome")


@dataclass(frozen=True)
class Options:
    """The choices of the command line."""

    traces: tuple[str, ...]
    """One file for all models, each alone; or `NAME=FILE` for each model that has requests, all together."""
    step_time: str
    rate: float = 1.0
    """The factor by which the trace's requests come faster."""
    requests: int | None = None
    """The number of requests to serve, from the start of the trace; `None`: all."""
    clients: int | None = None
    """The number of clients, each of which sends its next request when it has an answer; `None`: the trace's times."""
    policy: SchedulingPolicy | None = None
    """The policy in place of the file's `scheduling_policy`."""
    seed: int = 0
    targets: Targets = field(default_factory=Targets)
    save_step_time: Path | None = None
    cores: int | None = None
    """The cores that models on the CPU share; `None`: those of this machine."""
    copied_bytes_per_s: int | None = None
    """The speed of copies, in place of the step times' own term for copied blocks."""
    plot: Path | None = None


def simulate_node(config: Config, plans: tuple[ModelPlan, ...], models: list[str], options: Options) -> dict[str, Any]:
    """Serve the traces, and return figures for each of `models`, or for all models if it is empty.

    Raises `ConfigError` for a model, a trace, or step times that do not exist.
    """
    traces = traces_by_model(options.traces, [model.name for model in config.models])
    if options.plot is not None:
        if traces is None:
            raise ConfigError("--plot: only with --trace NAME=FILE, where models run together")
        check_can_draw(options.plot)
    known = read_step_times(options.step_time)
    if options.save_step_time is not None:
        try:
            options.save_step_time.write_text(json.dumps(known, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                f"--save-step-time: {options.save_step_time} cannot be written: {error.strerror}"
            ) from None
    if traces is None:
        return _each_alone(config, plans, models, options, known)
    if models:
        raise ConfigError("--model: only with one --trace FILE; a model that has no --trace NAME=FILE gets no requests")
    return _all_together(config, plans, traces, options, known)


def traces_by_model(traces: Sequence[str], names: Sequence[str]) -> dict[str, Path] | None:
    """Return the trace file of each model that `traces` names; `None` if there is one file for all models.

    Raises `ConfigError` for anything else.
    """
    named = {name: Path(file) for name, equals, file in (trace.partition("=") for trace in traces) if equals}
    if not named and len(traces) == 1:
        return None
    if len(named) < len(traces):
        raise ConfigError("--trace: write one FILE, or NAME=FILE once for each model that has requests")
    for name in named:
        _check_name("--trace", name, names)
    return named


def _check_name(option: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise ConfigError(f"{option}: no model '{name}'; the file has: {', '.join(names)}")


def _each_alone(
    config: Config,
    plans: tuple[ModelPlan, ...],
    models: list[str],
    options: Options,
    known: dict[str, dict[str, float]],
) -> dict[str, Any]:
    [arrivals] = _from_zero([_arrivals(Path(options.traces[0]), options)])
    outcomes: dict[str, Outcome] = {}
    for model, plan in _chosen(config, plans, models):
        print(f"{plan.name}: {len(arrivals):,} requests …", file=sys.stderr)
        step_time = _step_time(plan, options, known)
        scheduler = make_scheduler(model, plan, options.policy)
        outcomes[plan.name] = simulate(
            scheduler,
            longest_alone(plan),
            _predictor(step_time),
            arrivals,
            num_clients=options.clients,
            door=OpenDoor(same_for_all(model.due_s)),
        ).behind(make_gateway_time(plan.name, known))
    return _of_all(outcomes, options.targets, figures)


def _all_together(
    config: Config,
    plans: tuple[ModelPlan, ...],
    traces: dict[str, Path],
    options: Options,
    known: dict[str, dict[str, float]],
) -> dict[str, Any]:
    specs = _lending_specs(config, plans)
    models = []
    arrivals_of = dict(zip(traces, _from_zero([_arrivals(trace, options) for trace in traces.values()]), strict=True))
    for model, plan in _chosen(config, plans, []):
        arrivals = arrivals_of.get(plan.name, [])
        print(f"{plan.name}: {len(arrivals):,} requests", file=sys.stderr)
        step_time = _step_time(plan, options, known) if arrivals else StepTime([0.0] * len(STEP_TIME_TERMS))
        if arrivals and _borrows(specs[plan.name]) and not step_time.coefficients[STEP_TIME_TERMS.index("copy")]:
            print(
                f"{plan.name}: its step times have no time for copies, so borrowed memory counts as fast as its own; "
                "give --copy-rate",
                file=sys.stderr,
            )
        models.append(
            _simulated(model, plan, options, lending=specs[plan.name], step_time=step_time, arrivals=arrivals)
        )
    num_cores = options.cores or len(os.sched_getaffinity(0))
    outcomes = {
        name: replace(outcome, requests=outcome.requests.behind(make_gateway_time(name, known)))
        for name, outcome in simulate_together(models, num_cores, config.node.lending.max_wait).items()
    }
    if options.plot is not None:
        draw(outcomes, options.plot)
    return _of_all(outcomes, options.targets, node_figures)


def _simulated(
    model: ModelConfig,
    plan: SizedPlan,
    options: Options,
    *,
    lending: LendingSpec | None,
    step_time: StepTime,
    arrivals: list[Arrival],
) -> SimulatedModel:
    return SimulatedModel(
        name=plan.name,
        scheduler=make_scheduler(model, plan, options.policy, lending),
        max_model_len=plan.max_model_len if _borrows(lending) else longest_alone(plan),
        step_time=_predictor(step_time),
        arrivals=arrivals,
        num_clients=options.clients,
        door=OpenDoor(same_for_all(model.due_s)),
        device=model.device,
        user=_core_user(model),
        lending=lending,
        pool_bytes=plan.pool_bytes,
    )


def _borrows(lending: LendingSpec | None) -> bool:
    return lending is not None and bool(lending.lenders)


def _of_all(
    outcomes: dict[str, AnyOutcome], targets: Targets, figures_of: Callable[[AnyOutcome, Targets], dict[str, Any]]
) -> dict[str, Any]:
    """Return the figures of every model. Raises `ConfigError` for one that served no request."""
    found = {}
    for name, outcome in outcomes.items():
        try:
            found[name] = figures_of(outcome, targets)
        except ValueError as error:
            raise ConfigError(f"--trace: model '{name}': {error}") from None
    return found


def _lending_specs(config: Config, plans: tuple[ModelPlan, ...]) -> dict[str, LendingSpec | None]:
    """Return the lending spec that each model's engine would get."""
    if not config.node.lending.enabled:
        return {plan.name: None for plan in plans}
    transport = TransportChoice("shm", "simulated")
    numbers = {plan.name: number for number, plan in enumerate(plans)}
    transports = {"GPUs": transport, "the host": transport}
    engines = compile_engines(config, plans, transports, Path("simulated"), numbers)
    return {engine.name: engine.lending for engine in engines}


def _core_user(model: ModelConfig) -> CoreUser:
    """Return how a model's engine uses its device; a GPU is one core."""
    is_gpu = model.device != "cpu"
    share = CoreShare(model.share.weight, model.share.max_share, is_whole=is_gpu) if model.share else None
    return CoreUser(1 if is_gpu else model.threads, share)


def _step_time(plan: SizedPlan, options: Options, known: dict[str, dict[str, float]]) -> StepTime:
    """Return the predictor of a model's steps, with the copy rate that the options name."""
    step_time = make_step_time(plan.name, known)
    if options.copied_bytes_per_s is None:
        return step_time
    terms = dict(zip(STEP_TIME_TERMS, step_time.coefficients, strict=True))
    terms["copy"] = plan.block_bytes / len(plan.groups) / options.copied_bytes_per_s
    return StepTime(list(terms.values()), step_time.token_ratios)


def _predictor(step_time: StepTime) -> Callable[[StepPlan], float]:
    return lambda plan: step_time.predict(plan.work)


def print_figures(models: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = as_table(models)
    console_for(table).print(table)


def _chosen(config: Config, plans: tuple[ModelPlan, ...], names: list[str]) -> list[tuple[ModelConfig, SizedPlan]]:
    known = [model.name for model in config.models]
    for name in names:
        _check_name("--model", name, known)
    chosen = []
    for index, (model, plan) in enumerate(zip(config.models, plans, strict=True)):
        if names and model.name not in names:
            continue
        if not isinstance(plan, SizedPlan):
            raise ConfigError(
                f"models[{index}].kv_cache.memory: {plan.memory} of a GPU is a number of bytes only once the model is "
                "loaded; write a size such as 40GiB to simulate it"
            )
        if max(plan.group_blocks) > LARGEST_COUNT:
            raise ConfigError(
                f"models[{index}].kv_cache.memory: {plan.memory} is {max(plan.group_blocks):,} blocks, and at most "
                f"{LARGEST_COUNT:,} can be simulated"
            )
        chosen.append((model, plan))
    return chosen


def _arrivals(trace: Path, options: Options) -> list[Arrival]:
    """Return the requests of a trace in order, at the wanted rate, with those of one timestamp spread."""
    try:
        arrivals = spread_ties(read_trace(trace), np.random.default_rng(options.seed))
    except DatasetError as error:
        raise ConfigError(f"--trace: {error}") from None
    return [replace(arrival, time_s=arrival.time_s / options.rate) for arrival in arrivals[: options.requests]]


def _from_zero(traces: Sequence[list[Arrival]]) -> list[list[Arrival]]:
    """Count time from the first request of all traces: they may begin in 1970."""
    start_s = min((arrivals[0].time_s for arrivals in traces if arrivals), default=0.0)
    return [[replace(arrival, time_s=arrival.time_s - start_s) for arrival in arrivals] for arrivals in traces]
