"""Waiting requests of a higher class displace running ones of a lower class, and no work is undone without end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_oracle import Engine
from naive_scheduler import Setup

from swiftkv import _core
from swiftkv.policies import SchedulingPolicy

BLOCK = 4
PRIORITY, DEFAULT, FLEX, BATCH = (i * _core.PRIORITIES_PER_CLASS for i in (-1, 0, 1, 2))


def engine(
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 2,
    max_num_batched_tokens: int = 64,
    enable_chunked_prefill: bool = True,
    enable_prefix_caching: bool = True,
    policy: SchedulingPolicy = "priority",
) -> Engine:
    return Engine(
        Setup(
            ((1, num_blocks, 0),),
            BLOCK,
            max_num_seqs,
            max_num_batched_tokens,
            64,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            scheduling_policy=policy,
        )
    )


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def rows(plan: _core.StepPlan | None) -> list[tuple[int, int]]:
    assert plan is not None
    return list(zip(plan.request_ids.tolist(), np.diff(plan.query_starts).tolist(), strict=True))


def displaced(plan: _core.StepPlan | None) -> list[int]:
    assert plan is not None
    return plan.preempted_request_ids.tolist()


# ---- who leaves ----


@pytest.mark.parametrize("policy", ["hrrn", "spf", "turns", "deadline", "priority"])
def test_a_prompt_that_is_computed_in_part_leaves_before_answers(policy: SchedulingPolicy) -> None:
    e = engine(max_num_batched_tokens=8, policy=policy)
    e.add(1, prompt(4, 1), max_tokens=20, priority=BATCH)
    e.step()
    e.add(2, prompt(40, 2), priority=BATCH)
    e.step()
    e.add(3, prompt(4, 3), max_tokens=1, priority=DEFAULT)
    plan = e.schedule()
    assert rows(plan) == [(1, 1), (3, 4)]
    assert displaced(plan) == [2]
    e.commit()
    assert e.scheduler.stats().num_displaced_total == [0, 0, 0, 1]
    assert e.scheduler.stats().num_preemptions_total == 1


def test_of_answers_that_which_began_last_leaves_the_step() -> None:
    e = engine(policy="spf")
    e.add(1, prompt(20, 1), max_tokens=20, priority=BATCH)
    e.add(2, prompt(4, 2), max_tokens=20, priority=BATCH)
    assert rows(e.schedule()) == [(2, 4), (1, 20)]
    e.commit()
    e.add(3, prompt(4, 3), max_tokens=1, priority=DEFAULT)
    plan = e.schedule()
    assert rows(plan) == [(2, 1), (3, 4)]
    assert displaced(plan) == [1]


def test_the_lowest_class_leaves_first() -> None:
    e = engine()
    e.add(1, prompt(4, 1), max_tokens=20, priority=BATCH)
    e.add(2, prompt(4, 2), max_tokens=20, priority=FLEX)
    e.step()
    e.add(3, prompt(4, 3), max_tokens=20, priority=PRIORITY)
    e.add(4, prompt(4, 4), max_tokens=20, priority=PRIORITY)
    assert displaced(e.schedule()) == [1, 2]


def test_nobody_leaves_for_one_of_its_own_class() -> None:
    e = engine(max_num_seqs=1)
    e.add(1, prompt(4, 1), max_tokens=4, priority=DEFAULT + 1000)
    e.step()
    e.add(2, prompt(4, 2), max_tokens=4, priority=DEFAULT - 1000)
    e.drain()
    assert list(e.finished) == [1, 2]
    assert e.scheduler.stats().num_preemptions_total == 0


def test_classes_are_those_of_the_nearest_multiple() -> None:
    half = _core.PRIORITIES_PER_CLASS // 2
    for low, high, is_displaced in [(half, half - 1, True), (half - 1, -half, False), (-half, -half - 1, True)]:
        e = engine(max_num_seqs=1)
        e.add(1, prompt(4, 1), max_tokens=4, priority=low)
        e.step()
        e.add(2, prompt(4, 2), max_tokens=4, priority=high)
        assert displaced(e.schedule()) == [1] * is_displaced


def test_who_comes_first_is_served_first_whatever_its_class() -> None:
    e = engine(max_num_seqs=1, policy="fcfs")
    e.add(1, prompt(4, 1), max_tokens=4, priority=BATCH)
    e.step()
    e.add(2, prompt(4, 2), max_tokens=4, priority=PRIORITY)
    e.drain()
    assert list(e.finished) == [1, 2]


@pytest.mark.parametrize("policy", ["hrrn", "priority"])
def test_a_higher_class_goes_before_a_prompt_in_part_also_where_slots_are_free(policy: SchedulingPolicy) -> None:
    e = engine(max_num_batched_tokens=8, policy=policy)
    e.add(1, prompt(40, 1), priority=BATCH)
    e.step()
    e.add(2, prompt(4, 2), priority=DEFAULT)
    plan = e.schedule()
    assert rows(plan) == [(2, 4), (1, 4)]
    assert displaced(plan) == []


# ---- for want of memory ----


def test_as_many_leave_as_are_in_the_way() -> None:
    e = engine(num_blocks=18, max_num_seqs=8)
    e.add(1, prompt(20, 1), max_tokens=20, priority=BATCH)
    e.add(2, prompt(20, 2), max_tokens=20, priority=BATCH)
    e.step()
    e.add(3, prompt(40, 3), max_tokens=1, priority=DEFAULT)  # ten blocks, and one for who goes on
    plan = e.schedule()
    assert rows(plan) == [(1, 1), (3, 40)]
    assert displaced(plan) == [2]
    crowded = engine(num_blocks=17, max_num_seqs=8)
    crowded.add(1, prompt(20, 1), max_tokens=20, priority=BATCH)
    crowded.add(2, prompt(20, 2), max_tokens=20, priority=BATCH)
    crowded.step()
    crowded.add(3, prompt(44, 3), max_tokens=1, priority=DEFAULT)
    plan = crowded.schedule()
    assert rows(plan) == [(3, 44)]
    assert displaced(plan) == [2, 1]


def test_who_is_displaced_does_not_come_back_in_the_same_step() -> None:
    e = engine(num_blocks=20, max_num_seqs=8, policy="spf")
    e.add(1, prompt(40, 1), max_tokens=20, priority=BATCH)
    e.step()
    e.add(2, prompt(4, 2), max_tokens=20, priority=BATCH)
    e.step()
    e.add(3, prompt(44, 3), max_tokens=1, priority=DEFAULT)
    plan = e.schedule()  # the second request, which had to leave before the first, would fit again
    assert rows(plan) == [(3, 44)]
    assert displaced(plan) == [2, 1]


def test_nobody_leaves_in_vain() -> None:
    e = engine(num_blocks=16, max_num_seqs=8)
    e.add(1, prompt(4, 1), max_tokens=20, priority=BATCH)
    e.add(2, prompt(40, 2), max_tokens=8, priority=DEFAULT)
    e.step()
    e.add(3, prompt(30, 3), max_tokens=1, priority=DEFAULT)
    plan = e.schedule()
    assert rows(plan) == [(2, 1), (1, 1)]
    assert displaced(plan) == []


def test_blocks_that_others_hold_too_are_no_gain() -> None:
    e = engine(num_blocks=16, max_num_seqs=8)
    shared = prompt(24, 1)
    e.add(1, [*shared, 1], max_tokens=12, priority=DEFAULT)
    e.step()
    e.add(2, [*shared, 2], max_tokens=12, priority=BATCH)
    e.step()
    e.add(3, prompt(33, 3), max_tokens=1, priority=DEFAULT)
    for _ in range(2):
        plan = e.schedule()  # nine blocks, and eight are free; the second request holds one alone
        assert rows(plan) == [(1, 1), (2, 1)]
        assert displaced(plan) == []
        e.commit()


# ---- how they leave ----


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_who_was_displaced_goes_on_as_if_nothing_had_happened(enable_prefix_caching: bool) -> None:
    e = engine(max_num_seqs=1, enable_prefix_caching=enable_prefix_caching)
    e.add(1, prompt(21, 1), max_tokens=12, priority=BATCH)
    for _ in range(5):
        e.step()
    e.add(2, prompt(9, 2), max_tokens=3, priority=DEFAULT)
    e.drain()
    alone = engine(max_num_seqs=1)
    alone.add(1, prompt(21, 1), max_tokens=12)
    alone.drain()
    assert list(e.finished) == [2, 1]
    assert e.finished[1].outputs == alone.finished[1].outputs
    recomputed = sum(e.computed_tokens) - 9 - 2 - 21 - 11
    assert recomputed == (25 - 24 if enable_prefix_caching else 25)


def test_nobody_leaves_while_a_step_in_progress_has_it() -> None:
    e = engine(max_num_seqs=1)
    e.add(1, prompt(4, 1), max_tokens=20, priority=BATCH)
    e.schedule()
    e.add(2, prompt(4, 2), max_tokens=1, priority=DEFAULT)
    ahead = e.schedule()
    assert rows(ahead) == [(1, 1)]
    assert displaced(ahead) == []
    e.commit()
    assert e.schedule() is None
    e.commit()
    plan = e.schedule()
    assert rows(plan) == [(2, 4)]
    assert displaced(plan) == [1]


def test_a_prompt_that_needs_a_step_of_its_own_gets_it() -> None:
    e = engine(max_num_seqs=1, max_num_batched_tokens=8, enable_chunked_prefill=False)
    e.add(1, prompt(4, 1), max_tokens=20, priority=BATCH)
    e.step()
    e.add(2, prompt(30, 2), max_tokens=1, priority=DEFAULT)
    plan = e.schedule()
    assert rows(plan) == [(2, 30)]
    assert displaced(plan) == [1]


# ---- nothing is undone without end ----


def test_a_displaced_request_leaves_again_only_when_it_has_got_on_but_batch_work_does() -> None:
    for tier, is_displaced in [(FLEX, False), (BATCH, True)]:
        e = engine(max_num_seqs=1, max_num_batched_tokens=8)
        e.add(1, prompt(40, 1), max_tokens=10, priority=tier)
        e.step()
        e.add(2, prompt(4, 2), max_tokens=1, priority=DEFAULT)
        assert displaced(e.schedule()) == [1]
        e.commit()
        e.step()
        e.add(3, prompt(4, 3), max_tokens=1, priority=DEFAULT)
        assert displaced(e.schedule()) == [1] * is_displaced
        e.commit()
        e.drain()
        assert list(e.finished) == [2, 3, 1]
        assert e.scheduler.stats().num_preemptions_total == 2  # the second time at its first token at the latest


@dataclass
class Crowd:
    """An engine with memory for everybody, and how often each request had to leave."""

    e: Engine
    num_displaced: Counter[int] = field(default_factory=Counter)

    def schedule(self) -> _core.StepPlan | None:
        plan = self.e.schedule()
        if plan is not None:
            self.num_displaced.update(displaced(plan))
        return plan

    def run(self, is_ahead: bool) -> None:
        """Run a step, or two of which the second is planned while the first is in progress."""
        if self.schedule() is not None:
            if is_ahead:
                self.schedule()
            while self.e.plans:
                self.e.commit()
        self.e.check()


@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(1, 24), st.integers(1, 6), st.sampled_from([PRIORITY, DEFAULT, FLEX, BATCH])
        ),
        min_size=2,
        max_size=12,
    ),
    max_num_seqs=st.integers(1, 3),
    max_num_batched_tokens=st.integers(4, 32),
    enable_prefix_caching=st.booleans(),
    policy=st.sampled_from(["hrrn", "spf", "turns", "deadline", "priority"]),
    is_ahead=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_request_ends_and_little_is_computed_again(
    arrivals: list[tuple[int, int, int, int]],
    max_num_seqs: int,
    max_num_batched_tokens: int,
    enable_prefix_caching: bool,
    policy: SchedulingPolicy,
    is_ahead: bool,
) -> None:
    e = engine(
        num_blocks=512,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        policy=policy,
    )
    crowd = Crowd(e)
    for i, (num_steps, length, max_tokens, priority) in enumerate(arrivals):
        for _ in range(num_steps):
            crowd.run(is_ahead)
        e.add(i, prompt(length, i), max_tokens=max_tokens, priority=priority)
    num_steps = 0
    while e.scheduler.has_work():
        crowd.run(is_ahead)
        num_steps += 1
        assert num_steps < 10_000, "work is undone without end"
    assert len(e.finished) == len(arrivals)
    stats = e.scheduler.stats()
    assert sum(crowd.num_displaced.values()) == stats.num_preemptions_total == sum(stats.num_displaced_total)
    most_computed = 0
    for i, (_, length, max_tokens, priority) in enumerate(arrivals):
        most_computed += (length + max_tokens) * (1 + crowd.num_displaced[i])
        higher = [j for j, other in enumerate(arrivals) if other[3] < priority]
        # Whoever begins displaces one request at most, of a lower class; and each but batch work has got on meanwhile.
        assert crowd.num_displaced[i] <= sum(1 + crowd.num_displaced[j] for j in higher)
        assert priority == BATCH or crowd.num_displaced[i] <= max_tokens
    assert sum(e.computed_tokens) <= most_computed


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 24), st.integers(1, 9), st.sampled_from([DEFAULT, FLEX, BATCH])),
        min_size=2,
        max_size=12,
    ),
    max_num_seqs=st.integers(1, 3),
    policy=st.sampled_from(["hrrn", "spf", "turns", "deadline", "priority"]),
)
@settings(max_examples=100, deadline=None)
def test_nobody_waits_while_batch_work_runs_that_could_leave(
    arrivals: list[tuple[int, int, int, int]], max_num_seqs: int, policy: SchedulingPolicy
) -> None:
    e = engine(num_blocks=512, max_num_seqs=max_num_seqs, max_num_batched_tokens=24, policy=policy)
    for i, (num_steps, length, max_tokens, priority) in enumerate(arrivals):
        e.add(i, prompt(length, i), max_tokens=max_tokens, priority=priority)
        for _ in range(num_steps):
            plan = e.schedule()
            if plan is None:
                break
            running = [r.priority for r in e.requests.values() if r.computed is not None]
            waiting = [r.priority for r in e.requests.values() if r.computed is None]
            if BATCH in running and min(waiting, default=BATCH) < BATCH:
                assert len(plan.token_ids) == 24, "a request waits behind batch work, and the step has room"
            e.commit()
    e.drain()
