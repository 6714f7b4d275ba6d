"""Lending and borrowing under any order of events: hypothesis drives, `lending_oracle` carries out and checks."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lending_oracle import BorrowSetup, LendingEngine, LendingSetup

from swiftkv import _core

SETUPS = [
    LendingSetup(((3, 8, 0),), (BorrowSetup(0, 4, 2),)),
    LendingSetup(((3, 8, 0),), (BorrowSetup(0, 4, 2),), stream_buffers=1),
    # Three lenders of different shapes, one of which wastes the end of its extents.
    LendingSetup(
        ((2, 6, 0),), (BorrowSetup(0, 3, 1), BorrowSetup(0, 2, 3, 40), BorrowSetup(0, 5, 1)), stream_buffers=2
    ),
    # More is lent than the pool has layer blocks: N_RC = 0, and there is little to stage in.
    LendingSetup(((2, 3, 0),), (BorrowSetup(0, 10, 1),), max_model_len=24, max_num_seqs=3),
    # Lends and borrows at once.
    LendingSetup(((2, 10, 0),), (BorrowSetup(0, 4, 2),), lend=((0, 5, 2), (0, 3, 3)), stream_buffers=2),
    # A hybrid: one group of full attention, one with a window; each borrows.
    LendingSetup(((2, 8, 0), (1, 12, 6)), (BorrowSetup(0, 4, 2), BorrowSetup(1, 3, 3)), max_model_len=40),
    # A window that needs what is lent.
    LendingSetup(((2, 8, 0), (3, 3, 6)), (BorrowSetup(1, 3, 2),), max_num_batched_tokens=24, max_model_len=24),
    # Groups that share extents: of two blocks of the first and three of the second, or of one and two.
    LendingSetup(
        ((3, 14, 0), (2, 21, 6)),
        (BorrowSetup(0, 5, 2), BorrowSetup(1, 3, 2)),
        max_model_len=40,
        blocks_per_extent=(2, 3),
    ),
    LendingSetup(
        ((2, 9, 0), (1, 18, 3)),
        (BorrowSetup(0, 8, 1),),
        ((0, 9, 1),),
        block_size=1,
        max_model_len=10,
        blocks_per_extent=(1, 2),
    ),
    LendingSetup(((3, 8, 0),), (BorrowSetup(0, 4, 2),), enable_chunked_prefill=False),
    LendingSetup(((3, 8, 0),), (BorrowSetup(0, 4, 2),), enable_prefix_caching=False),
]


class Lending(RuleBasedStateMachine):
    @initialize(setup=st.sampled_from(SETUPS), seed=st.integers(0, 99))
    def start(self, setup: LendingSetup, seed: int) -> None:
        self.engine = LendingEngine(setup, random.Random(seed))
        self.next_id = 0
        self.conversations: list[list[int]] = []

    def _link(self, pick: int) -> int:
        return pick % len(self.engine.setup.borrow)

    @rule(
        length=st.integers(1, 40),
        seed=st.integers(0, 2),
        max_tokens=st.integers(1, 12),
        tier=st.sampled_from([0, 0, 1, 2]),
    )
    def add(self, length: int, seed: int, max_tokens: int, tier: int) -> None:
        length = min(length, self.engine.setup.max_model_len - 2)
        prompt = [random.Random(seed).randrange(3) for _ in range(length)]
        self.engine.add(self.next_id, prompt, max_tokens, priority=tier * _core.PRIORITIES_PER_CLASS)
        self.next_id += 1

    @precondition(lambda self: self.engine.requests)
    @rule(pick=st.integers(0, 9))
    def abort(self, pick: int) -> None:
        ids = sorted(self.engine.requests)
        self.engine.abort(ids[pick % len(ids)])

    @precondition(lambda self: len(self.engine.planned) < 2)
    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.planned)
    @rule()
    def commit(self) -> None:
        self.engine.commit()

    @precondition(lambda self: len(self.engine.planned) < 2)
    @rule(count=st.integers(1, 6))
    def steps_ahead(self, count: int) -> None:
        for _ in range(count):
            self.engine.step_ahead()

    @precondition(lambda self: not self.engine.planned)
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if not self.engine.schedule():
                return
            self.engine.commit()

    @precondition(lambda self: self.engine.planned)
    @rule()
    def abandon(self) -> None:
        self.engine.abandon()

    @rule(pick=st.integers(0, 9), count=st.integers(1, 5))
    def borrow(self, pick: int, count: int) -> None:
        self.engine.borrow(self._link(pick), count)

    @rule(pick=st.integers(0, 9), count=st.integers(1, 5))
    def recall(self, pick: int, count: int) -> None:
        self.engine.recall(self._link(pick), count)

    @rule()
    def take_returned(self) -> None:
        self.engine.take_returned()

    @rule(pick=st.integers(0, 9))
    def lose(self, pick: int) -> None:
        self.engine.lose(self._link(pick))

    @precondition(lambda self: self.engine.setup.lend)
    @rule(pick=st.integers(0, 9), count=st.integers(1, 3))
    def lend(self, pick: int, count: int) -> None:
        self.engine.lend(pick % len(self.engine.setup.lend), count)

    @precondition(lambda self: self.engine.setup.lend)
    @rule(pick=st.integers(0, 9), count=st.integers(1, 3))
    def take_back(self, pick: int, count: int) -> None:
        self.engine.take_back(pick % len(self.engine.setup.lend), count)

    @rule(length=st.integers(1, 40), seed=st.integers(0, 2), max_share=st.sampled_from([0.25, 0.5, 1.0]))
    def pin(self, length: int, seed: int, max_share: float) -> None:
        """A beginning of what `add` asks for."""
        self.engine.pin([random.Random(seed).randrange(3) for _ in range(length)], max_share)

    @precondition(lambda self: self.engine.num_pins)
    @rule(pick=st.integers(0, 99))
    def unpin(self, pick: int) -> None:
        self.engine.unpin(pick % self.engine.num_pins)

    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()


Lending.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestLending = Lending.TestCase
