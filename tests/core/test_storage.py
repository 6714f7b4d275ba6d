"""Blocks go down to storage and come up again, and calls that mean nothing are refused."""

from __future__ import annotations

import numpy as np
import pytest
from naive_scheduler import Setup
from storage_oracle import StorageEngine, Transfer

from swiftkv import _core

BLOCK = 4
DENSE = Setup(((1, 16, 0),), BLOCK, 4, 64, 48)
HYBRID = Setup(((1, 16, 0), (1, 16, 8)), BLOCK, 4, 64, 48)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def run(e: StorageEngine, request_id: int, tokens: list[int], max_tokens: int = 1) -> int:
    """Return how many tokens of a request were found here; it runs to its end, and what is on offer is stored."""
    e.add(request_id, tokens, max_tokens)
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
        e.scheduler.set_write_policy("write_back")  # type: ignore[arg-type]
    e.check()
    e.drain()


def test_a_request_that_has_gone_has_no_keys() -> None:
    e = StorageEngine(DENSE)
    e.scheduler.hold(7)
    e.scheduler.let_go(7)
    keys, resident, num_usable = e.scheduler.look_up(7)
    assert (keys, len(resident), num_usable) == (b"", 0, 0)
    assert not len(e.scheduler.begin_load(7, 0)[0])
