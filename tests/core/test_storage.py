"""Blocks go down to storage and come up again, and calls that mean nothing are refused.

It is one file, for it is one list of promises: what goes down must come up.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_scheduler import Setup
from storage_oracle import KEY_BYTES, StorageEngine, Transfer

from swiftkv import _core
from swiftkv.policies import SchedulingPolicy

BLOCK = 4
DENSE = Setup(((1, 16, 0),), BLOCK, 4, 64, 48)
HYBRID = Setup(((1, 16, 0), (1, 16, 8)), BLOCK, 4, 64, 48)
HOUSE = Setup(((1, 32, 0), (1, 32, 8)), BLOCK, 4, 64, 48, blocks_per_extent=(2, 2))
LARGE = Setup(((1, 48, 0),), BLOCK, 4, 128, 96)
SHARED = Setup(((2, 24, 0), (1, 48, 8)), BLOCK, 4, 64, 48, blocks_per_extent=(1, 2))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def run(e: StorageEngine, request_id: int, tokens: list[int], max_tokens: int = 1, flow: int = 0) -> int:
    """Return how many tokens of a request were found here; it runs to its end, and what is on offer is stored."""
    e.add(request_id, tokens, max_tokens, flow=flow)
    while e.step():
        e.store()
    return e.finished[request_id].cached


def run_from_storage(e: StorageEngine, request_id: int, tokens: list[int]) -> int:
    """Return how many tokens of a request were found once all that storage has of it is here."""
    e.add_held(request_id, tokens)
    if transfer := e.begin_load(request_id):
        e.read(transfer, len(transfer.blocks))
    e.let_go(request_id)
    while e.step():
        e.store()
    return e.finished[request_id].cached


def loading(tokens: list[int], max_tokens: int = 4) -> tuple[StorageEngine, Transfer]:
    """Return an engine that has forgotten a prompt, and has begun to load it for request 2, which is held."""
    e = StorageEngine(DENSE)
    run(e, 1, tokens)
    e.reset_prefix_cache()
    e.add_held(2, tokens, max_tokens)
    transfer = e.begin_load(2)
    assert transfer is not None
    return e, transfer


def test_every_full_block_is_offered_once() -> None:
    e = StorageEngine(DENSE)
    run(e, 1, prompt(18))
    assert len(e.storage) == 4
    run(e, 2, prompt(18))
    assert e.store() == 0


@pytest.mark.parametrize(("setup", "num_blocks"), [(DENSE, 4), (HYBRID, 6)], ids=["dense", "hybrid"])
def test_a_prefix_is_offered_before_a_second_prompt_finds_it(setup: Setup, num_blocks: int) -> None:
    """A window has its tail on offer, and each block is offered once."""
    e = StorageEngine(setup, "write_through_selective")
    run(e, 1, prompt(18))
    assert not e.storage
    keys = _core.block_keys(b"", np.array(prompt(18), np.int32), BLOCK)
    for stored in (num_blocks, 0):
        e.scheduler.offer_prefix(keys)
        assert e.store() == stored
    e.reset_prefix_cache()
    assert run_from_storage(e, 2, prompt(18)) == 16
    e.scheduler.set_write_policy("never")
    e.scheduler.offer_prefix(keys)
    assert e.scheduler.num_offers() == 0


def test_selective_writing_waits_for_the_second_prompt() -> None:
    e = StorageEngine(DENSE, "write_through_selective")
    run(e, 1, prompt(18))
    assert not e.storage
    run(e, 2, [*prompt(10), *prompt(8, 1)])
    assert len(e.storage) == 2


def test_of_a_window_only_the_tails_of_boundaries_go_down() -> None:
    """Two blocks are a tail; one more serves the prompt that ends with it."""
    e = StorageEngine(HYBRID)
    run(e, 1, prompt(33))
    groups = [group for _, group in e.storage]
    assert groups.count(0) == 8
    assert groups.count(1) == 3


@pytest.mark.parametrize("setup", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_storage_that_comes_late_is_offered_what_is_here(setup: Setup) -> None:
    e = StorageEngine(setup, "never")
    run(e, 1, prompt(33))
    assert not e.storage
    e.scheduler.set_write_policy("write_through")
    e.store()
    e.reset_prefix_cache()
    assert run_from_storage(e, 2, [*prompt(33), 1, 2]) == 32
    e.check()


def test_offers_are_taken_back_and_made_to_the_next_storage() -> None:
    e = StorageEngine(DENSE)
    run(e, 1, prompt(18))
    e.scheduler.set_write_policy("never")
    run(e, 2, prompt(18, 1))
    assert (len(e.storage), e.scheduler.num_offers(), e.scheduler.num_dropped_offers()) == (4, 0, 0)
    e.storage.clear()
    e.scheduler.set_write_policy("write_through")
    assert e.store() == len(e.storage) == 8


def keys_of(tokens: list[int], *numbers: int) -> list[bytes]:
    """Return the keys of blocks of a prompt, by their numbers."""
    found = _core.block_keys(b"", np.array(tokens, np.int32), BLOCK)
    return [found[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in numbers]


SETUPS = pytest.mark.parametrize("setup", [DENSE, HYBRID, SHARED], ids=["dense", "hybrid", "shared extents"])


@SETUPS
def test_while_a_quarter_of_the_pool_is_free_nothing_is_written_back(setup: Setup) -> None:
    e = StorageEngine(setup, "write_back")
    run(e, 1, prompt(33))
    run(e, 2, prompt(33))
    assert not e.storage


def test_what_is_evicted_next_is_written_back_once() -> None:
    """Two of sixteen blocks are free, and the last blocks of the older prompt make it a quarter."""
    e = StorageEngine(DENSE, "write_back")
    run(e, 1, prompt(33))
    run(e, 2, prompt(25, 1))
    assert list(e.storage) == [(key, 0) for key in keys_of(prompt(33), 7, 6)]
    assert e.store() == 0
    assert e.scheduler.num_dropped_offers() == 0


def test_what_goes_with_a_block_that_is_evicted_is_written_back_with_it() -> None:
    """A node without one of its full-attention blocks loses all of them, however much room the other group has."""
    e = StorageEngine(Setup(((1, 16, 0), (1, 64, 0)), BLOCK, 4, 64, 48), "write_back")
    run(e, 1, prompt(33))
    run(e, 2, prompt(25, 1))
    assert list(e.storage) == [(key, group) for key in keys_of(prompt(33), 7, 6) for group in (0, 1)]


def test_what_was_found_again_is_not_written_back() -> None:
    """A part of the prompt that came first is the last to be evicted now."""
    e = StorageEngine(DENSE, "write_back")
    run(e, 1, prompt(17))
    run(e, 2, prompt(33, 1))
    assert not e.storage
    run(e, 3, prompt(17))
    run(e, 4, prompt(13, 2))
    assert list(e.storage) == [(key, 0) for key in keys_of(prompt(33, 1), 7, 6, 5)]


def test_blocks_that_a_request_holds_are_not_written_back() -> None:
    e = StorageEngine(DENSE, "write_back")
    e.add(1, prompt(40), 8)
    for _ in range(7):
        e.step()
        assert e.store() == 0
    assert e.scheduler.stats().groups[0].used == 12
    e.drain()


def test_what_leaves_before_it_is_written_back_is_counted() -> None:
    """A prompt takes five blocks at once, of which two are free, and two were stored."""
    e = StorageEngine(DENSE, "write_back")
    run(e, 1, prompt(33))
    run(e, 2, prompt(25, 1))
    run(e, 3, prompt(17, 2))
    assert e.scheduler.num_dropped_offers() == 1
    assert (keys_of(prompt(33), 5)[0], 0) not in e.storage


def test_so_much_is_written_back_as_is_taken() -> None:
    """The rest stays where it is, and is asked for again."""
    e = StorageEngine(DENSE, "write_back")
    for i, length in enumerate((33, 25)):
        e.add(i, prompt(length, i), 1)
        e.step()
    assert [e.store(max_blocks) for max_blocks in (0, 1, 1, 1)] == [0, 1, 1, 0]


@SETUPS
def test_what_was_written_back_comes_back(setup: Setup) -> None:
    """A window's tail goes down with the last block before its boundary, as a whole."""
    e = StorageEngine(setup, "write_back")
    run(e, 1, prompt(33))
    num_others = 0
    while keys_of(prompt(33), 0)[0] in keys_here(e):
        num_others += 1
        run(e, 1 + num_others, prompt(13, num_others))
    assert {key for key, _ in e.storage} >= {*keys_of(prompt(33), *range(8))}
    if len(setup.groups) > 1:
        assert {key for key, group in e.storage if group == 1} >= {*keys_of(prompt(33), 5, 6, 7)}
    assert e.scheduler.num_dropped_offers() == 0
    assert run_from_storage(e, 99, prompt(33)) == 32
    e.check()


def keys_here(e: StorageEngine) -> set[bytes]:
    """Return the keys of the blocks of the first group that are here."""
    found, groups, _ = e.scheduler.resident_blocks()
    return {found[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i, group in enumerate(groups.tolist()) if group == 0}


def test_of_windows_that_no_boundary_keeps_nothing_is_written_back() -> None:
    e = StorageEngine(HYBRID, "write_back")
    run(e, 1, prompt(33))
    for i in range(2, 8):
        run(e, i, prompt(13, i))
    assert {key for key, group in e.storage if group == 1} & {*keys_of(prompt(33), *range(8))} == {
        *keys_of(prompt(33), 5, 6, 7)
    }


def test_what_goes_next_is_looked_at_however_slow_storage_is() -> None:
    """Blocks whose boundary is lost go sooner, before some that were looked at, and may not be on offer yet."""
    for seed in range(100):
        rng = random.Random(seed)
        windowed = (1, rng.choice([12, 16, 20]), rng.choice([8, 12]))
        groups = ((1, rng.choice([16, 20, 24]), 0), windowed)
        e = StorageEngine(Setup(groups, BLOCK, 4, 64, 48, retention_interval=rng.choice([8, 12, 16])), "write_back")
        prompts = [prompt(40, seed) for seed in range(2)]
        for i in range(1, 40):
            tokens = rng.choice(prompts)[: rng.randint(5, 40)]
            e.add(i, tokens + prompt(rng.randint(0, 4), 2 + i), rng.randint(1, 4))
            while e.step():
                if rng.random() < 0.4:
                    e.store(rng.choice([1, 1, 2, 64]))
                e.scheduler.check_invariants()


@pytest.mark.parametrize("setup", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_the_rest_is_offered_from_the_begin_of_what_was_used_last(setup: Setup) -> None:
    """An engine that ends has written the begin of something, however much it has time for."""
    e = StorageEngine(setup, "write_back")
    run(e, 1, prompt(17))
    run(e, 2, prompt(17, 1))
    assert not e.storage
    e.scheduler.set_write_policy("write_through")
    e.store()
    in_order = [*keys_of(prompt(17, 1), *range(4)), *keys_of(prompt(17), *range(4))]
    assert [key for key, group in e.storage if group == 0] == in_order
    e.reset_prefix_cache()
    assert [run_from_storage(e, 3 + i, [*prompt(17, i), 1]) for i in range(2)] == [16, 16]


def test_the_rest_is_of_use_after_a_part_of_it() -> None:
    """The blocks of a window go down beside those of the other group."""
    e = StorageEngine(HYBRID, "never")
    run(e, 1, prompt(17))
    run(e, 2, prompt(17, 1))
    e.scheduler.set_write_policy("write_through")
    assert e.store(7) == 7  # four, and three of the window
    e.reset_prefix_cache()
    assert run_from_storage(e, 3, [*prompt(17, 1), 1]) == 16


@pytest.mark.parametrize("setup", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_what_was_forgotten_comes_back(setup: Setup) -> None:
    e = StorageEngine(setup)
    run(e, 1, prompt(33))
    e.reset_prefix_cache()
    assert run_from_storage(e, 2, [*prompt(33), 1, 2]) == 32
    assert run(e, 3, [*prompt(33), 5]) == 32


def test_an_offer_whose_block_has_gone_is_dropped() -> None:
    e = StorageEngine(DENSE)
    e.add(1, prompt(18), 1)
    e.step()
    e.reset_prefix_cache()
    assert e.store() == 0
    assert e.scheduler.num_dropped_offers() == 4


def test_a_block_that_comes_again_is_offered_again() -> None:
    e = StorageEngine(DENSE)
    run(e, 1, prompt(18))
    e.reset_prefix_cache()
    e.storage.clear()
    run(e, 2, prompt(18))
    assert len(e.storage) == 4


def test_what_was_loaded_is_not_offered() -> None:
    e, transfer = loading(prompt(18))
    e.read(transfer, 4)
    assert e.store() == 0


def test_a_request_that_is_held_lets_others_by() -> None:
    e = StorageEngine(DENSE)
    e.add_held(1, prompt(8))
    e.add(2, prompt(8, 1))
    assert e.step()
    assert list(e.slots) == [2]
    e.let_go(1)
    e.drain()


@pytest.mark.parametrize("priority", [-1, 0], ids=["of another priority", "of one priority"])
@pytest.mark.parametrize("policy", ["hrrn", "spf", "turns", "deadline", "priority", "fcfs"])
def test_requests_that_are_held_hide_nobody_however_many_they_are(policy: SchedulingPolicy, priority: int) -> None:
    e = StorageEngine(replace(DENSE, scheduling_policy=policy))
    held = range(300)
    for request_id in held:
        e.add_held(request_id, prompt(8, request_id), priority=priority)
    e.add(1000, prompt(8, 1000), 1)
    assert e.step()
    assert list(e.finished) == [1000]
    e.abort(*held)
    e.drain()


def test_a_prompt_that_is_held_lets_one_by_that_needs_a_step_of_its_own() -> None:
    e = StorageEngine(Setup(((1, 16, 0),), BLOCK, 4, 8, 48, enable_chunked_prefill=False))
    e.add_held(1, prompt(12))
    e.add(2, prompt(12, 1))
    assert e.step()
    assert list(e.slots) == [2]
    e.drain()


def test_who_wants_what_is_loading_waits_and_goes_on_when_it_is_given_up() -> None:
    e, transfer = loading(prompt(18))
    e.add(3, prompt(18))
    assert e.schedule() is None
    e.give_up(transfer)
    assert e.step()
    assert 3 in e.slots
    assert e.scheduler.stats().groups[0].loading == 4
    e.read(transfer, 4, is_loaded=False)
    assert e.scheduler.stats().groups[0].loading == 0
    e.drain()


def test_a_load_that_fails_half_way_leaves_what_came_before() -> None:
    e, transfer = loading(prompt(33), 1)
    e.read(transfer, 3)
    e.read(transfer, 5, is_loaded=False)
    e.let_go(2)
    e.drain()
    assert e.finished[2].cached == 12


def test_loading_forgets_others_but_not_the_beginning_of_the_prompt() -> None:
    """The pool is full of another conversation, which was used later than this one's beginning."""
    e = StorageEngine(DENSE)
    run(e, 1, prompt(41))
    run(e, 2, prompt(41, 1))
    _, resident, num_usable = _look_up(e, 3, prompt(41))
    assert 0 < num_usable < 10
    assert resident[:num_usable].all()
    assert run_from_storage(e, 4, prompt(41)) == 40


def _look_up(e: StorageEngine, request_id: int, tokens: list[int]) -> tuple[list[bytes], np.ndarray, int]:
    e.add_held(request_id, tokens)
    found = e.look_up(request_id)
    e.abort(request_id)
    return found


def test_without_room_nothing_is_loaded_and_nothing_is_forgotten() -> None:
    e = StorageEngine(DENSE)
    run(e, 1, prompt(41))
    e.reset_prefix_cache()
    e.add(2, prompt(40, 1), 6)
    e.step()
    e.add_held(3, prompt(41))
    before = e.scheduler.stats().groups[0].cached
    assert e.begin_load(3) is None
    assert e.scheduler.stats().groups[0].cached == before
    e.drain()


def test_without_room_nothing_is_evicted_later_than_before() -> None:
    """The begin of a prompt whose end is wanted stays the oldest that is here."""
    e = StorageEngine(DENSE)
    run(e, 1, prompt(21))
    e.reset_prefix_cache()
    run(e, 2, prompt(9))
    run(e, 3, prompt(9, 1))
    e.add(4, prompt(40, 2), 6)
    e.step()
    e.step()
    e.add_held(5, prompt(21))
    assert e.begin_load(5) is None  # three blocks, and one for who runs; without what it found three are left
    run(e, 6, prompt(9, 3))
    assert keys_here(e) >= {*keys_of(prompt(9, 1), 0, 1)}
    e.check()
    e.abort(5)
    e.drain()


def brought(setup: Setup) -> StorageEngine:
    """Return an engine that has loaded half a pool for request 2, and has no room for as much for request 3."""
    e = StorageEngine(setup)
    for seed in (2, 3):
        run(e, 100 + seed, prompt(33, seed))
    e.reset_prefix_cache()
    e.add(9, prompt(7, 9), 12)
    e.step()
    for request_id in (2, 3):
        e.add_held(request_id, prompt(33, request_id), 1)
    transfer = e.begin_load(2)
    assert transfer is not None
    assert e.begin_load(3) is None
    e.read(transfer, 3)
    assert e.begin_load(3) is None  # nor what is here of a load that goes on
    e.read(transfer, len(transfer.blocks))
    return e


BROUGHT = pytest.mark.parametrize(
    "setup",
    [DENSE, HYBRID, Setup(((2, 18, 0), (1, 36, 8)), BLOCK, 4, 64, 48, blocks_per_extent=(1, 2))],
    ids=["dense", "hybrid", "shared extents"],
)


@BROUGHT
def test_a_load_does_not_evict_what_another_has_brought(setup: Setup) -> None:
    e = brought(setup)
    assert e.begin_load(3) is None
    e.let_go(2)
    assert e.begin_load(3) is None
    while 2 in e.requests:
        e.step()
    assert e.finished[2].cached == 32
    e.drain()


@BROUGHT
def test_what_was_brought_for_a_request_that_has_gone_makes_room(setup: Setup) -> None:
    e = brought(setup)
    assert e.begin_load(3) is None
    e.abort(2)
    assert e.begin_load(3) is not None
    e.drain()


def test_a_smaller_load_begins_behind_one_without_room() -> None:
    """Three blocks are free, and as many may be evicted for it."""
    e = StorageEngine(DENSE)
    for request_id in (2, 3):
        run(e, 100 + request_id, prompt(33, request_id))
    e.reset_prefix_cache()
    run(e, 1, prompt(13, 1))
    e.add(9, prompt(7, 9), 12)
    e.step()
    for request_id, length in ((2, 33), (3, 33), (4, 17)):
        e.add_held(request_id, prompt(33, min(request_id, 3))[:length], 1)
    transfer = e.begin_load(2)
    assert transfer is not None
    e.read(transfer, len(transfer.blocks))
    assert e.begin_load(3) is None
    assert e.begin_load(4) is not None
    e.drain()


def test_a_load_begins_in_room_that_a_pin_has_left() -> None:
    e = StorageEngine(DENSE)
    for request_id in (2, 3):
        run(e, 100 + request_id, prompt(33, request_id))
    e.reset_prefix_cache()
    run(e, 1, prompt(9, 1))
    pin_id = e.pin(b"", prompt(9, 1), 1.0)
    assert pin_id is not None
    for request_id in (2, 3):
        e.add_held(request_id, prompt(33, request_id), 1)
    transfer = e.begin_load(2)
    assert transfer is not None
    e.read(transfer, len(transfer.blocks))
    assert [e.begin_load(3) for _ in range(2)] == [None, None]
    e.unpin(pin_id)
    assert e.begin_load(3) is not None
    e.drain()


def test_what_was_brought_for_a_request_makes_room_once_it_has_ended() -> None:
    e = brought(DENSE)
    e.let_go(2)
    while 2 in e.requests:
        e.step()
    assert e.begin_load(3) is not None
    e.drain()


def test_what_was_brought_makes_room_for_a_request_that_goes_before() -> None:
    e = brought(DENSE)
    e.let_go(2)
    e.abort(3)
    e.add_held(4, prompt(33, 3), 1, priority=-1)
    assert e.begin_load(4) is not None
    e.drain()


def test_a_prefix_in_storage_that_no_window_can_use_is_not_loaded() -> None:
    e = StorageEngine(HYBRID)
    run(e, 1, prompt(33))
    for key, group in list(e.storage):
        if group == 1:
            del e.storage[key, group]
    e.reset_prefix_cache()
    e.add_held(2, prompt(33))
    assert e.begin_load(2) is None
    e.drain()


def test_only_a_tail_is_loaded_where_the_rest_is_here() -> None:
    """Others need the window's blocks; the full-attention blocks stay."""
    e = StorageEngine(Setup(((1, 64, 0), (1, 6, 8)), BLOCK, 4, 64, 48))
    run(e, 1, prompt(33))
    for i in range(2, 4):
        run(e, i, prompt(17, i))
    e.add_held(9, prompt(33))
    _, resident, num_usable = e.look_up(9)
    assert resident[:, 0].all()
    assert num_usable == 0
    transfer = e.begin_load(9)
    assert transfer is not None
    assert [(index, group) for index, group, _ in transfer.blocks] == [(6, 1), (7, 1)]
    e.read(transfer, 2)
    e.drain()
    assert e.finished[9].cached == 32


def test_blocks_that_are_not_loading_cannot_end_to() -> None:
    e, transfer = loading(prompt(18))
    block = transfer.blocks[0][2]
    zero, one = np.array([0], np.int32), np.array([1], np.int32)
    for groups, blocks in (
        (zero, np.array([15], np.int32)),
        (one, np.array([block], np.int32)),
        (zero, np.array([-1], np.int32)),
        (np.array([0, 0], np.int32), np.array([block, block], np.int32)),
        (zero, np.array([], np.int32)),
    ):
        with pytest.raises(ValueError, match="block"):
            e.scheduler.end_load(groups, blocks, True)
        with pytest.raises(ValueError, match="block"):
            e.scheduler.forget_loading(groups, blocks)
    with pytest.raises(ValueError, match="is_stored"):
        e.scheduler.loadable(2, np.zeros(3, np.uint8), 4)
    with pytest.raises(ValueError, match="num_blocks"):
        e.scheduler.begin_load(2, 99)
    with pytest.raises(ValueError, match="write_policy"):
        e.scheduler.set_write_policy("write_around")  # type: ignore[arg-type]
    e.check()
    e.drain()


def test_a_request_that_has_gone_has_no_keys() -> None:
    e = StorageEngine(DENSE)
    e.scheduler.hold(7)
    e.scheduler.let_go(7)
    keys, resident, num_usable = e.scheduler.look_up(7)
    assert (keys, len(resident), num_usable) == (b"", 0, 0)
    assert not len(e.scheduler.begin_load(7, 0)[0])


# ---- the front of a prompt is computed while storage loads its back ----


def stored(tokens: list[int], setup: Setup = DENSE) -> StorageEngine:
    """Return an engine that has forgotten a prompt, which storage has, and holds it for request 2."""
    e = StorageEngine(setup)
    run(e, 1, tokens)
    e.reset_prefix_cache()
    e.add_held(2, tokens, 1)
    return e


def meeting(tokens: list[int], first: int, setup: Setup = DENSE) -> tuple[StorageEngine, Transfer]:
    """Return an engine in which request 2 computes up to block `first`, while the rest of its prompt is loaded."""
    e = stored(tokens, setup)
    transfer = e.meet(2, first)
    assert transfer is not None
    assert [index for index, group, _ in transfer.blocks if group == 0] == list(range(7, first - 1, -1))
    return e, transfer


def chunk(e: StorageEngine) -> tuple[int, int]:
    """Run the next step, and return the tokens that it computes of its only request."""
    plan = e.schedule()
    assert plan is not None
    [end] = plan.context_lens.tolist()
    e.commit()
    e.check()
    return end - len(plan.token_ids), end


@pytest.mark.parametrize("num_read", [5, 2], ids=["in time", "a part in time"])
def test_a_front_is_computed_while_its_back_is_loaded(num_read: int) -> None:
    """Blocks that are read while the front is computed are not computed; those that come no sooner are."""
    e, transfer = meeting(prompt(33), 3)
    assert e.schedule() is not None
    e.read(transfer, num_read)
    e.commit()
    e.check()
    gap = {5: [], 2: [(12, 20), (20, 24)]}[num_read]
    assert [chunk(e) for _ in gap] == gap
    assert chunk(e) == (32, 33)
    assert e.num_met == 1
    assert e.scheduler.stats().prefix_hit_tokens_total == 4 * num_read
    e.drain()


@pytest.mark.parametrize("num_more", [-20, 20])
def test_a_flow_is_not_charged_for_the_back_that_its_prompt_meets(num_more: int) -> None:
    """The flow goes first for which fewer tokens were computed."""
    e = StorageEngine(Setup(((1, 48, 0),), BLOCK, 1, 16, 96, scheduling_policy="fcfs"))
    run(e, 1, prompt(65))
    e.reset_prefix_cache()
    e.add_held(3, prompt(65), 1, flow=1)
    transfer = e.meet(3, 4)
    assert transfer is not None
    e.read(transfer, 12)
    e.drain()
    assert e.num_met == 1
    run(e, 4, prompt(40, 4), flow=1)
    num_computed = 40 + 17 + 2  # one answer more than the other's
    run(e, 5, prompt(num_computed + num_more, 5), flow=2)
    for request_id, flow in ((6, 1), (7, 2)) if num_more < 0 else ((6, 2), (7, 1)):
        e.add(request_id, prompt(20, request_id), 1, flow=flow)
    plan = e.schedule()
    assert plan is not None
    assert plan.request_ids.tolist() == [7]
    e.drain()


def test_a_front_that_ends_within_a_block_lets_that_block_go_when_it_comes_to_its_back() -> None:
    e, transfer = meeting(prompt(33), 3, Setup(((1, 16, 0),), BLOCK, 4, 6, 48))
    assert [chunk(e) for _ in range(3)] == [(0, 6), (6, 12), (12, 18)]
    e.read(transfer, 5)
    assert chunk(e) == (32, 33)
    assert e.num_met == 1
    e.drain()


@pytest.mark.parametrize("setup", [HYBRID, HOUSE], ids=["a pool each", "one pool"])
@pytest.mark.parametrize(("num_read", "gap"), [(7, []), (5, [(12, 16), (16, 20)])], ids=["in time", "a part in time"])
def test_a_front_meets_a_back_with_the_tail_of_its_windows(
    setup: Setup, num_read: int, gap: list[tuple[int, int]]
) -> None:
    """The last two blocks are read in both groups, those before them in that of full attention alone."""
    e, transfer = meeting(prompt(33), 3, setup)
    assert [block[:2] for block in transfer.blocks] == [(7, 1), (7, 0), (6, 1), (6, 0), (5, 0), (4, 0), (3, 0)]
    assert e.schedule() is not None
    e.read(transfer, num_read)
    e.commit()
    e.check()
    assert [chunk(e) for _ in gap] == gap
    assert chunk(e) == (32, 33)
    assert e.num_met == 1
    e.drain()
    assert run(e, 3, prompt(33)) == 32  # the tail is kept


def test_a_front_meets_a_back_within_the_tail_of_its_windows() -> None:
    """One of the two blocks of the tail is computed, the other one is read."""
    e, transfer = meeting(prompt(33), 7, HYBRID)
    assert [block[:2] for block in transfer.blocks] == [(7, 1), (7, 0)]
    assert e.schedule() is not None
    e.read(transfer, 2)
    e.commit()
    assert chunk(e) == (32, 33)
    assert e.num_met == 1
    e.drain()


def test_a_back_without_the_tail_of_its_windows_is_computed() -> None:
    """All blocks of full attention are read, and the last block of the window is not."""
    e, transfer = meeting(prompt(33), 3, HYBRID)
    assert chunk(e) == (0, 12)
    e.read(transfer, 1, is_loaded=False)
    e.read(transfer, 6)
    assert chunk(e) == (12, 33)
    assert e.num_met == 0
    e.drain()


def test_a_front_needs_room_in_windows_for_a_chunk_alone() -> None:
    """The pool of the window has room for a tail and two chunks of one block, but not for the front."""
    e = stored(prompt(65), Setup(((1, 20, 0), (1, 6, 8)), BLOCK, 4, 4, 80))
    transfer = e.meet(2, 12)
    assert transfer is not None
    chunks = [chunk(e) for _ in range(12)]
    assert chunks == [(4 * i, 4 * i + 4) for i in range(12)]
    e.read(transfer, len(transfer.blocks))
    assert chunk(e) == (64, 65)
    assert e.num_met == 1
    e.drain()


@given(
    setup=st.sampled_from([DENSE, HYBRID, HOUSE, Setup(((1, 16, 0), (2, 9, 8), (1, 12, 5)), BLOCK, 4, 8, 48)]),
    length=st.integers(9, 40),
    first=st.integers(1, 9),
    reads=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_wherever_a_front_meets_its_back_what_it_reads_is_right(
    setup: Setup, length: int, first: int, reads: list[tuple[int, int]]
) -> None:
    """After each step so many blocks are read, one time in ten in vain. The engine checks all that is read of KV."""
    e = stored(prompt(length), setup)
    transfer = e.meet(2, first)
    for num_read, dice in reads:
        e.step()
        e.check()
        if transfer is not None and transfer.blocks and num_read:
            e.read(transfer, num_read, is_loaded=dice > 0)
            e.check()
    e.drain()
    e.check()
    assert e.finished[2].reason == 2
    assert run(e, 3, prompt(length)) == (length - 1) // BLOCK * BLOCK


def test_a_front_leaves_more_to_storage_that_was_faster() -> None:
    """Storage reads eight blocks while two are computed: of the ten that are left three are computed, not five."""
    e = stored(prompt(81), LARGE)
    transfer = e.meet(2, 2)
    assert transfer is not None
    assert e.schedule() is not None
    e.read(transfer, 8)
    e.commit()
    assert chunk(e) == (8, 8 + 3 * BLOCK)
    e.read(transfer, 7)
    assert chunk(e) == (80, 81)
    assert e.num_met == 1
    e.give_up(transfer)
    e.drain()


def timed_meeting(setup: Setup, num_read: int, step_s: float, front_s: float) -> tuple[StorageEngine, Transfer]:
    """Return an engine that has computed blocks 0 and 1 of a prompt of 20 while storage read some of the others.

    A step is expected to take a second for each token and `step_s`; the first one took `front_s`.
    """
    e = stored(prompt(81), setup)
    e.scheduler.remember_step_time([1.0, 0, 0, 0, 0, step_s])
    transfer = e.meet(2, 2)
    assert transfer is not None
    e.unsure.add(2)  # its next part is not the share that the engine checks
    assert chunk(e) == (0, 2 * BLOCK)
    e.now_s = front_s
    e.read(transfer, num_read)
    return e, transfer


@pytest.mark.parametrize("front_s", [8.0, 16.0], ids=["as expected", "slower"])
def test_a_front_computes_what_takes_no_longer_than_reading_the_rest(front_s: float) -> None:
    """A block takes four seconds, or eight, in which storage reads four: two of ten, while it reads eight."""
    e, transfer = timed_meeting(LARGE, 8, step_s=0.001, front_s=front_s)
    assert chunk(e) == (8, 8 + 2 * BLOCK)
    e.read(transfer, 8)
    assert chunk(e) == (80, 81)
    e.give_up(transfer)
    e.drain()


def test_a_front_knows_that_tails_of_windows_take_longer_to_read() -> None:
    """Storage has read 16 of 30 bytes but only 4 of 18 blocks: it reads 13 more while one of 14 is computed."""
    e, transfer = timed_meeting(Setup(((1, 48, 0), (6, 48, 8)), BLOCK, 4, 128, 96), 6, step_s=0.001, front_s=8.0)
    assert [block[:2] for block in transfer.blocks[:2]] == [(15, 0), (14, 0)]
    assert chunk(e) == (8, 8 + BLOCK)
    e.drain()


def test_a_front_waits_for_what_is_read_sooner_than_it_could_be_computed() -> None:
    """Two blocks are missing, which storage reads in a second and a half; one of them takes eight to compute."""
    e, transfer = timed_meeting(LARGE, 16, step_s=4.0, front_s=12.0)
    assert e.schedule() is None
    e.now_s += 1.5
    e.read(transfer, 2)
    assert chunk(e) == (80, 81)
    assert e.num_met == 1
    e.drain()


def test_a_front_does_not_wait_for_storage_that_stalls() -> None:
    e, _ = timed_meeting(LARGE, 16, step_s=4.0, front_s=12.0)
    assert e.schedule() is None
    e.now_s = 200.0
    assert chunk(e) == (8, 8 + BLOCK)
    e.drain()


def test_who_computes_its_front_takes_no_more_blocks_than_it_needs() -> None:
    """The pool has room for the prompt once, not for its back twice."""
    e, transfer = meeting(prompt(33), 4, Setup(((1, 10, 0),), BLOCK, 4, 64, 39))
    assert chunk(e) == (0, 16)
    stats = e.scheduler.stats().groups[0]
    assert (stats.used, stats.loading) == (4, 4)
    e.read(transfer, 4)
    assert chunk(e) == (32, 33)
    e.drain()
    assert e.scheduler.stats().num_preemptions_total == 0


def test_a_back_leaves_room_for_its_front() -> None:
    """Eight blocks are free: as many as the prompt needs of them, and none for the next token of who runs."""
    e = stored(prompt(33), Setup(((1, 13, 0),), BLOCK, 4, 64, 48))
    e.add(3, prompt(20, 3), 8)
    e.step()
    assert e.scheduler.stats().groups[0].free == 8
    assert e.begin_load(2, first=3) is None
    e.abort(3)
    assert e.begin_load(2, first=3) is not None
    e.drain()


def test_who_computes_its_front_begins_when_there_is_room_for_what_comes_behind_its_back() -> None:
    """Storage has three blocks in the middle of the prompt: two lie before them, and four behind.

    Once the three are here, they are no room for the others.
    """
    e = stored(prompt(33), Setup(((1, 13, 0),), BLOCK, 4, 64, 48))
    e.add(3, prompt(20, 3), 8)
    e.step()
    transfer = e.meet(2, 2, max_blocks=5)
    assert transfer is not None
    assert e.scheduler.stats().groups[0].free == 5
    for is_here in (False, True):
        plan = e.schedule()
        assert plan is not None
        assert plan.request_ids.tolist() == [3]
        e.commit()
        if not is_here:
            e.read(transfer, 3)
    e.drain()
    assert e.scheduler.stats().num_preemptions_total == 0


def test_who_has_passed_its_back_computes_on() -> None:
    """The blocks that it has passed are storage's until that lets go of them."""
    e, transfer = meeting(prompt(33), 4)
    chunks = [chunk(e) for _ in range(5)]
    assert chunks == [(0, 16), (16, 24), (24, 28), (28, 32), (32, 33)]
    assert e.finished[2].reason == 2
    assert e.scheduler.stats().groups[0].loading == 4
    e.give_up(transfer)
    e.drain()
    assert e.num_met == 0
    assert run(e, 3, prompt(33)) == 32


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["failed", "given up"])
def test_a_back_that_does_not_come_is_computed(is_forgotten: bool) -> None:
    e, transfer = meeting(prompt(33), 4)
    assert chunk(e) == (0, 16)
    if is_forgotten:
        e.give_up(transfer)
    else:
        e.read(transfer, 4, is_loaded=False)
    assert chunk(e) == (16, 33)
    e.drain()


def test_what_came_before_a_failure_is_used() -> None:
    e, transfer = meeting(prompt(33), 2)
    assert chunk(e) == (0, 8)
    e.read(transfer, 3)
    e.read(transfer, 3, is_loaded=False)
    assert chunk(e) == (8, 20)
    assert chunk(e) == (32, 33)
    e.drain()


def test_a_step_ahead_waits_for_the_step_that_computes_the_front() -> None:
    """Others go on."""
    e, transfer = meeting(prompt(33), 3)
    e.add(3, prompt(5, 3), 4)
    assert e.schedule() is not None
    e.read(transfer, 5)
    ahead = e.schedule()
    assert ahead is not None
    assert ahead.request_ids.tolist() == [3]
    e.commit()
    assert e.schedule() is not None
    assert e.plans[-1].met_request_ids.tolist() == [2]
    assert e.plans[-1].met_blocks.tolist() == [[3, 8]]
    e.drain()


def test_a_request_that_is_gone_leaves_its_back_to_others() -> None:
    e, transfer = meeting(prompt(33), 4)
    chunk(e)
    e.abort(2)
    e.check()
    e.read(transfer, 4)
    assert run(e, 3, prompt(33)) == 32


def test_who_is_preempted_finds_its_back_when_it_begins_again() -> None:
    """The pool is full when the other request needs a block, and the last to come makes room."""
    e = stored(prompt(33), Setup(((1, 13, 0),), BLOCK, 4, 64, 48))
    e.add(3, prompt(7, 3), 8)
    e.step()
    transfer = e.meet(2, 2)
    assert transfer is not None
    while e.scheduler.stats().num_preemptions_total == 0 and e.step():
        pass
    e.read(transfer, 6)
    e.drain()
    assert e.finished[2].reason == 2


def test_who_begins_again_computes_towards_no_back() -> None:
    """Its first step fails while storage reads; what is here when a prompt begins counts, for it as for others."""
    e, transfer = meeting(prompt(33), 3)
    assert e.schedule() is not None
    e.abandon()
    e.backs.clear()
    assert chunk(e) == (0, 33)
    e.read(transfer, 5)
    e.drain()
    assert e.num_met == 0


@pytest.mark.parametrize(
    "setup",
    [Setup(((1, 16, 8),), BLOCK, 4, 64, 48), Setup(((1, 16, 0),), BLOCK, 4, 64, 48, enable_chunked_prefill=False)],
    ids=["windows alone", "whole"],
)
def test_where_nothing_can_be_met_requests_are_let_go(setup: Setup) -> None:
    e = stored(prompt(33), setup)
    assert not e.scheduler.can_meet
    e.scheduler.meet(2, 8)
    e.held.clear()
    assert chunk(e) == (0, 33)
    e.drain()


def test_a_back_has_keys() -> None:
    e = stored(prompt(33))
    assert e.scheduler.can_meet
    with pytest.raises(ValueError, match="num_blocks"):
        e.scheduler.meet(2, 9)
    with pytest.raises(ValueError, match="first"):
        e.scheduler.begin_load(2, 4, 5)
    e.scheduler.meet(7, 1)
    assert (e.scheduler.num_planned_blocks(7), e.scheduler.num_planned_blocks(2)) == (0, 0)
    e.drain()
