"""The scheduler's promises to borrowers, one per test; bytes are checked by `lending_oracle`."""

from __future__ import annotations

import random

import numpy as np
import pytest
from lending_oracle import BorrowSetup, LendingEngine, LendingSetup

from swiftkv import _core
from swiftkv._core import GroupSpec, Link, Scheduler


def engine(
    num_blocks: int, num_extents: int, *, enable_chunked_prefill: bool = True, max_num_seqs: int = 3
) -> LendingEngine:
    """Make an engine whose extents are single blocks and which has lent nothing yet."""
    setup = LendingSetup(
        ((2, num_blocks, 0),),
        (BorrowSetup(0, num_extents, 1),),
        max_num_batched_tokens=8,
        enable_chunked_prefill=enable_chunked_prefill,
        max_num_seqs=max_num_seqs,
    )
    return LendingEngine(setup, random.Random(0))


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100) for _ in range(length)]


def test_a_plan_does_not_name_a_preempted_request_that_has_been_aborted() -> None:
    e = engine(num_blocks=8, num_extents=16)
    e.borrow(0, 16)
    e.add(1, prompt(40, 1), max_tokens=4)
    for _ in range(5):
        assert e.schedule()
        e.commit()
    e.lose(0)  # half of the prompt was there
    assert e.scheduler.stats().num_preemptions_total == 1
    e.abort(1)
    e.add(2, prompt(6, 2), max_tokens=1)
    assert e.schedule()
    assert e.planned[0].plan.preempted_request_ids.tolist() == []
    e.drain()


def test_chunks_of_a_request_that_lost_blocks_do_not_count_although_they_sample_nothing() -> None:
    """Neither the step that reads them nor the one before it counts, both in progress; later steps do."""
    scheduler = Scheduler(
        [GroupSpec(2, 16, 0, 32)],
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_model_len=68,
        borrow_links=[Link(0, 16, 1, 64, 0)],
    )
    scheduler.borrow(0, np.arange(16, dtype=np.int32))
    nothing = np.zeros(0, np.int32)
    scheduler.add_request(
        1,
        np.arange(60, dtype=np.int32),
        max_tokens=4,
        min_tokens=0,
        stop_token_ids=nothing,
        namespace=b"",
        skip_prefix_match=True,
    )
    planned, ahead = scheduler.schedule(), scheduler.schedule()
    while ahead is not None and not ahead.has_copies:
        assert scheduler.commit(nothing).counts.tolist() == [1]
        planned, ahead = ahead, scheduler.schedule()
    assert planned is not None
    assert ahead is not None
    assert len(planned.logits_rows) == len(ahead.logits_rows) == 0
    scheduler.lose(0)
    assert scheduler.commit(nothing).counts.tolist() == [0]
    assert scheduler.commit(nothing).counts.tolist() == [0]
    scheduler.borrow(0, np.arange(16, dtype=np.int32))
    again = scheduler.schedule()
    assert again is not None
    assert again.preempted_request_ids.tolist() == [1]
    assert again.positions.tolist() == list(range(8))
    assert scheduler.commit(nothing).counts.tolist() == [1]


def test_whom_room_has_come_for_is_not_starved_although_it_still_queues() -> None:
    e = engine(num_blocks=6, num_extents=16)
    e.add(1, prompt(30, 1), max_tokens=1)
    assert not e.schedule()
    assert e.scheduler.starved(e.now_s + 10, 10) == [1]
    e.borrow(0, 16)
    assert e.scheduler.starved(e.now_s + 10, 10) == []
    e.drain()


def test_who_waited_for_a_slot_while_there_was_room_has_not_waited_for_room_meanwhile() -> None:
    e = engine(num_blocks=6, num_extents=16, max_num_seqs=1)
    e.add(1, prompt(30, 1), max_tokens=1)
    assert not e.schedule()
    e.add(2, prompt(4, 2), max_tokens=4)
    assert e.schedule()  # the other takes the only slot
    e.commit()
    e.borrow(0, 16)
    assert e.scheduler.starved(e.now_s + 9, 10) == []
    e.recall(0, 16)
    while e.schedule():
        e.commit()
        e.take_returned()
        assert e.scheduler.starved(e.now_s + 10, 10) == []
    assert list(e.outputs) == [2]
    assert e.scheduler.starved(e.now_s + 10, 10) == [1]
    e.drain()


def test_without_chunks_a_long_prompt_does_not_wait_behind_one_for_which_there_is_no_room() -> None:
    e = engine(num_blocks=8, num_extents=16, enable_chunked_prefill=False)
    e.add(1, prompt(40, 1), max_tokens=1)  # for which more would have to be lent
    e.add(2, prompt(20, 2), max_tokens=1)  # longer than the budget of a step
    e.add(3, prompt(5, 3), max_tokens=1)
    while e.schedule():
        e.commit()
    assert sorted(e.outputs) == [2, 3]
    assert e.scheduler.starved(e.now_s + 10, 10) == [1]


@pytest.mark.parametrize("num_extents", [63, 64, 65, 4095, 4096, 4097])
def test_an_idle_pool_lends_all_that_it_has(num_extents: int) -> None:
    """Free blocks are kept in words of 64 bits, and those in words again."""
    links = [Link(0, num_extents, 1)]
    scheduler = Scheduler(
        [GroupSpec(1, num_extents)],
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=16 * num_extents,
        lend_links=links,
    )
    assert sorted(scheduler.lend(0, num_extents).tolist()) == list(range(num_extents))
    assert scheduler.stats().groups[0].free == 0


def test_room_in_a_sliding_window_s_pool_may_be_missing_too() -> None:
    setup = LendingSetup(
        ((3, 8, 0), (3, 3, 6)), (BorrowSetup(1, 3, 2),), max_num_batched_tokens=24, max_model_len=24, max_num_seqs=2
    )
    e = LendingEngine(setup, random.Random(0))
    e.add(1, prompt(16, 1), max_tokens=1)
    e.add(2, prompt(6, 2), max_tokens=1)
    while e.schedule():
        e.commit()
    assert list(e.outputs) == [2]
    assert e.scheduler.starved(e.now_s + 10, 10) == [1]
    e.borrow(0, 3)
    e.drain()
    assert sorted(e.outputs) == [1, 2]


def test_a_recalled_block_in_use_moves_to_another_extent_when_the_pool_is_full() -> None:
    e = engine(num_blocks=6, num_extents=16)
    e.borrow(0, 12)  # the layer-stream cache takes all six blocks: 12 layer blocks
    e.add(1, prompt(32, 1), max_tokens=6)
    for _ in range(5):
        assert e.schedule()
        e.commit()
    assert e.scheduler.stats().groups[0].borrowed_used == 9
    in_use = sorted(e.held[0])[:2]
    e.held[0].difference_update(in_use)
    e.recalled[0].update(in_use)
    e.scheduler.recall(0, np.array(in_use, np.int32))
    assert e.schedule()
    e.commit()
    e.take_returned()
    assert not e.recalled[0]
    assert e.scheduler.stats().num_preemptions_total == 0
    e.drain()


def test_what_is_recalled_moves_in_a_step_of_its_own() -> None:
    """The lender waits for the copies only, not for a step of the running requests as well."""
    e = engine(num_blocks=8, num_extents=16)
    e.borrow(0, 4)  # leaves six blocks to the pool
    e.add(1, prompt(28, 1), max_tokens=4)
    for _ in range(4):
        assert e.schedule()
        e.commit()
    assert e.scheduler.stats().groups[0].borrowed_used == 1
    e.recall(0, 4)
    assert e.schedule()
    assert e.planned[0].plan.has_copies
    assert not len(e.planned[0].plan.request_ids)
    e.commit()
    e.take_returned()
    assert not e.recalled[0]
    assert e.schedule()
    assert e.planned[0].plan.request_ids.tolist() == [1]
    e.commit()
    assert e.scheduler.stats().num_preemptions_total == 0
    e.drain()


def recall_extent(e: LendingEngine, link: int, extent: int) -> None:
    e.held[link].remove(extent)
    e.recalled[link].add(extent)
    e.scheduler.recall(link, np.array([extent], np.int32))


@pytest.mark.parametrize("extent", range(4))
def test_a_recall_while_the_layer_stream_cache_is_short_of_a_block(extent: int) -> None:
    """Nothing takes the place of a block that is leaving, even if it is the least recently used one."""
    e = engine(num_blocks=6, num_extents=16)
    e.borrow(0, 2)  # the layer-stream cache takes one block
    e.add(1, prompt(28, 1), max_tokens=1)
    while e.schedule():
        e.commit()
    e.add(2, prompt(20, 2), max_tokens=9)
    for _ in range(3):  # all that is left of the pool is in use, and the cache fills what is borrowed
        assert e.schedule()
        e.commit()
    e.borrow(0, 2)  # the layer-stream cache should have another block, and there is none
    while e.requests:
        assert e.schedule()
        e.commit()
    stats = e.scheduler.stats().groups[0]
    assert (stats.staging, stats.free, stats.cached) == (1, 0, 5)
    assert (stats.borrowed_free, stats.borrowed_cached) == (0, 4)
    recall_extent(e, 0, extent)
    while e.schedule():
        e.check()
        e.commit()
    e.check()
    e.take_returned()
    assert not e.recalled[0]
    assert e.scheduler.stats().groups[0].staging == 2
    e.drain()


def test_a_step_that_reads_what_was_lost_does_not_count_although_its_request_has_other_blocks_by_now() -> None:
    link, lend = BorrowSetup(0, 4, 1), (0, 8, 1)
    setup = LendingSetup(((2, 8, 0),), (link,), (lend,), max_num_batched_tokens=32, max_model_len=32)
    e = LendingEngine(setup, random.Random(0))
    e.lend(0, 1)
    e.borrow(0, 4)  # leaves five blocks to the pool
    begun = prompt(8, 1)
    e.add(1, [*begun, *prompt(9, 2)], max_tokens=4)
    assert e.schedule()
    e.commit()
    e.add(2, begun, max_tokens=3, skip_prefix_match=True)
    assert e.schedule()
    assert e.scheduler.stats().groups[0].borrowed_used == 2
    e.take_back(0, 1)
    assert e.schedule()  # reads the two, and writes to the block that came home
    e.commit()  # the same two blocks are in the cache: request 2 changes to them
    assert e.scheduler.stats().groups[0].borrowed_used == 0
    e.lose(0)
    e.commit()
    assert e.scheduler.stats().num_preemptions_total == 1
    e.drain()
    assert sorted(e.outputs) == [1, 2]


def test_a_plan_names_the_cached_blocks_that_were_found_in_borrowed_memory() -> None:
    """Blocks that move to the local pool at once are named too."""
    setup = LendingSetup(((2, 8, 0),), (BorrowSetup(0, 8, 1),), max_num_batched_tokens=64, max_model_len=40)
    e = LendingEngine(setup, random.Random(0))
    e.borrow(0, 8)
    prompts = [prompt(21, seed) for seed in range(3)]
    for i, tokens in enumerate(prompts):
        e.add(i, tokens, max_tokens=1)
        e.drain()
    keys, _, places = e.scheduler.resident_blocks()
    place_of = {keys[32 * i : 32 * i + 32]: place for i, place in enumerate(places.tolist())}

    def places_of(tokens: list[int]) -> list[int | None]:
        """Return where each full block of a prompt lies: 0 is the local pool."""
        key_bytes = _core.block_keys(b"", np.array(tokens, np.int32), setup.block_size)
        return [place_of.get(key_bytes[i : i + 32]) for i in range(0, len(key_bytes), 32)]

    spilled = next(tokens for tokens in prompts if any(places_of(tokens)))
    e.add(10, spilled, max_tokens=1)
    assert e.schedule()
    plan = e.planned[0].plan
    assert plan.new_request_ids.tolist() == [10]
    assert plan.new_borrowed_blocks.tolist() == [i for i, place in enumerate(places_of(spilled)) if place]
    assert plan.new_borrowed_starts.tolist() == [0, len(plan.new_borrowed_blocks)]
    borrowed_tokens = len(plan.new_borrowed_blocks) * setup.block_size
    assert e.scheduler.stats().borrowed_hit_tokens_total == borrowed_tokens
    assert 0 < borrowed_tokens <= plan.new_cached_tokens[0]
    e.drain()


def test_tails_above_blocks_that_a_lender_took_with_it_are_the_first_to_go() -> None:
    """The tail of a boundary is of no use without all full-attention blocks below it, however far below."""
    setup = LendingSetup(
        ((2, 48, 0), (1, 22, 8)), (BorrowSetup(0, 16, 1),), max_num_batched_tokens=64, max_model_len=200
    )
    e = LendingEngine(setup, random.Random(0))
    e.borrow(0, 16)
    shared, older = prompt(12, 1), prompt(13, 2)

    def run(request_id: int, tokens: list[int]) -> int:
        """Return how many tokens of a request were found in the cache."""
        hits = e.scheduler.stats().prefix_hit_tokens_total
        e.add(request_id, tokens, max_tokens=1)
        e.drain()
        return int(e.scheduler.stats().prefix_hit_tokens_total - hits)

    run(1, [*shared, 0])
    e.add(2, prompt(160, 3), max_tokens=2)  # fills the local pool, so that what is shared moves to the lender
    while e.scheduler.stats().groups[0].borrowed_cached == 0:
        assert e.schedule()
        e.commit()
    for i in (3, 4):  # at once: what two of them use stays where it is, and what each adds comes to the local pool
        e.add(i, [*shared, *prompt(9, i)], max_tokens=20)
    for _ in range(8):
        assert e.schedule()
        e.commit()
    e.add(5, older, max_tokens=1)
    e.drain()
    assert e.scheduler.stats().groups[0].borrowed_cached > 0
    e.lose(0)
    for i in range(5):
        assert run(6 + i, prompt(13, 1_000 + i)) == 0
    # Room was made from the ends of the third and the fourth request, which nobody can reach any more.
    assert run(11, older) == 12


def test_a_regular_boundary_pushes_no_prompt_s_end_out_of_a_peer() -> None:
    """The tail of the first prompt has gone to the peer, whose three blocks it fills; those of the second do not."""
    setup = LendingSetup(((3, 64, 0), (3, 9, 8)), (BorrowSetup(1, 3, 1),), max_model_len=128, retention_interval=16)
    e = LendingEngine(setup, random.Random(0))
    e.borrow(0, 3)
    e.add(1, prompt(20, 1), max_tokens=1)
    e.drain()
    e.add(2, prompt(120, 2), max_tokens=1)
    e.drain()
    assert e.moved_blocks > 0
    before = e.scheduler.stats().prefix_hit_tokens_total
    e.add(3, [*prompt(20, 1), 1, 2, 3], max_tokens=1)
    e.drain()
    assert e.scheduler.stats().prefix_hit_tokens_total == before + 20
