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
from swiftkv.lease.messages import LendingSpec
from swiftkv.lending_party import borrow_links, lend_links
from swiftkv.model_config import ModelConfig
from swiftkv.planning.models import SizedPlan
from swiftkv.policies import SchedulingPolicy
from swiftkv.simulate.doors import OpenDoor
from swiftkv.simulate.step_times import GatewayTime

_FIRST_ANSWER_ID = 1 << 30
"""The first of the token ids that stand for answers. Every request has its own, so no two answers are alike."""
_NO_STOP = np.array([], np.int32)

StepTime = Callable[[StepPlan], float]
"""Returns the seconds that a step takes."""


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
    """The tokens of prompt and answer that steps computed, including those computed again after a preemption."""
    num_refused: int
    """Requests that are longer than the model takes; they are in no array."""
    num_preemptions: int
    step_end_s: npt.NDArray[np.float64]
    """The time at which each step ended, [steps]."""
    step_s: npt.NDArray[np.float64]
    """The seconds that each step took, [steps]."""

    @property
    def num_steps(self) -> int:
        return len(self.step_s)

    @property
    def busy_s(self) -> float:
        """The time that all steps took together."""
        return float(self.step_s.sum())

    @property
    def ttft_s(self) -> npt.NDArray[np.float64]:
        """The time to first token of each request."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> npt.NDArray[np.float64]:
        """The mean time per token after the first, of the requests that have more than one."""
        several = self.output_tokens > 1
        return (self.end_s - self.first_token_s)[several] / (self.output_tokens[several] - 1)

    @property
    def e2e_s(self) -> npt.NDArray[np.float64]:
        return self.end_s - self.arrival_s

    def behind(self, gateway: GatewayTime) -> Outcome:
        """Return the outcome as clients behind the `gateway` see it."""
        return replace(
            self,
            arrival_s=self.arrival_s - gateway.request_s,
            first_token_s=self.first_token_s + gateway.token_s,
            end_s=self.end_s + gateway.token_s,
        )

    def served(self) -> Outcome:
        """Return the outcome of only those requests that got their whole answer."""
        is_served = ~np.isnan(self.end_s)
        return replace(
            self,
            arrival_s=self.arrival_s[is_served],
            first_token_s=self.first_token_s[is_served],
            end_s=self.end_s[is_served],
            input_tokens=self.input_tokens[is_served],
            cached_tokens=self.cached_tokens[is_served],
            output_tokens=self.output_tokens[is_served],
            computed_tokens=self.computed_tokens[is_served],
        )


def longest_alone(plan: SizedPlan) -> int:
    """Return the length of the longest request, in tokens, that the model serves without borrowed memory."""
    return min(plan.max_model_len, plan.longest_context)


def make_scheduler(
    model: ModelConfig, plan: SizedPlan, policy: SchedulingPolicy | None, lending: LendingSpec | None = None
) -> Scheduler:
    """Return the scheduler that the model's engine would have; `policy` replaces the file's."""
    return Scheduler(
        [
            GroupSpec(
                group.num_layers,
                num_blocks,
                group.window,
                group.layer_block_bytes,
                blocks_per_extent=plan.division.blocks_per_extent(i),
            )
            for i, (group, num_blocks) in enumerate(zip(plan.groups, plan.group_blocks, strict=True))
        ],
        block_size=plan.block_size,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_model_len=plan.max_model_len if lending and lending.lenders else longest_alone(plan),
        enable_prefix_caching=model.enable_prefix_caching,
        enable_chunked_prefill=model.enable_chunked_prefill,
        lend_links=lend_links(lending),
        borrow_links=borrow_links(lending),
        stream_buffers=lending.stream_buffers if lending else 2,
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
    """Serve those of `arrivals`, ordered by time, that `door` lets in, until the last one has ended.

    With `num_clients` the times of arrivals do not count. Each of that many clients sends a request, waits for the
    answer, and sends the next turn of the conversation; after the last turn it takes the next request that has no
    client. With `begins_s`, the times at which the steps of a recording began, steps begin at these times: a real
    engine also works between its steps.
    """
    return serve_alone(EngineRun(scheduler, max_model_len, step_time, arrivals, num_clients, door), begins_s)


def serve_alone(engine: EngineRun, recorded_begins_s: Sequence[float] = ()) -> Outcome:
    """Run an engine that has its device for itself until its last request has ended."""
    begins_s = deque(recorded_begins_s)
    now_s = 0.0
    while not engine.is_over:
        if begins_s:
            now_s = begins_s.popleft()
            engine.arrive(now_s)
        elif not engine.has_work:
            now_s = max(now_s, engine.next_arrival_s)
            engine.arrive(now_s)
        engine.enter(now_s)
        if engine.has_work:
            duration_s = engine.begin_step(now_s)
            assert duration_s is not None, "a request that fits the model waits for ever"
            now_s += duration_s
            if not begins_s:  # a recorded duration also has what the engine did before the step began
                engine.arrive(now_s)
            engine.end_step(now_s, duration_s)
    return engine.outcome()


class EngineRun:
    """An engine in virtual time, and the times of each of its requests. A request's id is its index.

    The caller keeps the clock, and ends each step that it begins.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        max_model_len: int,
        step_time: StepTime,
        arrivals: Sequence[Arrival],
        num_clients: int | None = None,
        door: OpenDoor | None = None,
    ) -> None:
        """The arguments are those of `simulate`."""
        assert num_clients is None or door is None or type(door) is OpenDoor, "clients wait for answers, not refusals"
        accepted = [a for a in arrivals if a.output_tokens and 0 < a.input_tokens + a.output_tokens <= max_model_len]
        self._next_turn: dict[int, int] = {}
        firsts = list(range(len(accepted)))
        if num_clients is not None:
            firsts, self._next_turn = _conversations(accepted)
            begun = set(firsts[:num_clients])
            accepted = [replace(a, time_s=0.0 if i in begun else math.inf) for i, a in enumerate(accepted)]
        self._scheduler = scheduler
        self._step_time = step_time
        self._door = door or OpenDoor()
        self._arrivals = accepted
        self._num_refused = len(arrivals) - len(accepted)
        self._waiting = deque((i, accepted[i]) for i in firsts)  # turns after the first come with an answer
        self._let_in: list[tuple[int, Arrival]] = []
        self._plan: StepPlan | None = None  # the step in progress
        self._arrival_s = np.array([arrival.time_s for arrival in accepted])
        self._first_token_s = np.full(len(accepted), np.nan)
        self._end_s = np.full(len(accepted), np.nan)
        self._cached_tokens = np.zeros(len(accepted), np.int64)
        self._computed_tokens = np.zeros(len(accepted), np.int64)
        self._step_end_s: list[float] = []
        self._step_s: list[float] = []

    @property
    def has_work(self) -> bool:
        """Whether any request has come and not ended."""
        return bool(self._let_in) or self._scheduler.has_work()

    @property
    def is_over(self) -> bool:
        return not self._waiting and not self.has_work

    @property
    def has_news(self) -> bool:
        """Whether any request has come that the engine has not got yet."""
        return bool(self._let_in)

    @property
    def is_in_step(self) -> bool:
        return self._plan is not None

    @property
    def next_arrival_s(self) -> float:
        """The time of the next request; infinite if there is none, or none before some client has its answer."""
        return self._waiting[0][1].time_s if self._waiting else math.inf

    def end_arrivals(self) -> None:
        """Let no further request arrive."""
        self._waiting.clear()

    def arrive(self, until_s: float) -> None:
        """Ask the door about the requests that arrive until `until_s`."""
        while self._waiting and self._waiting[0][1].time_s <= until_s:
            request_id, arrival = self._waiting.popleft()
            if self._door.lets_in(request_id, arrival, arrival.time_s):
                self._let_in.append((request_id, arrival))

    def enter(self, now_s: float) -> None:
        """Give the engine, between two steps, the requests that have come for it."""
        for request_id, arrival in self._let_in:
            self._add(request_id, arrival)
        self._let_in.clear()
        if dropped := self._door.dropped(now_s):
            self._scheduler.abort(np.array(dropped, np.uint64))

    def begin_step(self, now_s: float) -> float | None:
        """Plan a step, and return how long it takes on cores of its own; `None` if nothing can run."""
        plan = self._scheduler.schedule(now_s)
        if plan is None:
            return None
        for request_id, num_cached in zip(plan.new_request_ids.tolist(), plan.new_cached_tokens.tolist(), strict=True):
            self._door.begun(request_id, num_cached, now_s)
        self._plan = plan
        return self._step_time(plan)

    def end_step(self, now_s: float, duration_s: float) -> None:
        """End the step in progress, which has taken `duration_s`."""
        plan, self._plan = self._plan, None
        assert plan is not None
        self._step_end_s.append(now_s)
        self._step_s.append(duration_s)
        self._cached_tokens[plan.new_request_ids] = plan.new_cached_tokens
        self._computed_tokens[plan.request_ids] += np.diff(plan.query_starts)
        request_ids = plan.request_ids[plan.logits_seqs].astype(np.int64)
        result = self._scheduler.commit((request_ids + _FIRST_ANSWER_ID).astype(np.int32), duration_s)
        first = np.isnan(self._first_token_s[request_ids])
        self._first_token_s[request_ids[first]] = now_s
        for request_id in request_ids.tolist():
            self._door.token(request_id, now_s)
        ended = request_ids[result.finish_reasons != 0]
        self._end_s[ended] = now_s
        for request_id in ended.tolist():
            self._door.ended(request_id, now_s)
        self._send_next(ended.tolist(), now_s)

    def give_up_starved(self, now_s: float, max_wait_s: float) -> None:
        """Give up the requests that have waited for borrowed memory longer than `max_wait_s`."""
        starved = self._scheduler.starved(now_s, max_wait_s)
        if starved:
            self._scheduler.abort(np.array(starved, np.uint64))
            self._send_next(starved, now_s)

    def outcome(self) -> Outcome:
        return Outcome(
            arrival_s=self._arrival_s,
            first_token_s=self._first_token_s,
            end_s=self._end_s,
            input_tokens=np.array([arrival.input_tokens for arrival in self._arrivals], np.int64),
            cached_tokens=self._cached_tokens,
            computed_tokens=self._computed_tokens,
            output_tokens=np.array([arrival.output_tokens for arrival in self._arrivals], np.int64),
            num_refused=self._num_refused,
            num_preemptions=self._scheduler.stats().num_preemptions_total,
            step_end_s=np.array(self._step_end_s),
            step_s=np.array(self._step_s),
        )

    def _add(self, request_id: int, arrival: Arrival) -> None:
        arrival_s = float(self._arrival_s[request_id])
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

    def _send_next(self, ended: Sequence[int], now_s: float) -> None:
        """Let clients whose requests have ended send their next ones."""
        for request_id in ended:
            following = self._next_turn.get(request_id)
            if following is None and self._waiting and math.isinf(self._waiting[0][1].time_s):
                following, _ = self._waiting.popleft()
            if following is not None:
                self._arrival_s[following] = now_s
                self._add(following, self._arrivals[following])


def _conversations(arrivals: Sequence[Arrival]) -> tuple[list[int], dict[int, int]]:
    """Return the indices of the first turns of all conversations, and what follows each turn but the last."""
    firsts, following = [], {}
    last: dict[int, int] = {}
    for i, arrival in enumerate(arrivals):
        if arrival.conversation is None or arrival.conversation not in last:
            firsts.append(i)
        else:
            following[last[arrival.conversation]] = i
        if arrival.conversation is not None:
            last[arrival.conversation] = i
    return firsts, following
