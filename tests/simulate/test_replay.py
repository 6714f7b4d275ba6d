"""A real engine's steps, replayed by the simulator: with the times that it measured, every plan is the same."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from swiftkv._core import Scheduler, StepPlan, StepResult
from swiftkv.bench.traces import Arrival
from swiftkv.engine.engine import Engine
from swiftkv.engine.lending import make_scheduler
from swiftkv.engine.runner import ModelRunner
from swiftkv.simulate.simulator import simulate
from tests.engine.engine_thread import EngineThread
from tests.support.checkpoints import make_checkpoint

OPTIONS = {"kv_bytes": 640 << 10, "max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 128}
BY_TIMES = {"scheduling_policy": "hrrn", "target_tpot_s": 0.004}
IN_TURN = {"scheduling_policy": "fcfs", "kv_bytes": 544 << 10}
Seen = tuple[Any, ...]


def seen(plan: StepPlan) -> Seen:
    """All of a plan but the answers' tokens, which a simulation has none of."""
    arrays = (plan.query_starts, plan.context_lens, plan.positions, plan.row_slots, plan.new_cached_tokens)
    ids = (plan.request_ids, plan.new_request_ids, plan.preempted_request_ids)
    tables = [table.tolist() for table in plan.stream_tables[0]]
    return *(array.tolist() for array in (*ids, *arrays)), tables, plan.num_prompt_tokens_in_step


@dataclass
class Recording:
    """The steps of an engine: it stands between the engine and its scheduler, and passes everything on."""

    scheduler: Scheduler
    arrived_s: dict[int, float] = field(default_factory=dict)
    begins_s: list[float] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    plans: list[Seen] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def add_request(self, request_id: int, prompt: npt.NDArray[np.int32], **options: Any) -> None:
        self.arrived_s[request_id] = options["arrival_s"]
        self.scheduler.add_request(request_id, prompt, **options)

    def schedule(self, now_s: float) -> StepPlan | None:
        plan = self.scheduler.schedule(now_s)
        if plan is not None:
            self.begins_s.append(now_s)
            self.plans.append(seen(plan))
        return plan

    def commit(self, sampled: npt.NDArray[np.int32], duration_s: float) -> StepResult:
        self.durations_s.append(duration_s)
        return self.scheduler.commit(sampled, duration_s)


class RecordedEngine(EngineThread[ModelRunner]):
    recording: Recording

    def prepare(self, engine: Engine) -> None:
        self.recording = Recording(engine._scheduler)
        engine._scheduler = self.recording  # type: ignore[assignment]


def traffic() -> list[Arrival]:
    """More than the memory holds at once, some of which begin alike."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 300, 40)
    return [
        Arrival(
            0.0, int(length), int(rng.integers(2, 100)), (int(rng.integers(3, 9)), 10 + i, 50 + i), block_tokens=100
        )
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(("options", "preempts"), [(BY_TIMES, False), (IN_TURN, True)], ids=["by times", "in turn"])
def test_recorded_steps_give_the_same_plans(tmp_path: Path, options: dict[str, Any], preempts: bool) -> None:
    """A slow machine may preempt nobody where times decide; in turn, the memory never suffices."""
    make_checkpoint(tmp_path, "llama")
    arrivals = traffic()
    engine = RecordedEngine(tmp_path, ModelRunner, **(OPTIONS | options))
    with engine.running():
        first = [engine.add(a.prompt().tolist(), max_tokens=a.output_tokens) for a in arrivals[:25]]
        engine.wait(first[:5])
        engine.wait([*first, *(engine.add(a.prompt().tolist(), max_tokens=a.output_tokens) for a in arrivals[25:])])
        recording = engine.recording
        group_specs = engine.runner.group_specs
    if preempts:
        assert any(plan[2] for plan in recording.plans), "nobody was preempted: the memory is too large for this test"

    first_id = first[0]
    timed = [replace(a, time_s=recording.arrived_s[first_id + i]) for i, a in enumerate(arrivals)]
    replayed: list[Seen] = []

    def step_s(plan: StepPlan) -> float:
        replayed.append(seen(plan))
        return recording.durations_s[len(replayed) - 1]

    scheduler = make_scheduler(engine.config, group_specs)
    simulate(scheduler, engine.config.max_model_len, step_s, timed, begins_s=recording.begins_s)
    ids = (0, 1, 2)  # a simulation counts requests from 0
    as_counted = [(*([i - first_id for i in plan[n]] for n in ids), *plan[3:]) for plan in recording.plans]
    assert len(replayed) == len(as_counted)
    assert replayed == as_counted
