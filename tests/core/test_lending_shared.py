"""Borrowing where KV groups share extents: they hand them over meanwhile; bytes are checked by `lending_oracle`."""

from __future__ import annotations

import random

import numpy as np
import pytest
from lending_oracle import BorrowSetup, LendingEngine, LendingSetup

NOTHING = np.zeros(0, np.int32)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100) for _ in range(length)]


def shared_engine(num_extents: int = 12) -> LendingEngine:
    """Make an engine whose groups share extents: two blocks of full attention, or one of windows. Nothing is lent."""
    setup = LendingSetup(
        ((4, 2 * num_extents, 0), (8, num_extents, 8)),
        (BorrowSetup(0, 16, 2), BorrowSetup(1, 4, 1)),
        max_num_batched_tokens=16,
        max_model_len=100,
        blocks_per_extent=(2, 1),
    )
    return LendingEngine(setup, random.Random(0))


def converse(e: LendingEngine, request_id: int, tokens: list[int]) -> int:
    """Return how many tokens of a request were found in the cache."""
    hits = e.scheduler.stats().prefix_hit_tokens_total
    e.add(request_id, tokens, max_tokens=1)
    e.drain()
    return int(e.scheduler.stats().prefix_hit_tokens_total - hits)


def test_extents_change_hands_while_something_is_borrowed() -> None:
    """Short prompts are mostly tails, long ones mostly histories; the lenders keep theirs meanwhile."""
    e = shared_engine()
    e.borrow(0, 4)
    owned = []
    for lap in range(2):
        for i in range(12):
            converse(e, 100 * lap + i, prompt(9, 100 * lap + i))
        owned.append(e.extents())
        for i in range(3):
            converse(e, 100 * lap + 50 + i, prompt(50, 100 * lap + 50 + i))
        owned.append(e.extents())
        assert len(e.held[0]) == 4
    assert [of_window > of_full for of_full, of_window in owned] == [True, False, True, False]


def test_a_history_longer_than_a_shared_pool_streams_from_lenders() -> None:
    e = shared_engine(num_extents=8)
    e.borrow(0, 12)
    tokens = prompt(90, 1)
    assert converse(e, 1, tokens) == 0
    assert e.streamed_blocks > 0
    assert e.scheduler.stats().groups[0].staging > 0
    assert converse(e, 2, [*tokens, 1, 2]) == 88
    assert len(e.outputs) == 2


def test_windows_come_to_the_pool_to_be_used() -> None:
    """They are short, so that staging them would save no room worth the copies of each step."""
    e = shared_engine(num_extents=8)
    e.borrow(0, 4)
    e.borrow(1, 4)
    for i in range(8):
        converse(e, i, prompt(21, i))
    assert e.scheduler.stats().groups[1].borrowed_cached > 0
    found = [converse(e, 100 + i, prompt(21, i)) for i in reversed(range(8))]
    assert any(found)
    stats = e.scheduler.stats().groups[1]
    assert (stats.staging, stats.borrowed_used) == (0, 0)


def test_who_makes_way_for_a_drain_begins_again_where_its_blocks_were_staged() -> None:
    """It does so in the same step: nothing else would make the engine plan another one."""
    setup = LendingSetup(
        ((2, 8, 0), (1, 16, 5)), (BorrowSetup(0, 6, 1),), block_size=2, max_model_len=16, blocks_per_extent=(1, 2)
    )
    e = LendingEngine(setup, random.Random(0))
    e.borrow(0, 6)
    e.add(1, prompt(9, 1), max_tokens=3)
    assert e.schedule()
    e.commit()
    assert e.scheduler.stats().groups[0].borrowed_used == 3
    e.recall(0, 6)
    assert e.schedule()
    plan = e.planned[-1].plan
    assert plan.preempted_request_ids.tolist() == plan.request_ids.tolist() == [1]
    e.drain()
    assert len(e.outputs[1]) == 3


def test_what_little_is_borrowed_takes_no_extent_to_be_staged_in() -> None:
    """An extent that stages less than it holds would only make the pool smaller."""
    setup = LendingSetup(
        ((2, 24, 0), (4, 12, 8)), (BorrowSetup(0, 3, 1),), max_model_len=60, blocks_per_extent=(2, 1), max_num_seqs=1
    )
    e = LendingEngine(setup, random.Random(0))
    e.borrow(0, 1)
    assert not e.schedule()
    assert e.scheduler.stats().groups[0].staging == 0
    e.borrow(0, 1)
    assert not e.schedule()
    assert e.scheduler.stats().groups[0].staging == 2


def test_an_extent_changes_hands_when_what_it_held_is_copied() -> None:
    """A block makes way for the next request, and its extent could go to that request's window in the same step.

    Histories have all that they may have, so they empty extents of their own; windows take what is nobody's. The step
    writes all layers of the windows before it copies the first layer of a history.
    """
    setup = LendingSetup(
        ((4, 11, 0), (4, 11, 9)), (BorrowSetup(0, 4, 1),), block_size=2, max_model_len=16, blocks_per_extent=(1, 1)
    )
    e = LendingEngine(setup, random.Random(0))
    e.next_group = lambda running: running[-1]
    e.borrow(0, 4)
    e.add(1, prompt(1, 1), max_tokens=9)
    e.add(2, prompt(6, 2), max_tokens=1)
    assert e.schedule()
    e.commit()
    e.abort(1)  # the lowest extents are nobody's
    e.add(3, prompt(6, 3), max_tokens=1)
    assert e.schedule()
    assert len(e.planned[-1].plan.copies(0, "spill", 0)) > 0
    e.drain()
    assert converse(e, 4, [*prompt(6, 2), 1]) == 6
    assert len(e.outputs) == 3


def test_a_window_that_moves_in_has_its_extent_before_others_take_blocks() -> None:
    """The tail of its window is with a lender, and the extent that it needs here is the history's to give up or pin."""
    setup = LendingSetup(
        ((2, 26, 0), (4, 13, 5)),
        (BorrowSetup(0, 8, 2), BorrowSetup(1, 1, 1)),
        max_model_len=100,
        blocks_per_extent=(2, 1),
    )
    e = LendingEngine(setup, random.Random(0))
    e.borrow(0, 8)
    e.borrow(1, 1)
    tokens = prompt(29, 2)
    converse(e, 1, tokens[:4])
    converse(e, 2, prompt(32, 5))
    assert e.scheduler.stats().groups[1].borrowed_cached == 1
    assert converse(e, 3, tokens) == 4
    assert e.scheduler.stats().groups[1].borrowed_used == 0
    assert len(e.outputs) == 3


@pytest.mark.parametrize("seed", range(60))
def test_what_may_be_loaded_finds_room_in_an_engine_at_rest(seed: int) -> None:
    """Otherwise a request would wait for room that nobody is going to leave."""
    rng = random.Random(seed)
    sizes, fewest = rng.choice([((2, 1), 9), ((1, 2), 15), ((1, 1), 14)])
    num_extents, window = rng.randint(fewest, fewest + 8), rng.choice([5, 6, 8, 12])
    layers = (8 // sizes[0], 8 // sizes[1])
    groups = [(layers[g], sizes[g] * num_extents, window * g) for g in range(2)]
    setup = LendingSetup(tuple(groups), (BorrowSetup(0, 16, 2),), max_model_len=80, blocks_per_extent=sizes)
    e = LendingEngine(setup, rng)
    e.borrow(0, rng.randint(0, 16))
    for i in range(rng.randint(0, 4)):
        converse(e, i, prompt(rng.randint(5, 60), rng.randrange(1000)))
    e.scheduler.add_request(99, np.array(prompt(rng.randint(20, 76), 99), np.int32), 1, 0, NOTHING, b"", False)
    _, is_resident, num_usable = e.scheduler.look_up(99)
    length = e.scheduler.loadable(99, np.ones(len(is_resident), np.uint8), len(is_resident) // 2)
    if length > num_usable:
        assert len(e.scheduler.begin_load(99, length, 0)[0]) > 0
