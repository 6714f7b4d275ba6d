"""One model's engine in virtual time: its real scheduler and prefix index, with predicted times for its steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from swiftkv._core import GroupSpec, Scheduler, StepPlan
from swiftkv.bench.traces import Arrival
from swiftkv.model_config import ModelConfig
from swiftkv.planning.models import SizedPlan
from swiftkv.policies import SchedulingPolicy
from swiftkv.simulate.doors import OpenDoor

_FIRST_ANSWER_ID = 1 << 30
"""Token ids from here on stand for answers: every request has one of its own, so that no two answers are alike."""
_NO_STOP = np.array([], np.int32)

StepTime = Callable[[StepPlan], float]
"""Seconds that a step takes."""


@dataclass(frozen=True)
class Outcome:
    """The outcome for all requests, in the order of the trace; seconds are of the trace's clock. Arrays are [N].

    Times of requests that were refused or given up are NaN.
    """

    arrival_s: npt.NDArray[np.float64]
    first_token_s: npt.NDArray[np.float64]
    end_s: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    computed_tokens: npt.NDArray[np.int64]
    """Those of prompt and answer that steps computed, again after a preemption."""
    num_refused: int
    """Requests that are longer than the model takes; they are in no array."""
    num_preemptions: int
    step_end_s: npt.NDArray[np.float64]
    """When each step ended, [steps]."""
    step_s: npt.NDArray[np.float64]
    """How long each step took, [steps]."""

    @property
    def num_steps(self) -> int:
        return len(self.step_s)

    @property
    def busy_s(self) -> float:
        """The time that all steps took together."""
        return float(self.step_s.sum())

    @property
    def ttft_s(self) -> npt.NDArray[np.float64]:
        """Time to first token of each request."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> npt.NDArray[np.float64]:
        """Mean time per token after the first, of the requests that have more than one."""
        several = self.output_tokens > 1
        return (self.end_s - self.first_token_s)[several] / (self.output_tokens[several] - 1)

    @property
    def e2e_s(self) -> npt.NDArray[np.float64]:
        return self.end_s - self.arrival_s


def longest_alone(plan: SizedPlan) -> int:
    """Return the length of the longest request, in tokens, that the model serves without borrowed memory."""
    return min(plan.max_model_len, plan.longest_context)


def make_scheduler(model: ModelConfig, plan: SizedPlan, policy: SchedulingPolicy | None) -> Scheduler:
    """Return the scheduler that the model's engine would have, without lending; `policy` replaces the file's."""
    return Scheduler(
        [
            GroupSpec(group.num_layers, num_blocks, group.window, blocks_per_extent=plan.division.blocks_per_extent(i))
            for i, (group, num_blocks) in enumerate(zip(plan.groups, plan.group_blocks, strict=True))
        ],
        block_size=plan.block_size,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_model_len=longest_alone(plan),
        enable_prefix_caching=model.enable_prefix_caching,
        enable_chunked_prefill=model.enable_chunked_prefill,
        retention_interval=model.kv_cache.retention_interval,
        target_tpot_s=model.step_limit_s,
        long_prefill_token_threshold=model.long_prefill_token_threshold,
        max_num_partial_prefills=model.max_num_partial_prefills,
        max_long_partial_prefills=model.max_long_partial_prefills,
        scheduling_policy=policy or model.scheduling_policy,
    )


def simulate(
    scheduler: Scheduler,
    max_model_len: int,
    step_time: StepTime,
    arrivals: Sequence[Arrival],
    num_clients: int | None = None,
    door: OpenDoor | None = None,
    begins_s: Sequence[float] = (),
) -> Outcome:
    """Serve `arrivals`, ordered by time, to the last one's end: those that `door` lets in.

    With `num_clients` their times do not count: so many clients each send the next one when they have an answer. With
    `begins_s`, when the steps of a recording began, steps begin then: an engine has more to do than its steps.
    """
    assert num_clients is None or door is None or type(door) is OpenDoor, "clients wait for answers, not for refusals"
    accepted = [a for a in arrivals if a.output_tokens and 0 < a.input_tokens + a.output_tokens <= max_model_len]
    if num_clients is not None:
        accepted = [replace(a, time_s=0.0 if i < num_clients else math.inf) for i, a in enumerate(accepted)]
    run = _Run(scheduler, step_time, accepted, door or OpenDoor(), begins_s)
    run.to_the_end()
    return Outcome(
        arrival_s=run.arrival_s,
        first_token_s=run.first_token_s,
        end_s=run.end_s,
        input_tokens=np.array([arrival.input_tokens for arrival in accepted], np.int64),
        cached_tokens=run.cached_tokens,
        computed_tokens=run.computed_tokens,
        output_tokens=np.array([arrival.output_tokens for arrival in accepted], np.int64),
        num_refused=len(arrivals) - len(accepted),
        num_preemptions=scheduler.stats().num_preemptions_total,
        step_end_s=np.array(run.step_end_s),
        step_s=np.array(run.step_s),
    )


class _Run:
    """The state of a simulation: its clock, and what has happened to each request. A request's id is its index."""

    def __init__(
        self,
        scheduler: Scheduler,
        step_time: StepTime,
        arrivals: Sequence[Arrival],
        door: OpenDoor,
        begins_s: Sequence[float],
    ) -> None:
        self.arrival_s = np.array([arrival.time_s for arrival in arrivals])
        self.first_token_s = np.full(len(arrivals), np.nan)
        self.end_s = np.full(len(arrivals), np.nan)
        self.cached_tokens = np.zeros(len(arrivals), np.int64)
        self.computed_tokens = np.zeros(len(arrivals), np.int64)
        self.step_end_s: list[float] = []
        self.step_s: list[float] = []
        self._scheduler = scheduler
        self._step_time = step_time
        self._door = door
        self._begins_s = deque(begins_s)
        self._waiting = deque(enumerate(arrivals))
        self._let_in: list[tuple[int, Arrival]] = []
        self._now_s = 0.0

    def to_the_end(self) -> None:
        while self._waiting or self._let_in or self._scheduler.has_work():
            if self._begins_s:
                self._now_s = self._begins_s.popleft()
                self._arrive(self._now_s)
            elif not self._let_in and not self._scheduler.has_work():
                self._now_s = max(self._now_s, self._waiting[0][1].time_s)
                self._arrive(self._now_s)
            self._enter()
            if self._scheduler.has_work():
                self._step()

    def _arrive(self, until_s: float) -> None:
        """Ask the door about those that arrive until then."""
        while self._waiting and self._waiting[0][1].time_s <= until_s:
            request_id, arrival = self._waiting.popleft()
            if self._door.lets_in(request_id, arrival, arrival.time_s):
                self._let_in.append((request_id, arrival))

    def _enter(self) -> None:
        """Give the engine, between two steps, what has come for it."""
        for request_id, arrival in self._let_in:
            self._add(request_id, arrival)
        self._let_in.clear()
        if dropped := self._door.dropped(self._now_s):
            self._scheduler.abort(np.array(dropped, np.uint64))

    def _add(self, request_id: int, arrival: Arrival) -> None:
        arrival_s = float(self.arrival_s[request_id])
        self._scheduler.add_request(
            request_id,
            arrival.prompt(),
            max_tokens=arrival.output_tokens,
            min_tokens=0,
            stop_token_ids=_NO_STOP,
            namespace=b"simulated",
            skip_prefix_match=False,
            priority=arrival.priority,
            arrival_s=arrival_s,
            deadline_s=arrival_s + self._door.target_ttft_s(arrival),
            flow=arrival.flow,
        )

    def _step(self) -> None:
        plan = self._scheduler.schedule(self._now_s)
        assert plan is not None, "a request that fits the model waits for ever"
        for request_id, num_cached in zip(plan.new_request_ids.tolist(), plan.new_cached_tokens.tolist(), strict=True):
            self._door.begun(request_id, num_cached, self._now_s)
        duration_s = self._step_time(plan)
        self._arrive(self._now_s + duration_s)
        self._now_s += duration_s
        self.step_end_s.append(self._now_s)
        self.step_s.append(duration_s)
        self.cached_tokens[plan.new_request_ids] = plan.new_cached_tokens
        self.computed_tokens[plan.request_ids] += np.diff(plan.query_starts)
        request_ids = plan.request_ids[plan.logits_seqs].astype(np.int64)
        result = self._scheduler.commit((request_ids + _FIRST_ANSWER_ID).astype(np.int32), duration_s)
        first = np.isnan(self.first_token_s[request_ids])
        self.first_token_s[request_ids[first]] = self._now_s
        for request_id in request_ids.tolist():
            self._door.token(request_id, self._now_s)
        ended = request_ids[result.finish_reasons != 0]
        self.end_s[ended] = self._now_s
        for request_id in ended.tolist():
            self._door.ended(request_id, self._now_s)
        self._send_next(len(ended))

    def _send_next(self, count: int) -> None:
        """Let clients that have their answer send what waits for a client."""
        while count and self._waiting and math.isinf(self._waiting[0][1].time_s):
            request_id, arrival = self._waiting.popleft()
            self.arrival_s[request_id] = self._now_s
            self._add(request_id, arrival)
            count -= 1
