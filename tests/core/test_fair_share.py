"""Flows share what is computed by their weights: the bound of virtual token counters, and what it is good for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import combinations, count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_oracle import Engine
from naive_scheduler import Setup

from swiftkv import _core
from swiftkv.policies import SchedulingPolicy

BLOCK = 4
MAX_NUM_SEQS = 4
NO_STOP = np.array([], np.int32)
CREDIT = 8  # slacks that an idle flow earns
ANSWER = 2  # what a token of an answer counts, and one of a prompt 1


@dataclass
class Flow:
    weight: float
    served: float = 0.0  # tokens over the weight
    waiting: set[int] = field(default_factory=set)


@dataclass
class Sharing:
    """A scheduler with room for everybody, and what each flow has had of it."""

    slack: int  # tokens of a step
    weights: list[float]
    policy: SchedulingPolicy = "hrrn"
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.scheduler = _core.Scheduler(
            [_core.GroupSpec(1, 4096)],
            block_size=BLOCK,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=self.slack,
            max_model_len=256,
            scheduling_policy=self.policy,
        )
        self.flows = [Flow(weight) for weight in self.weights]
        self.flow_of: dict[int, int] = {}
        self.length_of: dict[int, int] = {}
        self.finished: list[int] = []
        self.ids = count()

    def add(self, flow: int, length: int, max_tokens: int, priority: int = 0) -> int:
        request_id = next(self.ids)
        prompt = np.random.default_rng(request_id).integers(0, 1 << 30, length, dtype=np.int32)
        self.scheduler.add_request(
            request_id, prompt, max_tokens, 0, NO_STOP, b"", False, priority, self.now_s,
            flow=flow, flow_weight=self.weights[flow],
        )  # fmt: skip
        self.flow_of[request_id], self.length_of[request_id] = flow, length
        self.flows[flow].waiting.add(request_id)
        return request_id

    def step(self) -> bool:
        plan = self.scheduler.schedule(self.now_s)
        if plan is None:
            return False
        self.now_s += 0.01 * len(plan.token_ids)
        for request_id, cached in zip(plan.new_request_ids.tolist(), plan.new_cached_tokens.tolist(), strict=True):
            flow = self.flows[self.flow_of[request_id]]
            flow.waiting.remove(request_id)
            flow.served += (self.length_of[request_id] - cached) / flow.weight
        result = self.scheduler.commit(np.full(len(plan.logits_rows), 7, np.int32))
        for request_id, reason in zip(result.request_ids.tolist(), result.finish_reasons.tolist(), strict=True):
            flow = self.flows[self.flow_of[request_id]]
            flow.served += ANSWER / flow.weight
            if reason:
                self.finished.append(request_id)
        return True


REQUESTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 12), st.sampled_from([0, 0, 0, 1, 3, 8, 40])),
    min_size=20,
    max_size=120,
)  # flow, prompt, answer, and how many steps come before it


@settings(max_examples=80, deadline=None)
@given(
    REQUESTS,
    st.lists(st.sampled_from([0.5, 1.0, 1.0, 4.0]), min_size=4, max_size=4),
    st.sampled_from([8, 16, 64]),
    st.sampled_from(["hrrn", "spf", "turns", "deadline", "priority", "fcfs"]),
)
def test_two_flows_that_both_wait_get_alike(
    requests: list[tuple[int, int, int, int]], weights: list[float], slack: int, policy: SchedulingPolicy
) -> None:
    """While both wait, counters differ by no more than slack and credit, and the requests of one that run."""
    sharing = Sharing(slack, weights, policy)
    longest = max(length for _, length, _, _ in requests)
    most_running = MAX_NUM_SEQS * max(answer for _, _, answer, _ in requests)
    bounds = [CREDIT * slack + slack + (longest + ANSWER * most_running) / weight for weight in weights]
    begun: dict[tuple[int, int], float] = {}  # by pair of flows: the difference when both began to wait

    def check() -> None:
        for pair in combinations(range(4), 2):
            a, b = (sharing.flows[flow] for flow in pair)
            if not (a.waiting and b.waiting):
                begun.pop(pair, None)
                continue
            difference = a.served - b.served
            grown = difference - begun.setdefault(pair, difference)
            assert abs(grown) <= bounds[pair[0]] + bounds[pair[1]] + 0.01

    for flow, length, answer, num_steps in requests:
        for _ in range(num_steps):
            sharing.step()
            check()
        sharing.add(flow, length, answer)
        check()
    while sharing.step():
        check()
    assert len(sharing.finished) == len(requests)


@pytest.mark.parametrize("answers", [(3, 3), (12, 1)], ids=["answers alike", "long and short answers"])
@pytest.mark.parametrize(("weights", "part"), [([1.0, 1.0], 1 / 2), ([3.0, 1.0], 3 / 4), ([1.0, 4.0], 1 / 5)])
def test_flows_that_always_wait_get_their_parts(weights: list[float], part: float, answers: tuple[int, int]) -> None:
    sharing = Sharing(64, weights)
    for _ in range(400):
        for flow, length in ((0, 20), (1, 30)):
            while len(sharing.flows[flow].waiting) < 5:
                sharing.add(flow, length, answers[flow])
        sharing.step()
    tokens = [flow.served * flow.weight for flow in sharing.flows]
    assert tokens[0] / sum(tokens) == pytest.approx(part, abs=0.02)


@pytest.mark.parametrize("policy", ["hrrn", "spf", "turns", "deadline", "priority", "fcfs"])
def test_who_comes_now_and_then_does_not_wait_behind_a_flood(policy: SchedulingPolicy) -> None:
    sharing = Sharing(16, [1.0, 1.0], policy)
    for _ in range(300):
        sharing.add(0, 12, 4)
    waited: deque[int] = deque()
    for _ in range(10):
        for _ in range(12):
            sharing.step()
        request_id = sharing.add(1, 12, 4)
        steps = 0
        while request_id not in sharing.finished:
            sharing.step()
            steps += 1
        waited.append(steps)
    assert sharing.flows[0].waiting
    assert max(waited) <= 20  # of some 300; those that run take four steps each


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(["hrrn", "spf", "turns", "deadline", "priority", "fcfs"]), st.sampled_from([8, 16]), st.data())
def test_a_prompt_in_part_of_who_is_past_its_share_goes_on_behind_others(
    policy: SchedulingPolicy, slack: int, data: st.DataObject
) -> None:
    """Another flow's prompt is computed from the next step on, and has all tokens of each until it is done.

    More than one token is left of the prompt in part: the last one counts as that of an answer.
    """
    sharing = Sharing(slack, [1.0, 1.0], policy)
    long = data.draw(st.integers(3 * slack, 15 * slack), "tokens of the prompt in part")
    sharing.add(0, long, 1)
    for _ in range(data.draw(st.integers(1, (long - 2) // slack), "steps before")):
        sharing.step()
    length = data.draw(st.integers(1, min(long, CREDIT * slack) - slack), "tokens of the other's prompt")
    request_id = sharing.add(1, length, 1)
    for _ in range(-(-length // slack)):
        assert sharing.finished == []
        sharing.step()
    assert sharing.finished[0] == request_id
    while sharing.step():
        pass
    assert len(sharing.finished) == 2


def test_who_was_idle_for_long_gets_no_more_than_its_credit_ahead() -> None:
    sharing = Sharing(16, [1.0, 1.0])
    for _ in range(400):
        sharing.add(0, 12, 4)
    for _ in range(200):
        sharing.step()
    before = sharing.flows[0].served
    for _ in range(100):
        sharing.add(1, 12, 4)
    for _ in range(100):
        sharing.step()
    assert all(flow.waiting for flow in sharing.flows)
    ahead = sharing.flows[1].served - (sharing.flows[0].served - before)
    assert CREDIT * 16 / 2 <= ahead <= CREDIT * 16 + 2 * (16 + 12 + ANSWER * 16)


def test_flows_that_come_one_after_the_other_begin_alike() -> None:
    """Each has its credit, and none counts from where another begins with its own."""
    sharing = Sharing(16, [1.0] * 5)
    for _ in range(100):
        sharing.add(0, 12, 4)
    for _ in range(50):
        sharing.step()
    for flow in (1, 2, 3, 4):
        for _ in range(20):
            sharing.add(flow, 12, 4)
    for _ in range(20):
        sharing.step()
    served = [flow.served for flow in sharing.flows[1:]]
    assert max(served) - min(served) <= 16 + 12 + ANSWER * 4 * MAX_NUM_SEQS


def test_priority_comes_before_shares() -> None:
    sharing = Sharing(16, [1.0, 1.0])
    late = [sharing.add(0, 12, 1, priority=1) for _ in range(5)]
    first = [sharing.add(1, 12, 1, priority=0) for _ in range(20)]
    while sharing.step():
        pass
    assert set(sharing.finished[:20]) == set(first)
    assert set(sharing.finished[20:]) == set(late)


def test_a_flow_that_waits_for_room_gets_it() -> None:
    """Its large request is not passed by more than the slack of others' small ones."""
    e = Engine(Setup(((1, 32, 0),), BLOCK, 8, 16, 128, scheduling_policy="hrrn"))
    rng = np.random.default_rng(0)

    def add(request_id: int, length: int, flow: int) -> None:
        e.add(request_id, rng.integers(0, 1000, length).tolist(), max_tokens=4, flow=flow)

    for i in range(60):
        add(i, 24, 0)
    for _ in range(8):
        e.step()
    large = 1000
    add(large, 100, 1)
    num_before = len(e.finished)
    while large not in e.finished:
        e.now_s += 0.5
        e.step()
    assert len(e.finished) - num_before <= 12
    e.drain()


@pytest.mark.parametrize("policy", ["hrrn", "spf", "turns", "deadline", "priority", "fcfs"])
def test_many_flows_are_served_in_the_order_of_the_oracle(policy: SchedulingPolicy) -> None:
    e = Engine(Setup(((1, 64, 0),), BLOCK, 6, 16, 64, scheduling_policy=policy))
    rng = np.random.default_rng(0)
    for request_id in range(200):
        flow = int(rng.integers(30))
        e.add(
            request_id,
            rng.integers(0, 1000, rng.integers(1, 40)).tolist(),
            max_tokens=int(rng.integers(1, 5)),
            priority=int(rng.integers(2)),
            deadline_s=float(rng.integers(1, 40)),
            flow=flow,
            flow_weight=[0.3, 1.0, 3.0][flow % 3],
        )
        if request_id >= 60:
            e.now_s += 0.1
            e.step()
    e.drain()
    assert len(e.finished) == 200


@pytest.mark.parametrize(
    ("flow", "weight", "why"),
    [
        (-1, 1.0, "flow that is not from 0 to 1023"),
        (1024, 1.0, "flow that is not from 0 to 1023"),
        (0, 0.0, "flow_weight that is not from 0.01 to 100"),
        (0, float("nan"), "flow_weight that is not from 0.01 to 100"),
        (0, 101.0, "flow_weight that is not from 0.01 to 100"),
    ],
)
def test_a_flow_that_cannot_be_is_refused(flow: int, weight: float, why: str) -> None:
    scheduler = Sharing(16, [1.0]).scheduler
    with pytest.raises(ValueError, match=why):
        scheduler.add_request(1, np.array([1], np.int32), 1, 0, NO_STOP, b"", False, flow=flow, flow_weight=weight)
    assert not scheduler.has_work()
