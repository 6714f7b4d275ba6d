"""The order of requests by each policy, and that nobody waits for ever. Plans are compared with the oracle's."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from kv_oracle import Engine
from naive_scheduler import Setup

from swiftkv import _core
from swiftkv.policies import SchedulingPolicy

BLOCK = 4


def engine(
    policy: SchedulingPolicy, num_blocks: int = 64, *, max_num_seqs: int = 1, max_num_batched_tokens: int = 64
) -> Engine:
    setup = Setup(((3, num_blocks, 0),), BLOCK, max_num_seqs, max_num_batched_tokens, 128, scheduling_policy=policy)
    return Engine(setup)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def finish_order(e: Engine) -> list[int]:
    e.drain()
    return list(e.finished)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", [1, 2, 3, 4]),
        ("priority", [3, 4, 1, 2]),  # and by arrival among equals
        ("spf", [4, 3, 2, 1]),
        ("turns", [3, 4, 2, 1]),  # it is the turn of the oldest, then of the others
        ("hrrn", [4, 3, 2, 1]),
    ],
)
def test_the_order_of_each_policy(policy: SchedulingPolicy, order: list[int]) -> None:
    e = engine(policy)
    e.add(0, prompt(8, 0), max_tokens=3)
    e.step()
    for i, (length, priority) in enumerate([(60, 1), (20, 1), (40, 0), (9, 0)], start=1):
        e.add(i, prompt(length, i), max_tokens=1, priority=priority)
    e.now_s = 1.0
    assert finish_order(e) == [0, *order]


@pytest.mark.parametrize(("waited_s", "first"), [(3.0, 1), (0.5, 2)])
def test_hrrn_compares_ratios_of_waiting_to_length(waited_s: float, first: int) -> None:
    e = engine("hrrn")
    e.add(0, prompt(8, 0), max_tokens=2)
    e.step()
    e.add(1, prompt(60, 1), max_tokens=1)
    e.now_s = waited_s
    e.add(2, prompt(20, 2), max_tokens=1)
    e.now_s += 1.0  # (waited_s + 1) / 60 against 1 / 20
    assert finish_order(e)[1] == first


@pytest.mark.parametrize("policy", ["hrrn", "spf"])
def test_what_is_cached_does_not_count(policy: SchedulingPolicy) -> None:
    e = engine(policy)
    e.add(0, prompt(60, 1), max_tokens=1)
    e.drain()
    e.add(1, prompt(8, 0), max_tokens=2)
    e.step()
    e.add(2, prompt(20, 2), max_tokens=1)
    e.add(3, [*prompt(60, 1), 5], max_tokens=1)
    e.now_s = 1.0
    assert finish_order(e)[2:] == [3, 2]


def test_what_becomes_cached_while_a_request_waits_does_not_count_either() -> None:
    e = engine("spf")
    e.add(0, prompt(60, 1), max_tokens=1)
    e.add(1, [*prompt(60, 1), 5], max_tokens=1)
    e.add(2, [*prompt(60, 1), 6, 6], max_tokens=1)
    e.add(3, prompt(20, 2), max_tokens=1)
    assert finish_order(e) == [3, 0, 1, 2]
    e.add(4, prompt(8, 0), max_tokens=3)
    e.step()
    e.add(5, prompt(20, 3), max_tokens=1)
    e.add(6, [*prompt(60, 1), 7], max_tokens=1)
    e.reset_prefix_cache()  # nothing of it is cached any more
    assert finish_order(e)[4:] == [4, 5, 6]


@pytest.mark.parametrize("policy", ["hrrn", "spf"])
@pytest.mark.parametrize("num_alike", [1, 100])
def test_prompts_go_first_whose_beginning_has_come_to_be_cached(policy: SchedulingPolicy, num_alike: int) -> None:
    e = engine(policy, max_num_seqs=1)
    e.add(0, prompt(60, 0), max_tokens=2)
    e.step()
    e.add(1, prompt(60, 1), max_tokens=1)
    e.add(2, prompt(62, 2), max_tokens=1)  # the first of its lane, and looked up before each step
    alike = range(3, 3 + num_alike)
    for i in alike:
        e.add(i, [*prompt(60, 1), i, i, i], max_tokens=1)
    e.now_s = 1.0
    assert finish_order(e) == [0, 1, *alike, 2]


def test_a_short_prompt_goes_before_a_long_one_that_is_computed_in_part() -> None:
    e = engine("hrrn", max_num_seqs=4, max_num_batched_tokens=16)
    e.add(1, prompt(100, 1), max_tokens=1)
    e.step()
    e.now_s = 0.1
    e.add(2, prompt(8, 2), max_tokens=1)
    e.now_s = 0.2
    plan = e.schedule()
    assert plan is not None
    assert dict(zip(plan.request_ids.tolist(), np.diff(plan.query_starts).tolist(), strict=True)) == {2: 8, 1: 8}
    e.commit()
    assert finish_order(e) == [2, 1]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_by_arrival_nobody_of_its_flow_goes_before_a_prompt_that_is_computed_in_part(policy: SchedulingPolicy) -> None:
    e = engine(policy, max_num_seqs=4, max_num_batched_tokens=16)
    e.add(1, prompt(100, 1), max_tokens=1)
    e.step()
    e.add(2, prompt(8, 2), max_tokens=1)
    e.now_s = 5.0
    plan = e.schedule()
    assert plan is not None
    assert plan.request_ids.tolist() == [1]
    e.commit()
    assert finish_order(e) == [1, 2]


def test_the_earliest_deadline_goes_first_and_none_last() -> None:
    e = engine("deadline", max_num_batched_tokens=16)
    e.add(0, prompt(8, 0), max_tokens=3)
    e.step()
    for i, deadline_s in enumerate([math.inf, 9.0, 3.0, 5.0], start=1):
        e.add(i, prompt(20, i), max_tokens=1, deadline_s=deadline_s)
    e.add(5, prompt(20, 5), max_tokens=1)
    assert finish_order(e) == [0, 3, 4, 2, 1, 5]


def test_an_earlier_deadline_goes_before_a_prompt_that_is_computed_in_part() -> None:
    e = engine("deadline", max_num_seqs=4, max_num_batched_tokens=16)
    e.add(1, prompt(40, 1), max_tokens=1, deadline_s=8.0)
    e.step()
    e.add(2, prompt(30, 2), max_tokens=1, deadline_s=2.0)
    assert finish_order(e) == [2, 1]


def test_who_finds_no_room_holds_others_up_for_a_while_only() -> None:
    e = engine("priority", num_blocks=32, max_num_seqs=8)
    e.add(0, prompt(100, 0), max_tokens=20)
    e.step()
    e.add(1, prompt(100, 1), max_tokens=1)  # does not fit beside it
    first_tokens = {}
    for i, now_s in enumerate([0.0, 0.9, 1.1, 2.9, 3.1, 6.9, 7.1], start=2):
        e.now_s = now_s
        e.step()
        e.add(i, prompt(4, i), max_tokens=1)
        e.step()
        first_tokens[now_s] = i in e.finished
        e.abort(i)
    assert first_tokens == {0.0: False, 0.9: False, 1.1: True, 2.9: True, 3.1: False, 6.9: False, 7.1: True}
    assert finish_order(e)[-2:] == [0, 1]


def test_few_are_tried_for_whom_there_is_no_room() -> None:
    e = engine("priority", num_blocks=32, max_num_seqs=16)
    e.add(0, prompt(100, 0), max_tokens=20)
    e.step()
    for i in range(1, 40):
        e.add(i, prompt(90, i), max_tokens=1)
    e.step()
    e.now_s = 1.5
    before = e.scheduler.stats().prefix_matches_total
    e.step()
    assert 1 < e.scheduler.stats().prefix_matches_total - before <= 16
    e.drain()


@pytest.mark.parametrize("policy", ["hrrn", "turns", "priority", "fcfs"])
@pytest.mark.parametrize("num_blocks", [64, 24])
def test_nobody_waits_for_ever(policy: SchedulingPolicy, num_blocks: int) -> None:
    """Short requests come faster than they are served, and each leaves room that the next one takes."""
    scheduler = _core.Scheduler(
        [_core.GroupSpec(1, num_blocks)],
        block_size=BLOCK,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=96,
        scheduling_policy=policy,
    )
    rng = np.random.default_rng(0)
    no_stop = np.array([], np.int32)

    def add(request_id: int, length: int, max_tokens: int, now_s: float) -> None:
        tokens = rng.integers(0, 1000, length, dtype=np.int32)
        scheduler.add_request(request_id, tokens, max_tokens, 0, no_stop, b"", False, arrival_s=now_s)

    long_id, now_s = 10_000, 0.0
    for i in range(6):
        add(i, 8, 8, now_s)
    add(long_id, 80, 1, now_s)
    done: set[int] = set()
    for step in range(4000):
        if step % 2 == 0:  # 16 tokens of work come in the time in which 16 are computed, and then some
            add(6 + step, int(rng.integers(8, 24)), 8, now_s)
        plan = scheduler.schedule(now_s)
        assert plan is not None
        now_s += 0.05
        result = scheduler.commit(np.full(len(plan.logits_rows), 7, np.int32))
        done.update(result.request_ids[result.finish_reasons > 0].tolist())
        if long_id in done:
            return
    raise AssertionError(f"after {now_s:.0f} s the long request still waits behind {len(done)} others")


def test_shortest_first_may_let_a_long_request_wait() -> None:
    e = engine("spf", max_num_seqs=1)
    e.add(0, prompt(100, 0), max_tokens=1)
    for i in range(1, 30):
        e.add(i, prompt(8, i), max_tokens=1)
        e.now_s += 10
        e.step()
    assert 0 not in e.finished
    e.drain()


def test_in_turns_the_oldest_and_the_shortest_have_as_many_tokens_computed() -> None:
    e = engine("turns", num_blocks=256, max_num_batched_tokens=128)
    for i in range(4):
        e.add(i, prompt(100, i), max_tokens=1)
    for i in range(4, 40):
        e.add(i, prompt(10, i), max_tokens=1)
    order = finish_order(e)
    assert [order.index(i) for i in range(4)] == [1, 12, 23, 34]
    assert [i for i in order if i >= 4] == list(range(4, 40))


def test_an_unknown_policy_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="scheduling_policy is fcfs, priority, spf, hrrn, turns or deadline, not lifo"):
        _core.Scheduler([_core.GroupSpec(1, 64)], 4, 4, 64, 128, scheduling_policy="lifo")  # type: ignore[arg-type]
