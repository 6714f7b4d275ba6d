"""The scheduler's promises, one per test; the engine of kv_oracle checks everything else alongside.

It is one file, for it is one list of promises: who asks what the scheduler promises finds it here.
"""

from __future__ import annotations

import numpy as np
import pytest
from kv_oracle import ABORTED, BROKEN, LENGTH, RUNNING, STOP, Engine
from naive_scheduler import Setup

from swiftkv import _core

BLOCK = 4


def engine(
    num_blocks: int = 64,
    window: int | None = None,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    enable_prefix_caching: bool = True,
    enable_chunked_prefill: bool = True,
) -> Engine:
    groups = ((3, num_blocks, 0),) if window is None else ((3, num_blocks, 0), (2, num_blocks, window))
    return Engine(
        Setup(
            groups,
            BLOCK,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            enable_prefix_caching,
            enable_chunked_prefill,
        )
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def ids_and_counts(plan: _core.StepPlan | None) -> list[tuple[int, int]]:
    assert plan is not None
    return list(zip(plan.request_ids.tolist(), np.diff(plan.query_starts).tolist(), strict=True))


def finish_order(e: Engine) -> list[int]:
    e.drain()
    return list(e.finished)


# ---- batching ----


def test_decodes_go_first_and_a_prefill_chunk_fills_the_budget() -> None:
    e = engine(max_num_batched_tokens=10)
    e.add(1, prompt(5, 1))
    e.step()
    e.add(2, prompt(20, 2))
    assert ids_and_counts(e.schedule()) == [(1, 1), (2, 9)]
    e.commit()
    assert ids_and_counts(e.schedule()) == [(1, 1), (2, 9)]
    e.commit()
    assert ids_and_counts(e.schedule()) == [(1, 1), (2, 2)]
    e.commit()
    assert len(e.requests[2].outputs) == 1


def test_without_chunking_a_prompt_is_whole_and_alone_if_it_exceeds_the_budget() -> None:
    e = engine(max_num_batched_tokens=10, enable_chunked_prefill=False)
    e.add(1, prompt(6, 1))
    e.add(2, prompt(6, 2))
    e.add(3, prompt(30, 3))
    plans = []
    while (plan := e.schedule()) is not None:
        plans.append(ids_and_counts(plan))
        e.commit()
    assert plans[:3] == [[(1, 6)], [(1, 1), (2, 6)], [(3, 30)]]


def test_first_come_first_served_and_priority_before_arrival() -> None:
    e = engine(max_num_seqs=1)
    for i, priority in enumerate([1, 1, 0, 2, 0]):
        e.add(i, prompt(8, i), max_tokens=1, priority=priority)
    assert finish_order(e) == [2, 4, 0, 1, 3]


def test_row_slots_are_stable_and_reused() -> None:
    e = engine(max_num_seqs=2)
    e.add(1, prompt(3, 1), max_tokens=1)
    e.add(2, prompt(3, 2), max_tokens=5)
    e.step()
    e.add(3, prompt(3, 3), max_tokens=5)
    plan = e.schedule()
    assert plan is not None
    assert dict(zip(plan.request_ids.tolist(), plan.row_slots.tolist(), strict=True)) == {2: 1, 3: 0}


def test_a_prompt_that_does_not_fit_waits_and_nobody_overtakes_it() -> None:
    e = engine(num_blocks=16)
    e.add(1, prompt(40, 1), max_tokens=4)
    e.step()
    e.add(2, prompt(40, 2), max_tokens=1)
    e.add(3, prompt(4, 3), max_tokens=1)
    assert ids_and_counts(e.schedule()) == [(1, 1)]
    e.commit()
    assert finish_order(e) == [1, 2, 3]


def test_preemption_takes_the_last_arrived_and_keeps_what_it_sampled() -> None:
    e = engine(num_blocks=16, max_model_len=61)
    e.add(1, prompt(20, 1), max_tokens=40)
    e.add(2, prompt(20, 2), max_tokens=40)
    e.drain()
    assert e.scheduler.stats().num_preemptions_total > 0
    alone = engine(num_blocks=16, max_model_len=61)
    alone.add(2, prompt(20, 2), max_tokens=40)
    alone.drain()
    assert list(e.finished) == [1, 2]
    assert e.finished[2].outputs == alone.finished[2].outputs
    assert e.finished[2].cached == 0  # of the first admission


def test_a_prefill_shrinks_rather_than_take_blocks_from_this_steps_decodes() -> None:
    e = Engine(Setup(((1, 32, 0), (1, 7, 4)), BLOCK, 4, 16, 64))
    e.add(1, prompt(6, 1), max_tokens=12, priority=1)
    e.step()
    e.add(2, prompt(40, 2), max_tokens=1, priority=0)
    assert ids_and_counts(e.schedule()) == [(1, 1), (2, 15)]
    e.commit()
    # The next 15 tokens need 4 blocks of the sliding-window group, and the decode, last in order, holds one of them.
    assert ids_and_counts(e.schedule()) == [(1, 1), (2, 9)]
    e.commit()
    assert finish_order(e) == [2, 1]
    assert e.scheduler.stats().num_preemptions_total == 0


# ---- finishing ----


def test_stop_length_and_min_tokens() -> None:
    e = engine()
    e.add(1, prompt(4, 1), max_tokens=9, stop=[7])
    e.add(2, prompt(4, 2), max_tokens=9, stop=[7], min_tokens=3)
    e.add(3, prompt(4, 3), max_tokens=3, stop=[8])
    while e.schedule() is not None:
        e.commit(dict.fromkeys(e.requests, 7))
    assert {i: (f.outputs, f.reason) for i, f in e.finished.items()} == {
        1: ([7], STOP),
        2: ([7, 7, 7], STOP),
        3: ([7, 7, 7], LENGTH),
    }


def test_max_model_len_ends_a_request() -> None:
    e = engine(max_model_len=12)
    e.add(1, prompt(10), max_tokens=100)
    e.drain()
    assert e.finished[1].reason == LENGTH
    assert len(e.finished[1].outputs) == 2


# ---- abort ----


def test_abort_between_schedule_and_commit_frees_only_after_commit() -> None:
    e = engine()
    e.add(1, prompt(10, 1))
    e.add(2, prompt(10, 2))
    e.schedule()
    e.abort(1, 99)
    group = e.scheduler.stats().groups[0]
    assert (group.used, group.in_flight) == (3, 3)
    e.check()
    result = e.commit()
    assert dict(zip(result.request_ids.tolist(), result.finish_reasons.tolist(), strict=True)) == {1: ABORTED, 2: 0}
    assert result.counts.tolist() == [0, 1]
    assert e.scheduler.stats().groups[0].in_flight == 0
    e.abort(2)
    assert not e.scheduler.has_work()
    assert e.scheduler.schedule() is None
    group = e.scheduler.stats().groups[0]
    assert (group.used, group.cached, group.free) == (0, 2, 62)


def test_abort_of_a_waiting_request() -> None:
    e = engine(max_num_seqs=1)
    e.add(1, prompt(4, 1), max_tokens=2)
    e.add(2, prompt(4, 2), max_tokens=2)
    e.step()
    e.abort(2)
    assert finish_order(e) == [1]


# ---- a step ahead ----


def reasons(result: _core.StepResult) -> dict[int, int]:
    return dict(zip(result.request_ids.tolist(), result.finish_reasons.tolist(), strict=True))


def test_a_step_ahead_names_unknown_tokens_by_their_slot() -> None:
    e = engine(max_num_batched_tokens=12)
    e.add(1, prompt(4, 1))
    e.add(2, prompt(20, 2))
    first = e.schedule()
    assert ids_and_counts(first) == [(1, 4), (2, 8)]
    assert first is not None
    assert not first.has_unknown_tokens
    ahead = e.schedule()
    assert ids_and_counts(ahead) == [(1, 1), (2, 11)]  # the second prompt goes on where the step before will end
    assert ahead is not None
    assert ahead.has_unknown_tokens
    assert ahead.token_ids[0] == ~first.row_slots[0]
    e.commit()
    assert sorted(finish_order(e)) == [1, 2]


def test_who_reaches_a_limit_is_not_planned_ahead() -> None:
    e = engine(max_model_len=9)
    e.add(1, prompt(4, 1), max_tokens=1)
    e.add(2, prompt(8, 2), max_tokens=5)
    e.add(3, prompt(4, 3), max_tokens=2)
    e.schedule()
    assert ids_and_counts(e.schedule()) == [(3, 1)]
    assert reasons(e.commit()) == {1: LENGTH, 2: LENGTH, 3: RUNNING}
    assert e.schedule() is None
    assert reasons(e.commit()) == {3: LENGTH}


def test_who_stops_was_computed_in_vain_and_keeps_no_block_that_a_step_may_write() -> None:
    e = engine()
    e.add(1, prompt(8, 1), max_tokens=9, stop=[7])
    e.schedule()
    e.schedule()
    assert reasons(e.commit({1: 7})) == {1: STOP}
    group = e.scheduler.stats().groups[0]
    assert (group.used, group.cached, group.in_flight) == (0, 2, 1)
    assert reasons(e.commit()) == {1: ABORTED}
    assert e.scheduler.stats().groups[0].in_flight == 0
    assert not e.scheduler.has_work()


def test_nobody_who_is_in_progress_is_preempted_and_room_is_made_as_soon_as_nobody_is() -> None:
    e = engine(num_blocks=5, max_model_len=20)
    e.add(1, prompt(7, 1), max_tokens=12)
    e.add(2, prompt(6, 2), max_tokens=12)
    e.add(3, prompt(17, 3), max_tokens=1)  # waits, and must not come between
    e.step()
    assert ids_and_counts(e.schedule()) == [(1, 1), (2, 1)]
    assert ids_and_counts(e.schedule()) == [(1, 1), (2, 1)]  # the last block that is free
    e.commit()
    while (plan := e.schedule()) is not None:
        assert not len(plan.preempted_request_ids)
        e.commit()
    assert len(e.plans) == 1
    e.commit()
    plan = e.schedule()
    assert plan is not None
    assert plan.preempted_request_ids.tolist() == [2]
    e.abort(3)
    assert finish_order(e) == [1, 2]


def test_a_row_without_a_token_ends_its_request_and_its_step_is_not_kept() -> None:
    e = engine()
    e.add(1, prompt(8, 1), max_tokens=9)
    e.add(2, prompt(8, 2), max_tokens=9)
    e.schedule()
    e.schedule()
    result = e.commit({1: -1})
    assert reasons(result) == {1: BROKEN, 2: RUNNING}
    assert result.counts.tolist() == [0, 1]
    assert e.scheduler.stats().groups[0].cached == 0
    assert reasons(e.commit()) == {1: ABORTED, 2: RUNNING}
    assert finish_order(e) == [2]


# ---- prefix cache ----


def test_the_next_turn_finds_prompt_and_answer_in_the_cache() -> None:
    e = engine()
    e.add(1, prompt(10), max_tokens=9)
    e.drain()
    turn = prompt(10) + e.finished[1].outputs
    e.add(2, [*turn, 5, 6], max_tokens=1)
    e.drain()
    assert e.finished[2].cached == 16  # the last of the 19 tokens was sampled, never computed: 4 full blocks
    stats = e.scheduler.stats()
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (31, 16)


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    e = engine()
    for i in range(2):
        e.add(i, prompt(12), max_tokens=1)
        e.drain()
    assert e.finished[1].cached == 8


def test_equal_prompts_are_computed_once() -> None:
    e = engine(num_blocks=128, max_num_seqs=16, max_num_batched_tokens=8)
    for i in range(16):
        e.add(i, prompt(41), max_tokens=1)
    e.drain()
    assert sum(e.computed_tokens) == 41 + 15
    assert [e.finished[i].cached for i in range(16)] == [0] + [40] * 15


def test_a_request_that_waits_for_anothers_prefix_lets_others_by() -> None:
    e = engine(max_num_batched_tokens=16)
    e.add(1, prompt(24, 1), max_tokens=1)
    e.add(2, prompt(24, 1), max_tokens=1)
    e.add(3, prompt(4, 3), max_tokens=1)
    e.step()
    assert ids_and_counts(e.schedule()) == [(1, 8), (3, 4)]


def test_namespaces_do_not_share() -> None:
    e = engine()
    for i, namespace in enumerate([b"a", b"b", b"a"]):
        e.add(i, prompt(12), max_tokens=1, namespace=namespace)
        e.drain()
    assert [e.finished[i].cached for i in range(3)] == [0, 0, 8]


def test_skip_prefix_match_computes_every_position_and_still_serves_others() -> None:
    e = engine()
    for i in range(3):
        e.add(i, prompt(12), max_tokens=1, skip_prefix_match=i < 2)
        e.drain()
    assert e.computed_tokens == [12, 12, 4]
    assert e.scheduler.stats().groups[0].cached == 3


def test_prefix_caching_off_keeps_nothing() -> None:
    e = engine(enable_prefix_caching=False)
    for i in range(2):
        e.add(i, prompt(12), max_tokens=1)
    e.drain()
    assert sum(e.computed_tokens) == 24
    group = e.scheduler.stats().groups[0]
    assert (group.free, group.cached) == (64, 0)


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    e = engine(num_blocks=8, max_model_len=32)
    e.add(1, prompt(17, 1), max_tokens=1)  # 4 full blocks
    e.drain()
    e.add(2, prompt(13, 2), max_tokens=1)  # 3 more
    e.drain()
    e.add(3, prompt(13, 3), max_tokens=1)  # takes 1 free block and evicts 3: the end of the first
    e.drain()
    e.add(4, prompt(17, 1), max_tokens=1)
    e.drain()
    assert e.finished[4].cached == 4


def test_reset_forgets_what_nobody_holds() -> None:
    e = engine()
    e.add(1, prompt(12), max_tokens=1)
    e.drain()
    e.reset_prefix_cache()
    assert e.scheduler.stats().groups[0].free == 64
    e.add(2, prompt(12), max_tokens=1)
    e.drain()
    assert e.finished[2].cached == 0


# ---- sliding windows ----


def test_a_window_group_holds_only_its_window() -> None:
    e = engine(window=6, max_num_batched_tokens=8)
    e.add(1, prompt(40), max_tokens=2)
    for _ in range(5):
        e.step()
    full, sliding = e.scheduler.stats().groups
    assert full.used == 10
    assert sliding.used == 3  # the tail of 5 tokens, and a block more
    plan = e.schedule()
    assert plan is not None
    assert (plan.stream_tables[0][1] == _core.NO_BLOCK).tolist() == [True] * 7 + [False] * 4


def test_a_match_ends_where_the_window_before_it_is_resident() -> None:
    setup = Setup(((1, 16, 0), (1, 7, 8)), BLOCK, 4, 16, 48)
    e = Engine(setup)
    e.add(1, prompt(33), max_tokens=1)
    e.drain()
    # The window pool kept the newest blocks: a prompt that leaves the cached path early matches less than it shares.
    e.add(2, prompt(12) + prompt(8, 2), max_tokens=1)
    e.add(3, prompt(33), max_tokens=1)
    e.drain()
    assert e.finished[2].cached == 0
    assert e.finished[3].cached > 0


def test_a_model_of_sliding_windows_only_matches_without_its_distant_past() -> None:
    e = Engine(Setup(((1, 9, 8),), BLOCK, 4, 16, 64))
    e.add(1, prompt(61), max_tokens=1)
    e.drain()
    e.add(2, prompt(61), max_tokens=1)
    e.drain()
    assert e.finished[2].cached == 60


# ---- mistakes ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 15}, "KV group 0 has 15 blocks; one sequence of max_model_len 64 needs 16"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**changes)


@pytest.mark.parametrize(
    ("request_id", "length", "params", "message"),
    [
        (1, 4, {}, "request 1 is already known"),
        (2, 0, {}, "empty prompt"),
        (2, 64, {}, "at most 63"),
        (2, 4, {"max_tokens": 0}, "max_tokens"),
        (2, 4, {"min_tokens": -1}, "min_tokens"),
    ],
)
def test_bad_requests_are_refused(request_id: int, length: int, params: dict[str, int], message: str) -> None:
    e = engine()
    e.add(1, prompt(4))
    with pytest.raises(ValueError, match=message):
        e.add(request_id, prompt(length), **params)
    assert finish_order(e) == [1]


def test_every_step_is_committed() -> None:
    e = engine()
    e.add(1, prompt(4))
    with pytest.raises(RuntimeError, match="without a step"):
        e.scheduler.commit(np.zeros(0, np.int32))
    e.schedule()
    assert e.schedule() is not None
    with pytest.raises(RuntimeError, match="two steps"):
        e.scheduler.schedule()
    with pytest.raises(ValueError, match="got 2 tokens, the plan has 1"):
        e.scheduler.commit(np.zeros(2, np.int32))
    e.commit()
    assert finish_order(e) == [1]


def test_arrays_of_a_plan_outlive_it() -> None:
    e = engine()
    e.add(1, [3, 1, 4, 1, 5])
    plan = e.schedule()
    assert plan is not None
    tokens, tables = plan.token_ids, plan.stream_tables[0]
    e.commit()
    del plan
    e.drain()
    assert tokens.tolist() == [3, 1, 4, 1, 5]
    assert tables[0].tolist() == [0, 3]
    assert tokens.dtype == tables[0].dtype == np.int32
