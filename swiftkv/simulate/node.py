"""Several engines of a node in virtual time, which lend to each other and share the cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from swiftkv._core import Scheduler, StepPlan
from swiftkv.bench.traces import Arrival
from swiftkv.lease.messages import LendingSpec
from swiftkv.simulate.cores import Cores, CoreUser
from swiftkv.simulate.doors import OpenDoor
from swiftkv.simulate.leases import Clock, Leases, LeaseTotals
from swiftkv.simulate.simulator import EngineRun, Outcome, StepTime

_LOOK_AGAIN_S = 0.1  # the time after which an engine that could run nothing tries again, as a real one does


@dataclass(frozen=True, kw_only=True)
class SimulatedModel:
    """One model of a simulated node."""

    name: str
    scheduler: Scheduler
    max_model_len: int
    step_time: StepTime
    arrivals: Sequence[Arrival]
    user: CoreUser
    num_clients: int | None = None
    door: OpenDoor | None = None
    device: str = "cpu"
    """The device, which its models share."""
    lending: LendingSpec | None = None
    pool_bytes: int = 0


@dataclass(frozen=True)
class NodeOutcome:
    """The outcome of one model of a node."""

    requests: Outcome
    borrowed_hit_tokens: int
    """The tokens of prompts that were found in borrowed blocks."""
    copied_blocks: int
    core_s: float
    waited_s: float
    """The time that steps waited for other models' turns."""
    leases: LeaseTotals | None
    """`None` for a model that neither lends nor borrows."""
    begin_s: float
    """The time at which the first request of any model came."""
    end_s: float
    """The time at which the last request of any model ended."""

    @property
    def mean_lent_bytes(self) -> float:
        """The mean of the lent bytes from `begin_s` to `end_s`."""
        return self._mean(self.leases.lent_bytes) if self.leases else 0.0

    @property
    def mean_borrowed_bytes(self) -> float:
        """The mean of the borrowed bytes from `begin_s` to `end_s`."""
        return self._mean(self.leases.borrowed_bytes) if self.leases else 0.0

    def _mean(self, history: list[tuple[float, int]]) -> float:
        if self.end_s <= self.begin_s:  # no model had a request
            return float(history[-1][1])
        spans = pairwise([*history, (self.end_s, 0)])
        byte_s = sum(max(0.0, after_s - max(at_s, self.begin_s)) * held for (at_s, held), (after_s, _) in spans)
        return byte_s / (self.end_s - self.begin_s)


def simulate_together(models: Sequence[SimulatedModel], num_cores: int, max_wait_s: float) -> dict[str, NodeOutcome]:
    """Serve the arrivals of every model until the last has ended; return each model's outcome, by name.

    Models on one GPU compute in turns of equal length, as a device divides its time. A request that fits only into
    borrowed memory is given up after waiting for it for `max_wait_s`.
    """
    node = NodeRun(models, num_cores, max_wait_s)
    try:
        while node.step():
            pass
        return node.outcomes()
    finally:
        node.close()


class NodeRun:
    """A node in virtual time; `step` goes on to the next moment at which something happens."""

    def __init__(self, models: Sequence[SimulatedModel], num_cores: int, max_wait_s: float) -> None:
        self.clock = Clock()
        self._max_wait_s = max_wait_s
        self._leases = Leases(self.clock, [(m.name, m.scheduler, m.lending, m.pool_bytes) for m in models])
        self._cores = {
            device: Cores(num_cores if device == "cpu" else 1, [model.user for model in models])
            for device in dict.fromkeys(model.device for model in models)
        }
        self._engines = [_Engine(model) for model in models]
        self._leases.attach_all()

    def step(self) -> bool:
        """Go on to the next moment; return whether there is another one."""
        if all(engine.run.is_over for engine in self._engines):
            return False
        now_s = self.clock.now_s = self._next_s()
        for engine in self._engines:
            engine.run.arrive(now_s)
        for cores in self._cores.values():
            for number, duration_s in cores.advance(now_s):
                self._engines[number].run.end_step(now_s, duration_s)
                self._leases.demand_changed(number)
        self._leases.settle()
        while any(self._look(number, engine) for number, engine in enumerate(self._engines)):
            pass
        return True

    def outcomes(self) -> dict[str, NodeOutcome]:
        """Return the outcome of every model so far."""
        requests = [engine.run.outcome() for engine in self._engines]
        begin_s = min(float(of_one.arrival_s.min(initial=self.clock.now_s)) for of_one in requests)
        outcomes = {}
        for number, engine in enumerate(self._engines):
            cores = self._cores[engine.model.device]
            outcomes[engine.model.name] = NodeOutcome(
                requests=requests[number],
                borrowed_hit_tokens=engine.model.scheduler.stats().borrowed_hit_tokens_total,
                copied_blocks=engine.copied_blocks,
                core_s=cores.core_s[number],
                waited_s=cores.waited_s[number],
                leases=self._leases.totals(number),
                begin_s=begin_s,
                end_s=self.clock.now_s,
            )
        return outcomes

    def close(self) -> None:
        self._leases.close()

    def _next_s(self) -> float:
        moments = [engine.next_s for engine in self._engines] + [cores.next_s for cores in self._cores.values()]
        return max(self.clock.now_s, min(*moments, self._leases.next_s))

    def _look(self, number: int, engine: _Engine) -> bool:
        """Have an idle engine try to begin a step, if there may be something to run; return whether it tried."""
        now_s = self.clock.now_s
        if engine.run.is_in_step:
            return False
        is_due = engine.run.has_work and (engine.run.has_news or now_s >= engine.look_again_s)
        if not self._leases.take_wake(number) and not is_due:
            return False
        engine.run.enter(now_s)
        self._leases.demand_changed(number)
        self._leases.before_step(number)
        if engine.model.lending is not None:
            engine.run.give_up_starved(now_s, self._max_wait_s)
        work_s = engine.run.begin_step(now_s)
        if work_s is not None:
            engine.look_again_s = 0.0
            self._cores[engine.model.device].begin(number, work_s, now_s)
        elif engine.run.has_work:
            assert engine.model.lending is not None, "a request that fits the model waits for ever"
            engine.look_again_s = now_s + _LOOK_AGAIN_S
        return True


class _Engine:
    """One engine of the node, with the node's view of it."""

    def __init__(self, model: SimulatedModel) -> None:
        self.model = model
        self.copied_blocks = 0
        self.look_again_s = 0.0
        """The time at which to try again to begin a step; a time in the past means at once."""
        self.run = EngineRun(
            model.scheduler, model.max_model_len, self._step_s, model.arrivals, model.num_clients, model.door
        )

    @property
    def next_s(self) -> float:
        """The next time at which the engine has something to do besides the step in progress."""
        if self.run.has_work and not self.run.is_in_step:
            return min(self.run.next_arrival_s, self.look_again_s)
        return self.run.next_arrival_s

    def _step_s(self, plan: StepPlan) -> float:
        self.copied_blocks += int(plan.work.num_copies)
        return self.model.step_time(plan)
