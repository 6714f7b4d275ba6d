"""Rows with a draft: several tokens are computed, and as many count as were guessed right, and one."""

from __future__ import annotations

import numpy as np
import pytest
from kv_oracle import BROKEN, LENGTH, REJECTED, RUNNING, STOP, Engine
from naive_scheduler import Setup

BLOCK = 4
WRONG = 900  # no token that is ever sampled


def engine(num_blocks: int = 64, *, windows: tuple[int, ...] = (0,), max_num_batched_tokens: int = 32) -> Engine:
    groups = tuple((2, num_blocks, window) for window in windows)
    return Engine(Setup(groups, BLOCK, 32, max_num_batched_tokens, 64))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 3, length).tolist()


def drafted(e: Engine, request_id: int, num_right: int, wrong: list[int]) -> list[int]:
    """Run a step with a draft, and return what became of the tokens that it sampled for the request."""
    e.set_draft(request_id, num_right, wrong)
    assert e.schedule() is not None
    result = e.commit()
    e.check()
    return result.finish_reasons[result.request_ids == request_id].tolist()


def free(e: Engine) -> int:
    return e.scheduler.stats().groups[0].free


def test_a_step_yields_a_token_for_each_guess_that_is_right_and_one() -> None:
    e = engine()
    e.add(1, prompt(6), max_tokens=20)
    e.step()
    assert drafted(e, 1, 3, [WRONG, 0]) == [RUNNING] * 4 + [REJECTED] * 2
    assert len(e.requests[1].outputs) == 5
    assert drafted(e, 1, 0, [WRONG]) == [RUNNING, REJECTED]
    assert drafted(e, 1, 2, []) == [RUNNING] * 3


def test_answers_are_those_without_drafts() -> None:
    alone, e = engine(), engine()
    for each in (alone, e):
        each.add(1, prompt(6), max_tokens=40)
        each.step()
    while alone.requests:
        alone.step()
    for step in range(40):
        if e.requests:
            drafted(e, 1, step % 4, [WRONG] * (step % 3))
    assert e.finished[1] == alone.finished[1]
    assert len(e.computed_tokens) < len(alone.computed_tokens)


def test_blocks_of_wrong_guesses_come_back_and_those_of_right_ones_are_cached() -> None:
    e = engine()
    e.add(1, prompt(6), max_tokens=40)
    e.step()
    assert free(e) == 62
    drafted(e, 1, 0, [WRONG] * 11)
    assert free(e) == 62
    drafted(e, 1, 9, [WRONG] * 4)  # 17 tokens have KV now
    assert free(e) == 59
    tokens = list(e.requests[1].tokens)
    e.add(2, [*tokens[:16], 0])
    e.step()
    assert e.requests[2].cached == 16


def test_the_window_follows_what_counts() -> None:
    e = engine(windows=(0, 5))
    e.add(1, prompt(9), max_tokens=40)
    e.step()
    before = e.scheduler.stats().groups[1].used
    drafted(e, 1, 0, [WRONG] * 12)
    assert e.scheduler.stats().groups[1].used == before
    drafted(e, 1, 12, [])
    e.drain()


@pytest.mark.parametrize("num_right", [0, 2, 5])
def test_an_answer_ends_within_a_draft(num_right: int) -> None:
    e = engine()
    e.add(1, prompt(6), max_tokens=3)
    e.step()
    # Two tokens are left: more than one guess is not computed.
    expected = [RUNNING, REJECTED] if num_right == 0 else [RUNNING, LENGTH]
    assert drafted(e, 1, num_right, [WRONG] * 4) == expected
    e.drain()
    assert len(e.finished[1].outputs) == 3
    stopped = engine()
    stopped.add(1, prompt(6), max_tokens=30, stop=[e.finished[1].outputs[1]], min_tokens=2)
    stopped.step()
    assert drafted(stopped, 1, 6, []) == [STOP] + [REJECTED] * 6
    assert not stopped.requests


def test_no_token_within_a_draft_ends_the_request() -> None:
    e = engine()
    e.add(1, prompt(6), max_tokens=20)
    e.step()
    e.set_draft(1, 4, [])
    e.schedule()
    assert e.commit(broken=2).finish_reasons.tolist() == [RUNNING, RUNNING, BROKEN, REJECTED, REJECTED]
    assert not e.requests
    e.check()


def test_no_token_behind_a_wrong_guess_ends_nothing() -> None:
    e = engine()
    e.add(1, prompt(6), max_tokens=20)
    e.step()
    e.set_draft(1, 1, [WRONG, WRONG])
    e.schedule()
    assert e.commit(broken=3).finish_reasons.tolist() == [RUNNING, RUNNING, REJECTED, REJECTED]
    e.drain()
    assert len(e.finished[1].outputs) == 20


def test_drafts_take_the_room_that_others_leave() -> None:
    e = engine(num_blocks=16, max_num_batched_tokens=8)
    for i in (1, 2):
        e.add(i, prompt(4, i), max_tokens=40)
    e.step()
    for i in (1, 2):
        e.set_draft(i, 12, [])
    plan = e.schedule()
    assert plan is not None
    assert np.diff(plan.query_starts).tolist() == [7, 1]  # each has its own token, and the first what is left
    e.commit()
    crowded = engine(num_blocks=16)
    for length, i in ((29, 1), (25, 2)):
        crowded.add(i, prompt(length, i), max_tokens=30)
        crowded.step()
    assert free(crowded) == 1
    assert drafted(crowded, 1, 6, []) == [RUNNING] * 2  # in the block that it has
    assert len(crowded.requests[1].tokens) == 33
    assert drafted(crowded, 1, 6, []) == [RUNNING] * 4  # in the one that it needs next
    assert crowded.scheduler.stats().num_preemptions_total == 0


def test_a_step_samples_no_more_tokens_than_it_may_have_requests() -> None:
    e = Engine(Setup(((2, 64, 0),), BLOCK, 4, 32, 64))
    for i in (1, 2):
        e.add(i, prompt(4, i), max_tokens=40)
    e.step()
    assert drafted(e, 1, 9, []) == [RUNNING] * 3


def test_guesses_evict_nothing() -> None:
    e = engine(num_blocks=16, max_num_batched_tokens=64)
    e.add(1, prompt(9, 1), max_tokens=1)
    e.step()
    assert e.scheduler.stats().groups[0].cached == 2
    e.add(2, prompt(51, 2), max_tokens=12)
    e.step()
    assert free(e) == 1
    assert drafted(e, 2, 8, []) == [RUNNING]  # one block is free, and the request itself may want it next
    assert e.scheduler.stats().groups[0].cached == 2


def test_who_has_a_draft_in_a_step_is_not_in_the_step_ahead() -> None:
    e = engine()
    for i in (1, 2):
        e.add(i, prompt(6, i), max_tokens=20)
    e.step()
    e.set_draft(1, 1, [WRONG])
    assert e.schedule() is not None
    ahead = e.schedule()
    assert ahead is not None
    assert ahead.request_ids.tolist() == [2]
    e.set_draft(2, 3, [])  # it is not known what that follows
    e.commit()
    plan = e.schedule()
    assert plan is not None
    assert np.diff(plan.query_starts).tolist() == [1, 1]
    e.commit()
    e.commit()
    e.drain()


def test_a_draft_with_a_token_that_is_none_is_refused() -> None:
    e = engine()
    e.add(1, prompt(4))
    with pytest.raises(ValueError, match="draft"):
        e.scheduler.set_draft(1, np.array([1, -1], np.int32))
    e.scheduler.set_draft(99, np.array([1], np.int32))
    e.drain()
