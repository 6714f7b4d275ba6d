"""Lending and borrowing in pools, over links and with windows that are drawn at random, for as many steps as it takes.

`test_lending_states` has hypothesis shrink what fails in a few chosen setups; here the setups are random too, and runs
are long. A seed is a run, and `Run(seed).go()` does it again.

A history goes through phases, because events that are drawn one by one, each regardless of the others, keep the cache
far from its corners: to have both the local and the borrowed pool full of cached blocks, with the layer-stream cache
short and nothing running, dozens of events in a row must not recall, lend, lose, abort or forget anything. Hypothesis
draws its rules in the same way, so that it does not get there either.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from lending_oracle import BorrowSetup, LendingEngine, LendingSetup
from visits import (
    FILE,
    FILE_OF_SHARED,
    IMPOSSIBLE,
    IMPOSSIBLE_IN_REGIONS,
    Rules,
    State,
    Visits,
    is_possible,
    read,
    write,
)

from swiftkv import _core

SEEDS_PER_TEST = 200
FIRST_SEEDS = range(0, 2_000, SEEDS_PER_TEST)
FIRST_SEEDS_OF_SHARED = range(0, 1_000, SEEDS_PER_TEST)
NUM_CONVERSATION_SEEDS = 100
TOKENS = 3  # so few that prompts have prefixes in common


def drawn_setup(rng: random.Random) -> LendingSetup:
    """Draw a set-up, possibly one that the scheduler refuses."""
    return small_setup(rng) if rng.random() < 0.75 else large_setup(rng)


def small_setup(rng: random.Random) -> LendingSetup:
    """A few blocks of one token each: every block is full, so that the cache keeps it, and every corner is near."""
    num_layers, num_blocks = rng.choice([1, 2, 3, 4, 4]), rng.randint(3, 8)
    return LendingSetup(
        ((num_layers, num_blocks, 0),),
        tuple(BorrowSetup(0, rng.randint(3, 8), rng.choice([1, 1, 1, 2])) for _ in range(rng.choice([1, 1, 2]))),
        ((0, num_blocks, 1),) * rng.choice([0, 0, 1]),
        block_size=1,
        max_num_seqs=rng.randint(1, 3),
        max_num_batched_tokens=rng.choice([4, 8, 16]),
        max_model_len=num_blocks + rng.randint(0, 8),
        enable_chunked_prefill=rng.random() < 0.8,
        stream_buffers=rng.choice([1, 2]),
    )


def large_setup(rng: random.Random) -> LendingSetup:
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


def shared_setup(rng: random.Random) -> LendingSetup:
    """Groups that share extents, so that these change hands while some of what the groups need is borrowed."""
    sizes = rng.choice([(1, 2), (2, 1), (2, 3), (3, 1), (3, 2), (4, 1), (1, 1), (1, 2, 2)])
    num_layers = math.lcm(*sizes) * rng.choice([1, 1, 2])  # of an extent
    block_size, num_extents = rng.choice([1, 1, 2, 4]), rng.randint(4, 12)
    windows = [rng.choice([0, 0, 0, 5]), rng.choice([3, 5, 9]), 0]
    groups = tuple((num_layers // size, num_extents * size, w) for size, w in zip(sizes, windows, strict=False))
    borrow = [
        BorrowSetup(rng.randrange(len(groups)), rng.randint(1, 8), rng.randint(1, 4), rng.choice([0, 0, 40]))
        for _ in range(rng.randint(1, 3))
    ]
    return LendingSetup(
        groups,
        tuple(borrow),
        tuple((0, num_extents // n, n * sizes[0]) for n in rng.choice([(), (), (1,), (2,)])),
        block_size=block_size,
        max_num_seqs=rng.randint(1, 4),
        max_num_batched_tokens=rng.choice([4, 8, 16]),
        max_model_len=rng.randint(3, 10 * block_size),
        enable_chunked_prefill=rng.random() < 0.8,
        stream_buffers=rng.choice([1, 2]),
        retention_interval=rng.choice([None, None, 4]),
        blocks_per_extent=sizes,
    )


def conversation_setup(rng: random.Random) -> LendingSetup:
    """A few long histories have room in the pool, and lenders for them and for windows."""
    sizes, num_layers = rng.choice([((2, 1), (2, 4)), ((3, 2), (2, 3)), ((1, 1), (4, 4))])
    num_extents, windows = rng.choice([10, 14, 18, 24, 36]), (0, 10)
    return LendingSetup(
        tuple((n, num_extents * size, w) for n, size, w in zip(num_layers, sizes, windows, strict=True)),
        tuple(BorrowSetup(link % 2, rng.choice([4, 8, 16, 40]), rng.choice([1, 1, 2, 3])) for link in range(4)),
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=rng.choice([16, 32, 64]),
        max_model_len=rng.choice([4, 5, 6, 8]) * num_extents,
        stream_buffers=rng.choice([1, 2]),
        blocks_per_extent=sizes,
    )


class Run:
    """One engine, and what happens to it."""

    draw_setup = staticmethod(drawn_setup)

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rare = random.Random(seed)  # decides what is the exception, without changing the rest of a history
        self.engine = self._engine()
        self.prompts: list[list[int]] = []

    def _engine(self) -> LendingEngine:
        while True:
            try:
                return LendingEngine(self.draw_setup(self.rng), self.rng)
            except ValueError:
                continue

    def go(self) -> None:
        if self.rng.random() < 0.2:
            self._phase(self.churn, self.rng.randint(20, 150))
        else:
            for _ in range(2):
                self.borrow()
            for _ in range(self.rng.randint(1, 4)):
                self._lap()
        self.engine.drain()
        self.engine.check()

    def _lap(self) -> None:
        """Take a budget through a day: more is lent when the borrower needs it, less when the lender does."""
        rng = self.rng
        for phase in (self.fill, self.press, self.grow, self.press, self.rest, self.take, self.shrink):
            if rng.random() < 0.9:
                self._phase(phase, rng.choice([1, 1, 1, 1, 1, 1, 3]))
        if rng.random() < 0.4:
            self._phase(self.churn, rng.randint(1, 10))

    def _phase(self, phase: Callable[[], dict[Callable[[], None], int]], num_events: int) -> None:
        events = phase()
        for event in self.rng.choices([*events], [*events.values()], k=num_events):
            event()
            self.engine.check()

    # Phases. Each returns its events with their weights: how often each comes.

    def churn(self) -> dict[Callable[[], None], int]:
        """Every kind of event, in any order."""
        return {
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

    def fill(self) -> dict[Callable[[], None], int]:
        """Requests come and finish, so that the pools fill with cached blocks."""
        return {self.converse: 1}

    def rest(self) -> dict[Callable[[], None], int]:
        """Running requests finish, until the engine is idle."""
        return {self.finish: 1, self.leave: 2}

    def press(self) -> dict[Callable[[], None], int]:
        """Requests use the whole pool."""
        return {self.crowd: 1}

    def grow(self) -> dict[Callable[[], None], int]:
        """More is borrowed and less is lent while requests run."""
        return {self.borrow: 6, self.take_back: 1}

    def take(self) -> dict[Callable[[], None], int]:
        """The lender needs some of its extents."""
        return {self.recall: 1}

    def shrink(self) -> dict[Callable[[], None], int]:
        """Less is borrowed and more is lent, with few steps in between."""
        return {self.recall: 2, self.step: 4, self.lend: 1, self.take_returned: 1, self.lose: 1}

    # Requests.

    def add(self) -> None:
        """Add a prompt, new or continuing an earlier one."""
        rng = self.rng
        begun = rng.choice(self.prompts) if self.prompts and rng.random() < 0.5 else []
        self._add(begun, rng.randint(1, 8 if begun else self.engine.setup.max_model_len), rng.randint(1, 12))

    def add_large(self) -> None:
        """Add a prompt about as long as the room in the pool, with an answer that grows out of it."""
        group = self.engine.scheduler.stats().groups[0]
        room = (group.free + group.cached) * self.engine.setup.block_size
        self._add([], max(1, room - self.rng.randint(0, 4)), self.rng.randint(1, 24))

    def _add(self, begun: list[int], num_new: int, max_tokens: int) -> None:
        rng, setup = self.rng, self.engine.setup
        prompt = [*begun, *(rng.randrange(TOKENS) for _ in range(num_new))][: setup.max_model_len - 2]
        if rng.random() < 0.7:  # ends with a full block, so that the cache keeps all its blocks
            max_tokens += (1 - len(prompt) - max_tokens) % setup.block_size
        is_matched = self.rare.random() >= 0.1
        self.engine.add(
            len(self.prompts), prompt, max_tokens, skip_prefix_match=not is_matched, priority=self._priority()
        )
        self.prompts.append(prompt)

    def _priority(self) -> int:
        return 0

    def abort(self) -> None:
        if self.engine.requests:
            self.engine.abort(self.rng.choice(sorted(self.engine.requests)))

    def leave(self) -> None:
        """Abort every request between two steps, as if all clients hung up: computed KV stays in the cache."""
        while self.engine.planned:
            self.engine.commit()
        for request_id in sorted(self.engine.requests):
            self.engine.abort(request_id)

    # Steps, of which two may be in progress.

    def draft(self) -> None:
        """Now and then somebody guesses what follows, right at first."""
        if self.engine.requests and self.rare.random() < 0.2:
            request_id = self.rare.choice(sorted(self.engine.requests))
            wrong = [self.rare.randrange(TOKENS) for _ in range(self.rare.randint(0, 4))]
            self.engine.set_draft(request_id, self.rare.randint(0, 4), wrong)

    def step(self) -> None:
        self.draft()
        engine = self.engine
        if not engine.planned or (len(engine.planned) == 1 and self.rng.random() < 0.6):
            engine.schedule()
        else:
            engine.commit()

    def steps(self) -> None:
        for _ in range(self.rng.randint(1, 9)):
            self.draft()
            if len(self.engine.planned) < 2:
                self.engine.step_ahead()

    def crowd(self) -> None:
        """Add requests until some group has neither a free block nor a cached local one."""
        most = self.rng.choice([1, 1, self.engine.setup.max_num_seqs])
        for _ in range(40):
            stats = self.engine.scheduler.stats().groups
            if any(group.free + group.cached + group.borrowed_free == 0 for group in stats):
                return
            if len(self.engine.requests) < most:
                self.add_large()
            self.step()

    def converse(self) -> None:
        """Run one request after another, until some group has no free block."""
        for _ in range(5):
            stats = self.engine.scheduler.stats().groups
            if any(group.cached > 0 and group.free + group.borrowed_free == 0 for group in stats):
                return
            self.rng.choice([self.add, self.add_large])()
            self.finish()

    def finish(self) -> None:
        """Run until nothing is left. Nothing is planned after the last commit, so blocks it freed are not used yet."""
        engine = self.engine
        while engine.planned or (engine.requests and engine.schedule()):
            engine.commit()

    def abandon(self) -> None:
        if self.engine.planned:
            self.engine.abandon()

    # Extents.

    def borrow(self) -> None:
        self.engine.borrow(self._borrow_link(), self.rng.choice([1, 1, 2, 2, 3, 5]))

    def recall(self) -> None:
        link = self._borrow_link()
        self.engine.recall(link, self.rng.choice([1, 1, 2, 4, len(self.engine.held[link]) // 2]))

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
        self.engine.reset_prefix_cache()

    def _borrow_link(self) -> int:
        return self.rng.randrange(len(self.engine.setup.borrow))

    def _lend_link(self) -> int:
        return self.rng.randrange(len(self.engine.setup.lend))


class SharedRun(Run):
    """The same with groups that share extents, and with classes: who is displaced may have made copies in that step."""

    draw_setup = staticmethod(shared_setup)

    def _priority(self) -> int:
        return self.rare.choice([0, 1, 1, 2]) * _core.PRIORITIES_PER_CLASS


class ConversationRun(SharedRun):
    """Conversations beside each other find their histories and windows with lenders, who come and go."""

    draw_setup = staticmethod(conversation_setup)

    def go(self) -> None:
        self.talks = [self._new_tokens(self.rng.choice([4, 28, self.engine.setup.max_model_len])) for _ in range(6)]
        self.asked: dict[int, int] = {}  # by conversation, the last request
        self._phase(self.talk, 300)
        self.engine.drain()
        self.engine.check()

    def talk(self) -> dict[Callable[[], None], int]:
        return {
            self.step: 20,
            self.say: 20,
            self.borrow_much: 8,
            self.take_returned: 4,
            self.recall_much: 1,
            self.lose: 1,
            self.abort: 1,
        }

    def say(self) -> None:
        """Add the next turn of a conversation that waits for none; a long one begins anew."""
        talk, setup = self.rng.randrange(len(self.talks)), self.engine.setup
        if self.asked.get(talk) in self.engine.requests:
            return
        if talk in self.asked:
            self.talks[talk] += self._new_tokens(self.rng.randint(4, 20))
        most = setup.max_model_len - 12
        prompt = self.talks[talk][: most if len(self.talks[talk]) < most else most // 2]
        self.asked[talk] = len(self.prompts)
        self.engine.add(len(self.prompts), prompt, self.rng.randint(1, 12))
        self.prompts.append(prompt)

    def borrow_much(self) -> None:
        self.engine.borrow(self._borrow_link(), self.rng.choice([1, 4, 40]))

    def recall_much(self) -> None:
        self.engine.recall(self._borrow_link(), self.rng.choice([2, 40]))

    def _new_tokens(self, most: int) -> list[int]:
        return [self.rng.randrange(50) for _ in range(self.rng.randint(4, most))]


Pools = Literal["regions", "shared"]


@functools.cache
def run_seeds(first: int, pools: Pools) -> Visits:
    visits, streamed, moved = Visits(), 0, 0
    for seed in range(first, first + SEEDS_PER_TEST):
        run = Run(seed) if pools == "regions" else SharedRun(seed)
        run.engine.visits = visits
        try:
            run.go()
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"seed {seed}, {run.engine.setup}") from error
        visits.end_history()
        streamed += run.engine.streamed_blocks
        moved += run.engine.moved_blocks
    assert streamed > 0
    assert moved > 0
    return visits


@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_seeds(first: int) -> None:
    run_seeds(first, "regions")


@pytest.mark.parametrize("first", FIRST_SEEDS_OF_SHARED)
def test_seeds_of_pools_that_groups_share(first: int) -> None:
    run_seeds(first, "shared")


def test_conversations_in_pools_that_groups_share() -> None:
    for seed in range(NUM_CONVERSATION_SEEDS):
        run = ConversationRun(seed)
        try:
            run.go()
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"seed {seed}, {run.engine.setup}") from error


@pytest.mark.parametrize(
    ("pools", "seeds", "file", "rules"),
    [
        ("regions", FIRST_SEEDS, FILE, IMPOSSIBLE_IN_REGIONS),
        ("shared", FIRST_SEEDS_OF_SHARED, FILE_OF_SHARED, IMPOSSIBLE),
    ],
    ids=["regions", "shared"],
)
def test_what_histories_used_to_visit_they_visit(pools: Pools, seeds: range, file: Path, rules: Rules) -> None:
    """After a change of the scheduler or of `Run`, look at what `visits.py` prints before `visits.py --update`."""
    visited: set[tuple[State, str]] = set()
    for first in seeds:
        visited.update(run_seeds(first, pools).histories)
    lost = read(file.read_text()) - visited
    assert not lost, f"never visited any more:\n{write(lost)}"
    wrong = {pair for pair in visited if not is_possible(*pair, rules)}
    assert not wrong, f"not impossible after all:\n{write(wrong)}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2_000, 60_000, SEEDS_PER_TEST))
@pytest.mark.parametrize("pools", ["regions", "shared"])
def test_many_seeds(pools: Pools, first: int) -> None:
    run_seeds(first, pools)
