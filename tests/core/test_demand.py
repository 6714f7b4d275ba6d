"""The demand says how many blocks requests want of a pool: lenders decide by it."""

from __future__ import annotations

import numpy as np

from swiftkv._core import GroupSpec, Link, Scheduler


def scheduler() -> Scheduler:
    """Make a scheduler of 16 blocks of 4 tokens, all of which it may lend; a sequence has at most 12."""
    return Scheduler(
        [GroupSpec(2, 16)],
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=48,
        lend_links=[Link(0, 8, 2)],
    )


def add(scheduler: Scheduler, request_id: int, length: int) -> None:
    scheduler.add_request(
        request_id,
        np.arange(length, dtype=np.int32),
        max_tokens=4,
        min_tokens=0,
        stop_token_ids=np.zeros(0, np.int32),
        namespace=b"",
        skip_prefix_match=False,
    )


def abort(scheduler: Scheduler, *request_ids: int) -> None:
    scheduler.abort(np.array(request_ids, np.uint64))


def test_a_request_wants_its_blocks_and_the_next_one_whether_it_waits_or_runs() -> None:
    s = scheduler()
    add(s, 1, 20)
    assert s.take_demand()[0].total_now == 6
    assert s.schedule() is not None
    s.commit(np.array([1], np.int32))
    assert s.take_demand()[0].total_now == 6


def test_a_request_wants_no_more_than_a_sequence_can_have() -> None:
    s = scheduler()
    add(s, 1, 47)
    assert s.take_demand()[0].longest == 12


def test_peaks_last_until_they_are_asked_for() -> None:
    s = scheduler()
    add(s, 1, 20)
    add(s, 2, 8)
    abort(s, 1, 2)
    (demand,) = s.take_demand()
    assert (demand.total_peak, demand.longest, demand.total_now) == (9, 6, 0)
    (demand,) = s.take_demand()
    assert (demand.total_peak, demand.longest, demand.total_now) == (0, 0, 0)


def test_a_lender_is_short_only_while_something_is_lent() -> None:
    s = scheduler()
    for request_id in range(3):
        add(s, request_id, 20)
    assert s.take_demand()[0].shortfall == 2
    assert not s.is_short()
    abort(s, 0)
    assert s.take_demand()[0].shortfall == 0
    assert len(s.lend(0, 4)) == 4
    assert s.take_demand()[0].shortfall == 4
    assert s.is_short()


def test_more_demand_than_an_int_counts_is_the_largest_int() -> None:
    """A request wants 91 extents of the second group, and each counts as 10,000 blocks of the first."""
    groups = [GroupSpec(1, 2_000_000, blocks_per_extent=10_000), GroupSpec(1, 200, blocks_per_extent=1)]
    s = Scheduler(groups, block_size=1, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)
    add(s, 0, 90)
    alone = s.take_demand()[0].total_now
    for request_id in range(1, 2500):
        add(s, request_id, 90)
    assert s.take_demand()[0].total_now == np.iinfo(np.int32).max
    abort(s, *range(1, 2500))
    assert s.take_demand()[0].total_now == alone
