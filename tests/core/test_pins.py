"""The promises of a pin, one per test; the histories of the state machines pin and unpin as well."""

from __future__ import annotations

import random

import numpy as np
import pytest
from kv_oracle import Engine
from lending_oracle import BorrowSetup, LendingEngine, LendingSetup
from naive_scheduler import Setup

SIZE = 4
SETUP = Setup(((1, 8, 0),), SIZE, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100) for _ in range(length)]


def run(engine: Engine, request_id: int, tokens: list[int]) -> int:
    """Answer a prompt with one token, and return how many of its tokens were cached."""
    engine.add(request_id, tokens, 1)
    engine.drain()
    engine.check()
    return engine.finished[request_id].cached


def test_what_is_pinned_outlives_everything_that_is_used_later() -> None:
    engine = Engine(SETUP)
    pinned, other = prompt(9, 1), prompt(9, 2)
    run(engine, 1, pinned)
    run(engine, 2, other)
    assert engine.pin(b"", pinned[:8], max_share=0.25) is not None
    for i in range(10):
        run(engine, 10 + i, prompt(20, 10 + i))
    assert run(engine, 30, other) == 0
    assert run(engine, 31, pinned) == 8
    engine.reset_prefix_cache()
    assert run(engine, 32, pinned) == 8


def test_what_was_unpinned_is_evicted_like_the_rest() -> None:
    engine = Engine(SETUP)
    run(engine, 1, prompt(9, 1))
    pin_id = engine.pin(b"", prompt(9, 1), max_share=1.0)
    assert pin_id is not None
    engine.unpin(pin_id)
    engine.unpin(pin_id)  # which does nothing
    for i in range(3):
        run(engine, 10 + i, prompt(20, 10 + i))
    assert run(engine, 20, prompt(9, 1)) == 0
    assert [group.pinned for group in engine.scheduler.stats().groups] == [0]


def test_pins_take_no_more_than_their_share_and_a_shared_block_counts_once() -> None:
    engine = Engine(SETUP)
    shared = prompt(8, 1)
    first, second, third = ([*shared, *prompt(5, seed)] for seed in (2, 3, 4))
    for i, tokens in enumerate((first, second, third)):
        run(engine, i, tokens)
    assert engine.pin(b"", first, max_share=0.25) is None  # three blocks of eight
    assert engine.pin(b"", first, max_share=0.5) is not None
    assert engine.pin(b"", second, max_share=0.5) is not None
    assert engine.pin(b"", third, max_share=0.5) is None
    assert [group.pinned for group in engine.scheduler.stats().groups] == [4]
    engine.check()


def test_a_block_is_pinned_until_the_last_pin_that_holds_it_ends() -> None:
    engine = Engine(Setup(((1, 16, 0), (1, 16, 8)), SIZE, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64))
    shared = prompt(12, 1)
    pins = []
    for i, own in enumerate((5, 9)):
        run(engine, i, [*shared, *prompt(own, i + 2)])
        pins.append(engine.pin(b"", [*shared, *prompt(own, i + 2)], max_share=1.0))

    def pinned() -> list[int]:
        return [group.pinned for group in engine.scheduler.stats().groups]

    assert pinned() == [6, 4]  # of the window two blocks each
    assert engine.pin(b"", shared, max_share=0.1) is None
    assert pinned() == [6, 4]
    for pin_id, left in zip(pins, ([5, 2], [0, 0]), strict=True):
        assert pin_id is not None
        engine.unpin(pin_id)
        assert pinned() == left
        engine.check()


def test_nothing_is_pinned_of_what_is_not_here() -> None:
    engine = Engine(SETUP)
    run(engine, 1, prompt(13, 1))
    assert engine.pin(b"other salt", prompt(13, 1), max_share=1.0) is None
    assert engine.pin(b"", prompt(13, 2), max_share=1.0) is None
    pin_id = engine.pin(b"", prompt(13, 1) + prompt(8, 3), max_share=1.0)
    assert pin_id is not None
    assert len(engine.pins[pin_id]) == 3 * 32
    engine.begin_loading(b"", prompt(4, 4))
    assert engine.pin(b"", prompt(4, 4), max_share=1.0) is None
    with pytest.raises(ValueError, match="already known"):
        engine.scheduler.pin(pin_id, b"", 1.0)


@pytest.mark.parametrize("is_chunked", [True, False])
def test_pins_give_way_to_a_request_that_needs_their_blocks_to_run_alone(is_chunked: bool) -> None:
    """The oldest first, and no more than it needs; not to two that can run one after the other."""
    setup = Setup(((1, 8, 0),), SIZE, 4, 64, 32, enable_chunked_prefill=is_chunked)
    engine = Engine(setup)
    for seed in (1, 2):
        run(engine, seed, prompt(9, seed))
        assert engine.pin(b"", prompt(9, seed), max_share=1.0) is not None
    engine.add(10, prompt(12, 10), 4)
    engine.add(11, prompt(12, 11), 4)
    engine.drain()
    assert sorted(engine.pins) == [0, 1]
    run(engine, 12, prompt(22, 12))
    assert sorted(engine.pins) == [1]
    assert run(engine, 13, prompt(9, 2)) == 8


def test_a_request_that_grows_beyond_what_pins_leave_ends_them() -> None:
    engine = Engine(SETUP)
    run(engine, 1, prompt(17, 1))
    assert engine.pin(b"", prompt(17, 1), max_share=1.0) is not None
    engine.add(2, prompt(4, 2), 26)
    engine.drain()
    assert engine.pins == {}
    assert engine.scheduler.stats().num_preemptions_total == 0


def test_a_lender_gets_back_what_it_lent_whatever_is_pinned() -> None:
    setup = LendingSetup(((2, 8, 0),), (BorrowSetup(0, 8, 1),), max_num_batched_tokens=64, max_model_len=40)
    e = LendingEngine(setup, random.Random(0))
    e.borrow(0, 8)
    for seed in range(3):
        e.add(seed, prompt(21, seed), max_tokens=1)
        e.drain()
    assert any(e.scheduler.resident_blocks()[2].tolist())
    kept = [pin_id for seed in range(3) if (pin_id := e.pin(prompt(21, seed), max_share=1.0)) is not None]
    assert kept
    e.check()
    e.recall(0, 4)
    e.drain()
    e.check()
    e.lose(0)
    e.check()
    assert sorted(e.pins) == kept


def test_an_extent_with_a_pinned_block_is_not_lent() -> None:
    borrow = (BorrowSetup(0, 1, 1),)  # which nobody lends
    setup = LendingSetup(((1, 8, 0),), borrow, lend=((0, 8, 1),), max_num_batched_tokens=64, max_model_len=32)
    e = LendingEngine(setup, random.Random(0))
    e.add(1, prompt(13, 1), max_tokens=1)
    e.drain()
    assert e.pin(prompt(13, 1)[:8], max_share=0.25) is not None
    e.lend(0, 8)
    assert len(e.lent[0]) == 6
    assert e.scheduler.take_demand()[0].total_now == 2
    e.take_back(0, 6)
    e.check()


def test_a_pin_without_whole_blocks_keeps_nothing() -> None:
    engine = Engine(SETUP)
    assert engine.pin(b"", prompt(3, 1), max_share=1.0) is None
    with pytest.raises(ValueError, match="32 bytes"):
        engine.scheduler.pin(9, b"short", 1.0)
    assert engine.scheduler.take_lost_pins().tolist() == np.array([]).tolist()


def test_a_pin_stays_while_the_room_that_a_request_wants_is_being_loaded() -> None:
    """The request waits for the load to end, and then for nothing."""
    engine = Engine(SETUP)
    run(engine, 1, prompt(9, 1))
    assert engine.pin(b"", prompt(9, 1), max_share=1.0) is not None
    for seed in range(2, 6):
        engine.begin_loading(b"", prompt(4, seed))
    assert len(engine.loads) == 4
    engine.add(2, prompt(18, 9), 1)
    assert engine.schedule() is None
    assert sorted(engine.pins) == [0]
    engine.drain()
    assert sorted(engine.pins) == [0]
