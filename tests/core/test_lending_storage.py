"""Storage below an engine that borrows and lends: single cases, and any order of events."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from lending_oracle import BorrowSetup, LendingSetup
from lending_storage_oracle import KEY_BYTES, StoringEngine, Transfer
from test_lending_states import SETUPS, Lending

from swiftkv import _core
from swiftkv.policies import WritePolicy

BORROWS = LendingSetup(((3, 8, 0),), (BorrowSetup(0, 4, 2),))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def borrowing(setup: LendingSetup = BORROWS, write_policy: WritePolicy = "write_through") -> StoringEngine:
    """Return an engine that holds everything that it may borrow."""
    e = StoringEngine(setup, random.Random(0), write_policy)
    for link, borrowed in enumerate(setup.borrow):
        e.borrow(link, borrowed.num_extents)
    return e


def run(e: StoringEngine, request_id: int, tokens: list[int], max_tokens: int = 2) -> None:
    e.add(request_id, tokens, max_tokens)
    while e.schedule():
        e.commit()
        e.check()
        e.store()


def test_blocks_that_lie_with_a_lender_are_stored_from_there() -> None:
    """The prompt is longer than the pool."""
    e = borrowing()
    run(e, 1, prompt(41))
    assert len(e.storage) == 10
    assert e.num_stored_from_lenders > 0
    assert e.scheduler.num_dropped_offers() == 0


def test_while_lenders_have_room_nothing_is_written_back() -> None:
    """Three of sixteen blocks are the layer-stream cache, and the second prompt takes the last one that is free."""
    e = borrowing(write_policy="write_back")
    run(e, 1, prompt(33))
    assert not e.storage
    run(e, 2, prompt(17, 1))
    keys = _core.block_keys(b"", np.array(prompt(33), np.int32), BORROWS.block_size)
    assert [key for key, _ in e.storage] == [keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in (7, 6, 5, 4)]


def test_what_a_lender_took_along_comes_back_from_storage() -> None:
    e = borrowing()
    run(e, 1, prompt(25))
    run(e, 2, prompt(25, 1))
    e.lose(0)
    assert not e.schedule()  # the layer-stream cache is of no use any more
    e.add_held(3, prompt(25), 2)
    transfer = e.begin_load(3)
    assert transfer is not None
    e.borrow(0, 4)
    e.read(transfer, len(transfer.blocks))
    e.let_go(3)
    before = e.scheduler.stats().prefix_hit_tokens_total
    e.drain()
    assert e.scheduler.stats().prefix_hit_tokens_total == before + 24


def test_of_a_prompt_that_is_longer_than_the_pool_so_much_is_loaded_as_the_pool_holds() -> None:
    """Three of the eight blocks are the layer-stream cache for the eight that are borrowed, of three layers each."""
    e = borrowing()
    run(e, 1, prompt(44))
    e.reset_prefix_cache()
    e.add_held(2, prompt(44), 2)
    transfer = e.begin_load(2)
    assert transfer is not None
    assert len(transfer.blocks) == 5
    e.read(transfer, 5)
    e.drain()
    assert e.scheduler.stats().prefix_hit_tokens_total == 20


def test_nothing_is_lent_or_returned_while_storage_copies() -> None:
    e = StoringEngine(LendingSetup(((3, 8, 0),), (BorrowSetup(0, 4, 2),), ((0, 4, 2),)), random.Random(0))
    e.borrow(0, 4)
    run(e, 1, prompt(20))
    e.add(2, prompt(20, 1), 2)
    e.schedule()
    e.commit()
    e.recall(0, 4)
    keys, *_ = e.scheduler.take_offers(1)
    assert keys
    assert not len(e.scheduler.lend(0, 4))
    assert not len(e.scheduler.take_returned(0))
    e.scheduler.end_copying()
    assert len(e.scheduler.take_returned(0))


def test_nothing_is_loaded_into_blocks_that_a_step_still_copies_from() -> None:
    """A block that is spilled is free as soon as the step is planned, and is read when it runs."""
    e = borrowing()
    run(e, 1, prompt(21))
    e.reset_prefix_cache()
    run(e, 2, prompt(21, 2))
    e.add_held(3, prompt(21), 2)
    e.add(4, prompt(40, 3), 2)
    assert e.schedule()
    assert e.planned[-1].plan.has_copies
    assert e.begin_load(3) is None
    e.drain()


def test_a_load_evicts_blocks_beside_a_step_that_copies_none() -> None:
    e = StoringEngine(LendingSetup(((3, 12, 0),), (BorrowSetup(0, 4, 2),)), random.Random(0))
    run(e, 1, prompt(25))
    run(e, 2, prompt(25, 1))
    e.add(3, prompt(9, 2), 8)
    assert e.schedule()
    e.add_held(4, prompt(25), 2)
    transfer = e.begin_load(4)
    assert transfer is not None
    assert e.planned
    e.read(transfer, len(transfer.blocks))
    e.let_go(4)
    e.drain()


def test_a_back_that_goes_to_a_lender_is_computed() -> None:
    """Another prompt takes its blocks before the request comes to it, and nobody has counted room to stage them in."""
    e = borrowing()
    run(e, 1, prompt(17))
    e.reset_prefix_cache()
    e.add_held(2, prompt(17), 2)
    e.meet(2, 2)
    assert e.schedule()
    e.read(e.transfers[0], 2)
    e.add(3, prompt(12, 3), 2)
    assert e.schedule()
    assert e.planned[-1].plan.request_ids.tolist() == [3]
    assert len(e.planned[-1].plan.copies(0, "spill", 0)) > 0
    e.commit()
    e.commit()
    assert e.schedule()
    plan = e.planned[-1].plan
    assert sorted(zip(plan.request_ids.tolist(), np.diff(plan.query_starts).tolist(), strict=True)) == [(2, 9), (3, 1)]
    e.drain()


class LendingWithStorage(Lending):
    """All that happens to an engine that lends and borrows, and all that storage does beside it."""

    engine: StoringEngine

    @initialize(
        setup=st.sampled_from([s for s in SETUPS if s.enable_prefix_caching]),
        seed=st.integers(0, 99),
        policy=st.sampled_from(["write_through", "write_back"]),
    )
    def start(self, setup: LendingSetup, seed: int, policy: WritePolicy) -> None:
        self.engine = StoringEngine(setup, random.Random(seed), policy)
        self.next_id = 0

    @rule(length=st.integers(1, 40), seed=st.integers(0, 2), max_tokens=st.integers(1, 12))
    def add_held(self, length: int, seed: int, max_tokens: int) -> None:
        length = min(length, self.engine.setup.max_model_len - 2)
        rng = random.Random(seed)
        self.engine.add_held(self.next_id, [rng.randrange(3) for _ in range(length)], max_tokens)
        self.next_id += 1

    @precondition(lambda self: not self.engine.planned)
    @rule(count=st.integers(1, 12))
    def steps_and_stores(self, count: int) -> None:
        for _ in range(count):
            if not self.engine.schedule():
                return
            self.engine.commit()
            self.engine.store()

    @rule(max_blocks=st.integers(0, 8))
    def store(self, max_blocks: int) -> None:
        self.engine.store(max_blocks)

    @precondition(lambda self: self.engine.waiting)
    @rule(pick=st.integers(0, 99), max_blocks=st.integers(1, 30))
    def begin_load(self, pick: int, max_blocks: int) -> None:
        self.engine.begin_load(self._held(pick), max_blocks)

    @precondition(lambda self: self.engine.waiting and self.engine.scheduler.can_meet)
    @rule(pick=st.integers(0, 99), first=st.integers(0, 12))
    def meet(self, pick: int, first: int) -> None:
        self.engine.meet(self._held(pick), first)

    @precondition(lambda self: self.engine.transfers)
    @rule(pick=st.integers(0, 99), num_blocks=st.integers(1, 8), is_loaded=st.booleans())
    def read(self, pick: int, num_blocks: int, is_loaded: bool) -> None:
        self.engine.read(self.engine.transfers[pick % len(self.engine.transfers)], num_blocks, is_loaded)

    @precondition(lambda self: any(not transfer.is_forgotten for transfer in self.engine.transfers))
    @rule(pick=st.integers(0, 99))
    def give_up(self, pick: int) -> None:
        waited_for: list[Transfer] = [transfer for transfer in self.engine.transfers if not transfer.is_forgotten]
        self.engine.give_up(waited_for[pick % len(waited_for)])

    @precondition(lambda self: self.engine.waiting)
    @rule(pick=st.integers(0, 99))
    def let_go(self, pick: int) -> None:
        self.engine.let_go(self._held(pick))

    def _held(self, pick: int) -> int:
        held = sorted(self.engine.waiting)
        return held[pick % len(held)]


LendingWithStorage.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestLendingWithStorage = LendingWithStorage.TestCase


class LongLendingWithStorage(LendingWithStorage):
    """The same for longer."""


TestLendingWithStorageForLong = pytest.mark.slow(pytest.mark.timeout(0)(LongLendingWithStorage.TestCase))
TestLendingWithStorageForLong.settings = settings(max_examples=5_000, stateful_step_count=80, deadline=None)
