"""A prompt for which there is no room is looked up in the prefix cache again only when something has changed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from kv_oracle import Engine
from lending_oracle import BorrowSetup, LendingEngine, LendingSetup
from naive_scheduler import PRIORITIES_PER_CLASS, Setup
from storage_oracle import StorageEngine

from swiftkv import _core
from swiftkv._core import GroupSpec, Scheduler

BLOCK = 4


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def engine(max_num_batched_tokens: int = 64) -> Engine:
    """Make an engine of 16 blocks, whose plans are compared with those of one that matches at every step."""
    return Engine(Setup(((3, 16, 0),), BLOCK, 8, max_num_batched_tokens, 64))


def matches(scheduler: Scheduler) -> int:
    return scheduler.stats().prefix_matches_total


def test_a_blocked_prompt_is_not_matched_again_while_others_only_grow() -> None:
    e = engine()
    e.add(1, prompt(40, 1), max_tokens=20)
    e.step()
    e.add(2, prompt(40, 2), max_tokens=1)
    e.step()
    assert matches(e.scheduler) == 2
    for _ in range(12):  # the first request takes blocks and fills them
        e.step()
    assert matches(e.scheduler) == 2
    assert e.scheduler.stats().num_waiting == 1


def test_of_several_blocked_prompts_none_is_matched_again() -> None:
    """The first of them lets the others by for a while. What they find and put back is no room for each other."""
    e = engine()
    document = prompt(21, 0)
    e.add(1, document, max_tokens=1)
    e.drain()
    e.add(5, prompt(36, 1), max_tokens=20)
    e.step()
    for request_id in (2, 3, 4):
        e.add(request_id, [*document, *prompt(19, request_id)], max_tokens=1)
    e.step()
    assert matches(e.scheduler) == 3
    e.now_s = 1.5
    for _ in range(4):
        e.step()
        assert matches(e.scheduler) == 5
    e.abort(5)
    e.drain()
    assert sorted(e.finished) == [1, 2, 3, 4]


def test_blocks_that_leave_a_window_are_no_room_for_a_prompt_that_lacks_others() -> None:
    e = Engine(Setup(((3, 16, 0), (1, 16, 8)), BLOCK, 8, 64, 64))
    e.add(1, prompt(40, 1), max_tokens=20)
    e.step()
    e.add(2, prompt(25, 2), max_tokens=1)  # it lacks fewer blocks than the window will leave behind
    e.step()
    free = e.scheduler.stats().groups[1].free
    assert matches(e.scheduler) == 2
    for _ in range(12):  # the first request leaves three blocks of its window behind
        e.step()
    assert matches(e.scheduler) == 2
    assert e.scheduler.stats().groups[1].free < free
    e.drain()
    assert sorted(e.finished) == [1, 2]


def test_a_prompt_that_lacks_window_blocks_is_matched_again_when_some_are_left_behind() -> None:
    e = Engine(Setup(((3, 64, 0), (1, 7, 8)), BLOCK, 8, 12, 64))
    e.add(1, prompt(20, 1), max_tokens=20)
    e.step()
    e.add(2, prompt(40, 2), max_tokens=1)
    e.drain()
    assert sorted(e.finished) == [1, 2]
    assert matches(e.scheduler) > 2


def test_a_blocked_prompt_is_matched_again_when_blocks_are_freed() -> None:
    e = engine()
    e.add(1, prompt(40, 1), max_tokens=20)
    e.step()
    e.add(2, prompt(40, 2), max_tokens=1)
    e.step()
    e.abort(1)
    e.step()
    assert matches(e.scheduler) == 3
    assert list(e.finished) == [2]


def test_a_blocked_prompt_is_not_matched_again_before_it_may_fit() -> None:
    """It lacks seven blocks: those of the first request, but not those of the second."""
    e = engine()
    e.add(1, prompt(30, 1), max_tokens=20)
    e.add(2, prompt(4, 2), max_tokens=3)
    e.add(3, prompt(4, 3), max_tokens=3)
    e.step()
    e.add(4, prompt(54, 4), max_tokens=1)
    while e.scheduler.stats().num_running > 1:
        e.step()
    assert matches(e.scheduler) == 4
    e.abort(1)
    e.step()
    assert matches(e.scheduler) == 5
    assert 4 in e.finished


def test_a_prompt_that_no_displacement_helps_is_not_matched_at_every_step() -> None:
    e = engine()
    e.add(1, prompt(40, 1), max_tokens=20)
    e.add(2, prompt(4, 2), max_tokens=20, priority=2 * PRIORITIES_PER_CLASS)
    e.step()
    e.add(3, prompt(44, 3), max_tokens=1)
    for _ in range(8):
        e.step()
    assert matches(e.scheduler) == 3
    e.abort(1)
    e.step()
    assert matches(e.scheduler) == 4
    e.drain()
    assert sorted(e.finished) == [2, 3]


def test_a_step_looks_up_a_bounded_number_of_keys() -> None:
    """A short prompt behind many long ones that wait for a load begins when that has ended, or at once if no other
    request would be in the step.
    """
    length = 4096
    scheduler = Scheduler(
        [GroupSpec(1, 3 * length)],
        block_size=1,
        max_num_seqs=64,
        max_num_batched_tokens=2 * length,
        max_model_len=2 * length,
    )

    def add(request_id: int, tokens: list[int], max_tokens: int = 1) -> None:
        no_stop = np.array([], np.int32)
        scheduler.add_request(request_id, np.array(tokens, np.int32), max_tokens, 0, no_stop, b"", False)

    def step() -> list[int]:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(np.zeros(len(plan.logits_rows), np.int32))
        return plan.request_ids.tolist()

    document = prompt(length, 0)
    add(1, document)
    step()
    loaded = scheduler.begin_loading(_core.block_keys(b"", np.array([*document, 1], np.int32), 1)[-32:])
    for request_id in range(100, 133):
        add(request_id, [*document, 1, 2])
    add(2, [5])
    assert step() == [2]
    add(3, [5], max_tokens=8)
    assert step() == [3]
    add(4, [6])
    assert step() == [3]
    scheduler.end_loading(loaded, True)
    assert {*step(), *step()} >= {3, 4, 100, 132}


def test_a_blocked_prompt_is_matched_again_when_another_request_computes_its_next_block() -> None:
    e = engine()
    e.add(1, prompt(36, 1), max_tokens=20, skip_prefix_match=True)  # which nobody waits for
    e.add(3, prompt(13, 3), max_tokens=20)
    e.schedule()
    e.commit({1: 5})
    e.add(2, [*prompt(36, 1), *[5] * 12], max_tokens=1)
    found = []
    for _ in range(6):
        e.schedule()
        found.append(matches(e.scheduler))
        e.commit({1: 5})
    # Tokens 36 to 39 are computed by the first four steps, and the fifth finds them.
    assert [count - found[0] for count in found] == [0, 0, 0, 0, 1, 1]
    assert e.scheduler.stats().num_waiting == 1


def test_a_blocked_prompt_is_matched_again_when_extents_come_home() -> None:
    setup = LendingSetup(((2, 16, 0),), (BorrowSetup(0, 1, 1),), ((0, 4, 2),), max_num_batched_tokens=32)
    e = LendingEngine(setup, random.Random(0))
    e.lend(0, 4)
    e.add(1, prompt(20, 1), max_tokens=8)
    assert e.schedule()
    e.commit()
    e.add(2, prompt(12, 2), max_tokens=1)
    for _ in range(2):
        assert e.schedule()
        e.commit()
    assert matches(e.scheduler) == 2
    e.take_back(0, 2)
    assert e.schedule()
    assert matches(e.scheduler) == 3
    assert e.planned[0].plan.new_request_ids.tolist() == [2]
    e.commit()
    e.drain()


def test_all_blocks_of_an_extent_that_comes_home_are_room_for_a_blocked_prompt() -> None:
    setup = LendingSetup(((2, 16, 0),), (BorrowSetup(0, 1, 1),), ((0, 2, 8),), max_num_batched_tokens=64)
    e = LendingEngine(setup, random.Random(0))
    e.lend(0, 1)
    e.add(1, prompt(16, 1), max_tokens=8)
    assert e.schedule()
    e.commit()
    e.add(2, prompt(32, 2), max_tokens=1)
    assert e.schedule()
    e.commit()
    e.take_back(0, 1)
    assert e.schedule()
    assert e.planned[0].plan.new_request_ids.tolist() == [2]
    e.commit()
    e.drain()


def test_a_staging_block_is_room_for_many_blocks_of_a_blocked_prompt() -> None:
    setup = LendingSetup(((8, 16, 0),), (BorrowSetup(0, 1, 40),), (), max_num_batched_tokens=64, max_model_len=120)
    e = LendingEngine(setup, random.Random(0))
    e.add(1, prompt(48, 1), max_tokens=8)
    e.add(2, prompt(5, 2), max_tokens=8)
    assert e.schedule()
    e.commit()
    e.borrow(0, 1)
    e.add(3, prompt(88, 3), max_tokens=1)
    assert e.schedule()
    assert e.planned[0].plan.new_request_ids.tolist() == []
    e.commit()
    e.abort(2)
    begun: list[int] = []
    for _ in range(3):  # room for staging comes first
        assert e.schedule()
        begun += e.planned[0].plan.new_request_ids.tolist()
        e.commit()
    assert begun == [3]
    e.drain()


def test_a_blocked_prompt_is_matched_again_when_the_tail_of_a_window_has_been_loaded() -> None:
    """With that tail it can use blocks that another request uses, too: it needs fewer, though no block was freed."""
    e = StorageEngine(Setup(((1, 24, 0), (1, 12, 9)), BLOCK, 8, 16, 80))
    document = prompt(52, 0)
    e.add(1, document[:24], max_tokens=1)
    e.drain()
    e.store()
    e.add(2, document, max_tokens=28)
    for request_id in range(10, 14):  # their windows take the place of the tail
        e.add(request_id, prompt(12, request_id), max_tokens=1)
    while len(e.requests) > 1:
        e.step()
    e.add(3, [*document[:25], *prompt(15, 3)], max_tokens=1)
    e.step()
    assert e.scheduler.stats().num_running == 1
    e.add_held(4, [*document[:25], 5], max_tokens=1)
    transfer = e.begin_load(4)
    assert transfer is not None
    assert {group for _, group, _ in transfer.blocks} == {1}
    e.read(transfer, len(transfer.blocks))
    e.abort(4)
    e.step()
    assert e.scheduler.stats().num_running == 2
    e.drain()
    assert e.finished[3].cached == 24


def test_a_prompt_that_must_be_whole_is_matched_again_when_a_step_has_more_room_for_it() -> None:
    e = Engine(Setup(((3, 32, 0),), BLOCK, 8, 10, 64, enable_chunked_prefill=False))
    e.add(1, prompt(4, 1), max_tokens=2)
    e.step()
    e.add(2, prompt(10, 2), max_tokens=1)
    first = e.schedule()
    assert first is not None
    assert first.request_ids.tolist() == [1]  # which leaves 9 tokens
    before = matches(e.scheduler)
    ahead = e.schedule()  # the first request is about to end
    assert ahead is not None
    assert ahead.request_ids.tolist() == [2]
    assert matches(e.scheduler) == before + 1
    e.drain()
    assert sorted(e.finished) == [1, 2]


@pytest.mark.parametrize("first", [0, 50])
def test_matches_that_become_shorter_while_prompts_wait(first: int) -> None:
    """A prompt that has lost the tail of its match begins earlier, and may find room that way: it holds no tail."""
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        size, window = rng.choice([2, 4]), rng.choice([3, 5, 8, 9, 12])
        longest = rng.choice([24, 32, 40])
        held = min(longest // size, math.ceil((window - 1) / size) + 2)
        groups = ((1, longest // size + rng.randint(0, 10), 0), (1, held + rng.randint(0, 6), window))
        seqs, budget = rng.choice([3, 5, 8]), rng.choice([8, 16, 32])
        policy = rng.choice(["fcfs", "priority", "hrrn", "spf"])
        interval = rng.choice([None, None, 2 * size])
        setup = Setup(groups, size, seqs, budget, longest, retention_interval=interval, scheduling_policy=policy)
        churn(Engine(setup), rng)


@pytest.mark.parametrize("first", [0, 50])
def test_prompts_of_classes_wait_for_room(first: int) -> None:
    """Plans are those of one that matches every prompt at every step."""
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        size, longest = rng.choice([2, 4]), rng.choice([24, 32, 40])
        groups = ((1, longest // size + rng.randint(0, 20), 0),)
        policy = rng.choice(["priority", "priority", "hrrn", "spf"])
        setup = Setup(groups, size, rng.choice([3, 5, 8]), rng.choice([8, 16, 32]), longest, scheduling_policy=policy)
        churn(Engine(setup), rng, [0, 0, 1, PRIORITIES_PER_CLASS, 2 * PRIORITIES_PER_CLASS])


def churn(e: Engine, rng: random.Random, priorities: Sequence[int] = (0,)) -> None:
    """Let requests that begin like one of two documents come, go on and be aborted."""
    documents = [[rng.randrange(1000) for _ in range(e.setup.max_model_len)] for _ in range(2)]
    for request_id in range(70):
        event = rng.random()
        if event < 0.3 and len(e.requests) < 7:
            kept, added = rng.choice([0, 8, 12, 16, 20, 24]), rng.choice([1, 4, 8, 12])
            tokens = [*rng.choice(documents)[:kept], *(rng.randrange(1000) for _ in range(added))]
            tokens = tokens[: e.setup.max_model_len - 2]
            max_tokens = rng.choice([1, 1, e.setup.max_model_len - len(tokens)])
            priority = priorities[request_id % len(priorities)]
            e.add(request_id, tokens, max_tokens=max_tokens, priority=priority)
        elif event < 0.36 and e.requests:
            e.abort(rng.choice(sorted(e.requests)))
        else:
            e.now_s += rng.choice([0.0, 0.0, 0.5])
            e.step()
    e.drain()
