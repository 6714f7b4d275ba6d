"""Lending and borrowing in pools, over links and with windows that are drawn at random, for as many steps as it takes.

`test_lending_states` has hypothesis shrink what fails in a few chosen setups; here the setups are random too, and runs
are long. A seed is a run, and `Run(seed).go()` does it again.
"""

from __future__ import annotations

import random

import pytest
from lending_oracle import BorrowSetup, LendingEngine, LendingSetup

SEEDS_PER_TEST = 200
LONGEST_PROMPT = 40
TOKENS = 3  # so few that prompts have prefixes in common


def drawn_setup(rng: random.Random) -> LendingSetup:
    """May be one that the scheduler refuses."""
    groups = []
    for group in range(rng.choice([1, 1, 1, 2])):
        has_window = rng.random() < (0.2 if group == 0 else 0.8)
        groups.append((rng.randint(1, 4), rng.randint(3, 16), rng.choice([4, 6, 9, 12]) if has_window else 0))
    borrow = [
        BorrowSetup(rng.randrange(len(groups)), rng.randint(1, 8), rng.randint(1, 4), rng.choice([0, 0, 40]))
        for _ in range(rng.randint(1, 4))
    ]
    lend = []
    for _ in range(rng.choice([0, 0, 1, 2])):
        group, blocks_per_extent = rng.randrange(len(groups)), rng.randint(1, 3)
        lend.append((group, groups[group][1] // blocks_per_extent, blocks_per_extent))
    return LendingSetup(
        tuple(groups),
        tuple(borrow),
        tuple(lend),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.choice([4, 8, 16, 40]),
        max_model_len=rng.choice([16, 24, 32, 48]),
        enable_prefix_caching=rng.random() < 0.85,
        enable_chunked_prefill=rng.random() < 0.8,
        stream_buffers=rng.choice([1, 2]),
    )


class Run:
    """One engine, and what happens to it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine = self._engine()
        self.prompts: list[list[int]] = []

    def _engine(self) -> LendingEngine:
        while True:
            try:
                return LendingEngine(drawn_setup(self.rng), self.rng)
            except ValueError:
                continue

    def go(self) -> None:
        events = {
            self.add: 12,
            self.abort: 4,
            self.step: 37,
            self.abandon: 2,
            self.steps: 8,
            self.borrow: 10,
            self.recall: 8,
            self.take_returned: 5,
            self.lose: 2,
            self.lend: 5,
            self.take_back: 4,
            self.forget_prefixes: 1,
        }
        for event in self.rng.choices([*events], [*events.values()], k=self.rng.randint(20, 150)):
            event()
            self.engine.check()
        self.engine.drain()
        self.engine.check()

    # Requests.

    def add(self) -> None:
        """A prompt, or one that continues an earlier one."""
        rng, engine = self.rng, self.engine
        begun = rng.choice(self.prompts) if self.prompts and rng.random() < 0.5 else []
        num_new = rng.randint(1, 8 if begun else LONGEST_PROMPT)
        prompt = [*begun, *(rng.randrange(TOKENS) for _ in range(num_new))][: engine.setup.max_model_len - 2]
        engine.add(len(self.prompts), prompt, rng.randint(1, 12))
        self.prompts.append(prompt)

    def abort(self) -> None:
        if self.engine.requests:
            self.engine.abort(self.rng.choice(sorted(self.engine.requests)))

    # Steps, of which two may be in progress.

    def step(self) -> None:
        engine = self.engine
        if not engine.planned or (len(engine.planned) == 1 and self.rng.random() < 0.6):
            engine.schedule()
        else:
            engine.commit()

    def steps(self) -> None:
        for _ in range(self.rng.randint(1, 9)):
            if len(self.engine.planned) < 2:
                self.engine.step_ahead()

    def abandon(self) -> None:
        if self.engine.planned:
            self.engine.abandon()

    # Extents.

    def borrow(self) -> None:
        self.engine.borrow(self._borrow_link(), self.rng.randint(1, 5))

    def recall(self) -> None:
        self.engine.recall(self._borrow_link(), self.rng.randint(1, 4))

    def take_returned(self) -> None:
        self.engine.take_returned()

    def lose(self) -> None:
        self.engine.lose(self._borrow_link())

    def lend(self) -> None:
        if self.engine.lent:
            self.engine.lend(self._lend_link(), self.rng.randint(1, 4))

    def take_back(self) -> None:
        if self.engine.lent:
            self.engine.take_back(self._lend_link(), self.rng.randint(1, 4))

    def forget_prefixes(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    def _borrow_link(self) -> int:
        return self.rng.randrange(len(self.engine.setup.borrow))

    def _lend_link(self) -> int:
        return self.rng.randrange(len(self.engine.setup.lend))


def run_seeds(first: int) -> None:
    streamed = moved = 0
    for seed in range(first, first + SEEDS_PER_TEST):
        run = Run(seed)
        try:
            run.go()
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"seed {seed}, {run.engine.setup}") from error
        streamed += run.engine.streamed_blocks
        moved += run.engine.moved_blocks
    assert streamed > 0
    assert moved > 0


@pytest.mark.parametrize("first", range(0, 2_000, SEEDS_PER_TEST))
def test_seeds(first: int) -> None:
    run_seeds(first)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2_000, 60_000, SEEDS_PER_TEST))
def test_many_seeds(first: int) -> None:
    run_seeds(first)
