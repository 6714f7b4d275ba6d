"""Blocks in host memory are attended where they lie, for as long as this engine has their chunks pinned."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
from host_oracle import HOST, HostEngine
from naive_scheduler import Setup

from swiftkv import _core
from swiftkv._core import GroupSpec, Scheduler

BLOCK = 4
DENSE = Setup(((2, 16, 0),), BLOCK, 4, 64, 48)
LARGE = Setup(((2, 32, 0),), BLOCK, 4, 64, 48)
HYBRID = Setup(((1, 16, 0), (2, 16, 8)), BLOCK, 4, 64, 48)
HOUSE = Setup(((2, 24, 0), (1, 48, 8)), BLOCK, 4, 64, 48, blocks_per_extent=(1, 2))
SETUPS = pytest.mark.parametrize("setup", [DENSE, HYBRID, HOUSE], ids=["dense", "hybrid", "shared extents"])


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def run(e: HostEngine, request_id: int, tokens: list[int], max_tokens: int = 1) -> int:
    """Return how many tokens of a request were found here; it runs to its end, and what is on offer is stored."""
    e.add(request_id, tokens, max_tokens)
    while e.step():
        e.store()
    e.check()
    return e.finished[request_id].cached


def stored(setup: Setup, *prompts: list[int]) -> HostEngine:
    """Return an engine that has stored prompts and forgotten them."""
    e = HostEngine(setup, "write_through", num_chunks=32)
    for number, tokens in enumerate(prompts):
        run(e, 100 + number, tokens)
    e.reset_prefix_cache()
    return e


def bring(e: HostEngine, request_id: int, tokens: list[int], max_tokens: int = 4) -> int:
    """Add a request and load all that there is of it. Return how many blocks are attended in host memory."""
    before = e.num_attended
    e.add_held(request_id, tokens, max_tokens)
    if transfer := e.begin_load(request_id):
        e.read(transfer, len(transfer.blocks))
    e.let_go(request_id)
    return e.num_attended - before


def host_stats(e: HostEngine) -> tuple[int, int, int, int]:
    group = e.scheduler.stats().groups[e.host_group]
    return group.host_used, group.host_cached, group.host_in_flight, group.host_loading


def num_pins(e: HostEngine) -> int:
    return sum(chunk.num_pins for chunk in e.chunks)


@SETUPS
def test_blocks_are_attended_where_they_lie(setup: Setup) -> None:
    e = stored(setup, prompt(33))
    assert bring(e, 1, [*prompt(33), 7]) == 8
    plan = e.schedule()
    assert plan is not None
    assert plan.new_cached_tokens.tolist() == [32]
    assert plan.new_host_blocks.tolist() == list(range(8))
    assert plan.new_host_starts.tolist() == [0, 8]
    assert host_stats(e) == (8, 0, 0, 0)
    e.commit()
    while e.step():
        pass
    assert host_stats(e) == (0, 8, 0, 0)
    e.check()


def test_they_take_no_room_in_the_pool() -> None:
    e = stored(DENSE, prompt(40))
    e.add(1, prompt(36, 1), max_tokens=8)
    assert e.step()  # takes 9 of 16 blocks, and 2 for its answer later
    assert bring(e, 2, [*prompt(40), 7]) == 10
    assert e.schedule()
    assert e.scheduler.stats().num_running == 2
    e.drain()


def test_a_second_request_finds_them_without_a_load() -> None:
    e = stored(DENSE, prompt(33))
    bring(e, 1, [*prompt(33), 7])
    while e.step():
        pass
    assert run(e, 2, [*prompt(33), 8]) == 32
    assert e.num_attended == 8


def test_a_chunk_stays_pinned_until_the_steps_that_read_it_are_over() -> None:
    e = stored(DENSE, prompt(33))
    bring(e, 1, [*prompt(33), 7])
    assert e.schedule()
    assert e.schedule()  # ahead of the first
    e.abort(1)
    assert e.scheduler.evict_host()
    assert host_stats(e) == (0, 0, 0, 0)
    for _ in range(2):
        assert not len(e.scheduler.take_unpinned()), "a step may still read it"
        e.commit()
    assert sorted(e.scheduler.take_unpinned().tolist()) == list(range(8))
    for chunk in e.chunks:
        chunk.num_pins = 0


def test_used_blocks_stay_when_the_others_go() -> None:
    e = stored(DENSE, prompt(33), prompt(33, 1))
    bring(e, 1, [*prompt(33), 7])
    while e.step():
        pass
    bring(e, 2, [*prompt(33, 1), 7])
    assert e.step()
    assert host_stats(e) == (8, 8, 0, 0)
    assert e.scheduler.evict_host()
    e.unpin_unused()
    assert (host_stats(e), num_pins(e)) == ((8, 0, 0, 0), 8)
    e.drain()


def test_a_block_that_the_index_has_forgotten_is_copied_while_it_is_being_verified() -> None:
    e = stored(DENSE, prompt(33))
    e.add_held(1, [*prompt(33), 7])
    transfer = e.begin_load(1)
    assert transfer is not None
    e.give_up(transfer)
    assert bring(e, 2, [*prompt(33), 9], max_tokens=1) == 0
    assert host_stats(e) == (0, 0, 0, 8)
    e.check()
    e.read(transfer, 8)
    e.let_go(1)
    e.drain()
    assert e.finished[2].cached == 32


def test_a_block_that_is_computed_again_gives_way_to_the_one_in_host_memory() -> None:
    """A pin on it stays whole."""
    e = stored(LARGE, prompt(33))
    bring(e, 1, [*prompt(33), 7], max_tokens=14)
    assert e.step()
    pin_id = e.pin(b"", prompt(33), 1.0)
    assert pin_id is not None
    e.add(2, [*prompt(33), 8], max_tokens=1, skip_prefix_match=True)
    while 2 in e.requests:
        assert e.step()
    assert host_stats(e) == (8, 0, 0, 0)
    e.check()
    e.unpin(pin_id)
    e.drain()


def test_nobody_is_displaced_for_blocks_in_host_memory() -> None:
    e = stored(DENSE, prompt(40))
    bring(e, 1, [*prompt(40), 7], max_tokens=5)  # two blocks in the pool, ten in host memory
    assert e.step()
    e.add(2, prompt(32, 1), max_tokens=8, priority=-_core.PRIORITIES_PER_CLASS)  # nine more
    assert e.step()
    e.add(3, prompt(41, 2), max_tokens=3, priority=-_core.PRIORITIES_PER_CLASS)  # wants eleven
    assert e.step()
    stats = e.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions_total) == (2, 1, 0)
    e.drain()


def test_a_prompt_longer_than_the_pool_finds_all_that_is_in_host_memory() -> None:
    e = HostEngine(DENSE, "write_through", num_chunks=32, num_lent_extents=8)
    run(e, 100, prompt(45))
    e.reset_prefix_cache()
    e.lend(5)  # leaves six blocks
    assert bring(e, 1, [*prompt(45), 7], max_tokens=2) == 11
    e.check()
    e.drain()


def test_a_request_waits_for_blocks_that_are_being_verified() -> None:
    e = stored(DENSE, prompt(33))
    e.add_held(1, [*prompt(33), 7])
    transfer = e.begin_load(1)
    assert transfer is not None
    e.add(2, [*prompt(33), 8], max_tokens=1)
    assert e.schedule() is None
    e.read(transfer, 8)
    assert e.step()
    assert e.finished[2].cached == 32
    e.let_go(1)
    e.drain()


def test_storage_that_comes_late_is_offered_what_is_in_host_memory() -> None:
    e = stored(DENSE, prompt(33))
    bring(e, 1, [*prompt(33), 7])
    e.scheduler.set_write_policy("never")
    before = dict(e.storage)
    e.storage.clear()
    e.scheduler.set_write_policy("write_through")
    assert e.store() == 8
    assert e.storage == before
    e.drain()


def test_corrupt_blocks_are_given_back_and_computed() -> None:
    e = stored(DENSE, prompt(33))
    e.add_held(1, [*prompt(33), 7])
    transfer = e.begin_load(1)
    assert transfer is not None
    e.read(transfer, 3)
    e.read(transfer, 5, is_loaded=False)
    assert host_stats(e) == (0, 3, 0, 0)
    e.unpin_unused()
    assert num_pins(e) == 3
    e.let_go(1)
    while e.step():
        pass
    assert e.finished[1].cached == 12
    e.drain()


def test_a_given_up_load_gives_its_pins_back_when_it_ends() -> None:
    e = stored(DENSE, prompt(33))
    e.add_held(1, [*prompt(33), 7])
    transfer = e.begin_load(1)
    assert transfer is not None
    e.give_up(transfer)
    e.unpin_unused()
    assert (host_stats(e), num_pins(e)) == ((0, 0, 0, 8), 8)
    e.read(transfer, 8)
    e.unpin_unused()
    assert (host_stats(e), num_pins(e)) == ((0, 0, 0, 0), 0)
    e.let_go(1)
    e.drain()


def test_events_say_that_they_lie_in_host_memory() -> None:
    e = stored(DENSE, prompt(17))
    e.scheduler.enable_kv_events(100)
    bring(e, 1, [*prompt(17), 7])
    _, _, places = e.scheduler.resident_blocks()
    assert places.tolist() == [HOST] * 4
    e.drain()


def test_random_histories_attend_to_host_memory() -> None:
    """The state machine in `test_storage_states` would show little if hardly any block were attended there."""
    rng = random.Random(0)
    e = HostEngine(DENSE, "write_through", num_chunks=12)
    for request_id in range(60):
        tokens = [*prompt(4 * rng.randint(2, 9), rng.randint(0, 2)), rng.randint(0, 9)]
        bring(e, request_id, tokens, max_tokens=rng.randint(1, 6))
        for _ in range(rng.randint(0, 6)):
            e.step_ahead()
            e.store()
        e.host_forgets(rng.randint(0, 11))
        if rng.random() < 0.3:
            e.reset_prefix_cache()
        e.check()
    assert e.num_attended > 50
    e.drain()


def begin_load(pinned: npt.NDArray[np.int32]) -> None:
    scheduler = Scheduler(
        [GroupSpec(2, 16, 0, 1, 0, 0, 32, 2, 4)],
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=48,
    )
    none = np.empty(0, np.int32)
    scheduler.add_request(1, np.zeros(10, np.int32), 4, 0, none, b"", False)
    scheduler.hold(1)
    scheduler.begin_load(1, 2, 0, pinned)


@pytest.mark.parametrize(
    ("pinned", "message"), [([0], "it has 1 values"), ([0, 4], "no chunk 4"), ([-2, 0], "no chunk -2")]
)
def test_pins_that_mean_nothing_are_refused(pinned: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        begin_load(np.array(pinned, np.int32))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GroupSpec(2, 16, 0, 1, 0, 0, 31, 2, 4), "beyond its pool"),
        (GroupSpec(2, 16, 0, 1, 0, 0, 32, 1, 4), "hold a block each"),
        (GroupSpec(2, 16, 0, 1, 0, 0, 32, 2, -1), "chunks of host memory"),
        (GroupSpec(2, 16, 0, 1, 0, 0, 32, 1 << 20, 1 << 20), "an int32 can count"),
        (GroupSpec(2, 16, 8, 1, 0, 0, 32, 2, 4), "has a window"),
    ],
)
def test_chunks_that_cannot_be_attended_are_refused(spec: GroupSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheduler([spec], block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=48)
