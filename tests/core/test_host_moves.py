"""Steps copy blocks from pinned chunks of host memory into the pool, layer by layer."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from lending_oracle import BorrowSetup, LendingSetup
from lending_storage_oracle import MovingEngine
from test_kv_events import Follower, format_of, resident
from test_lending_states import SETUPS
from test_lending_storage import LendingWithStorage

from swiftkv import _core
from swiftkv._core import GroupSpec, Scheduler
from swiftkv.engine.kv_events import Taken
from swiftkv.policies import WritePolicy

BLOCK = 4
NUM_HISTORIES = 15
RARE = ["store", "abort", "host", "storage", "lend", "load", "pin", "add", "abandon"]
DENSE = LendingSetup(((3, 16, 0),), (), sources=(0,), num_chunks=24)
HYBRID = LendingSetup(((2, 24, 0), (2, 16, 9)), (), sources=(0, 1), num_chunks=32)
WINDOW = LendingSetup(((1, 24, 0), (2, 16, 9)), (), sources=(1,), num_chunks=32)
HYBRID_BORROWS = replace(HYBRID, borrow=(BorrowSetup(0, 4, 2),))
WINDOW_BORROWS = replace(WINDOW, borrow=(BorrowSetup(0, 4, 2),))
BORROWS = LendingSetup(((3, 12, 0),), (BorrowSetup(0, 4, 2),), sources=(0,), num_chunks=24)
SHARED = replace(HYBRID, groups=((2, 24, 0), (2, 24, 9)), blocks_per_extent=(2, 2))
SHARED_BORROWS = replace(
    WINDOW, groups=((1, 56, 0), (2, 28, 9)), borrow=(BorrowSetup(0, 3, 4),), blocks_per_extent=(4, 2)
)
LENDS = replace(DENSE, lend=((0, 16, 1),))
BATCH = 2 * _core.PRIORITIES_PER_CLASS
MAX_EVENTS = 100_000


def with_sources(setup: LendingSetup) -> LendingSetup:
    """Return the setup with host memory whose chunks are blocks of the first group, and of all that are as large."""
    same = (g for g in range(len(setup.groups)) if setup.block_bytes(g) == setup.block_bytes(0))
    return replace(setup, sources=tuple(same), num_chunks=10)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 3, length).tolist()


def unique_prompt(length: int, seed: int) -> list[int]:
    """Return a prompt that begins like no other."""
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def stored(setup: LendingSetup, *prompts: list[int]) -> MovingEngine:
    """Return an engine that has put prompts into host memory, and forgotten them."""
    e = MovingEngine(setup, random.Random(0))
    for number, tokens in enumerate(prompts):
        e.add(100 + number, tokens, 1)
        run(e)
    e.scheduler.reset_prefix_cache()
    for name in list(e.storage):
        e.storage_forgets(name)
    return e


def run(e: MovingEngine) -> None:
    while e.schedule():
        e.commit()
        e.store()
        e.check()


def bring(e: MovingEngine, request_id: int, tokens: list[int], max_tokens: int = 4) -> int:
    """Add a request, and take the blocks that its next step copies. Return how many these are."""
    before = len(e.coming)
    e.add_held(request_id, tokens, max_tokens)
    assert e.begin_load(request_id) is None
    e.let_go(request_id)
    return len(e.coming) - before


@pytest.mark.parametrize("setup", [DENSE, HYBRID, BORROWS], ids=["dense", "hybrid", "borrows"])
def test_the_next_step_copies_the_blocks_and_computes_the_rest(setup: LendingSetup) -> None:
    e = stored(setup, prompt(33))
    assert bring(e, 1, [*prompt(33), 1]) > 0
    assert e.schedule()
    plan = e.planned[-1].plan
    assert plan.new_cached_tokens.tolist() == [32]
    assert np.diff(plan.query_starts).tolist() == [2]
    assert plan.has_copies
    assert plan.num_stream_buffers == 2
    e.commit()
    e.take_unpinned()
    assert all(chunk.num_pins == 0 for chunk in e.chunks)
    e.drain()


def test_chunks_side_by_side_are_one_run() -> None:
    e = stored(DENSE, prompt(33))
    assert bring(e, 1, [*prompt(33), 1]) == 8
    assert e.schedule()
    for buffer in range(2):
        assert e.planned[-1].plan.copies(0, "load", buffer)[:, 3].tolist() == [8]
    e.drain()


def test_a_step_without_tokens_copies_what_an_aborted_request_has_left() -> None:
    e = stored(DENSE, prompt(33))
    bring(e, 1, [*prompt(33), 1])
    e.abort(1)
    assert e.schedule()
    plan = e.planned[-1].plan
    assert not len(plan.request_ids)
    assert plan.has_copies
    e.commit()
    e.check()
    e.add(2, [*prompt(33), 2], 1)
    assert e.schedule()
    assert e.planned[-1].plan.new_cached_tokens.tolist() == [32]
    e.drain()


def test_the_last_blocks_of_what_nobody_uses_are_evicted_first() -> None:
    e = stored(DENSE, prompt(33))
    bring(e, 1, [*prompt(33), 1])
    e.abort(1)
    assert e.schedule()
    e.commit()
    e.add(2, prompt(40, 1), 1)
    e.add(3, prompt(33), 1)
    assert e.schedule()
    e.commit()
    e.drain()
    assert e.scheduler.stats().prefix_hit_tokens_total == 24


def test_a_block_that_is_forgotten_meanwhile_is_not_copied() -> None:
    e = stored(DENSE, prompt(33))
    bring(e, 1, [*prompt(33), 1], 1)
    e.scheduler.reset_prefix_cache()
    assert e.schedule()
    plan = e.planned[-1].plan
    assert not plan.has_copies
    assert plan.new_cached_tokens.tolist() == [0]
    e.take_unpinned()
    assert all(chunk.num_pins == 0 for chunk in e.chunks)
    e.drain()


def test_a_step_in_progress_keeps_the_pins_and_no_other_is_planned() -> None:
    e = stored(DENSE, prompt(33))
    bring(e, 1, [*prompt(33), 1])
    assert e.schedule()
    e.take_unpinned()
    assert sum(chunk.num_pins for chunk in e.chunks) == 8
    assert e.scheduler.schedule(e.now_s) is None
    e.commit()
    e.take_unpinned()
    assert not sum(chunk.num_pins for chunk in e.chunks)
    e.drain()


def test_a_second_request_shares_what_comes() -> None:
    e = stored(DENSE, prompt(33))
    assert bring(e, 1, [*prompt(33), 1]) == 8
    assert bring(e, 2, [*prompt(33), 2]) == 0
    assert e.schedule()
    assert e.planned[-1].plan.new_cached_tokens.tolist() == [32, 32]
    e.drain()


def test_a_group_is_attended_in_host_memory_or_copied_from_there() -> None:
    both = GroupSpec(2, 8, 0, 64, 0, host_first=16, host_stride=2, num_host_blocks=4, num_source_chunks=4)
    with pytest.raises(ValueError, match="attended"):
        Scheduler([both], block_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32)


def test_a_chunk_that_is_not_there_is_refused() -> None:
    e = stored(DENSE, prompt(33))
    e.add_held(1, prompt(33), 1)
    pinned = np.full(8, DENSE.num_chunks, np.int32)
    with pytest.raises(ValueError, match="has no chunk 24"):
        e.scheduler.begin_load(1, 8, 0, pinned)
    e.let_go(1)
    e.drain()


def num_pins(e: MovingEngine) -> int:
    """Return how many pins the scheduler has."""
    e.take_unpinned()
    return sum(chunk.num_pins for chunk in e.chunks)


def new_rows(e: MovingEngine) -> dict[int, int]:
    """Return how many tokens the step planned last computes of each request."""
    plan = e.planned[-1].plan
    return dict(zip(plan.request_ids.tolist(), np.diff(plan.query_starts).tolist(), strict=True))


def num_copied(e: MovingEngine) -> int:
    """Return how many blocks the step planned last copies from host memory."""
    assert e.planned
    return len(e.moving.get(e.planned[-1].number, []))


# ---- steps that fail ----


@pytest.mark.parametrize("setup", [DENSE, HYBRID, BORROWS], ids=["dense", "hybrid", "borrows"])
def test_a_step_that_fails_has_copied_nothing(setup: LendingSetup) -> None:
    """Its pins are given back, and its request computes what was to come."""
    e = stored(setup, prompt(33))
    num_blocks = bring(e, 1, [*prompt(33), 1])
    assert e.schedule()
    e.abandon()
    e.check()
    assert num_pins(e) == 0
    assert sum(group.cached + group.used for group in e.scheduler.stats().groups) == 0
    assert e.schedule()
    assert num_copied(e) == 0
    assert new_rows(e) == {1: 16}
    run(e)
    e.drain()
    assert bring(e, 2, [*prompt(33), 2]) == 0  # it was computed, and lies in the pool
    e.scheduler.reset_prefix_cache()
    assert bring(e, 3, [*prompt(33), 3]) == num_blocks
    assert e.schedule()
    assert num_copied(e) == num_blocks
    e.drain()


def test_blocks_that_come_outlive_a_step_that_fails_before_them() -> None:
    e = stored(DENSE, prompt(33))
    e.add(1, prompt(9, 1), 1)
    assert e.schedule()
    assert bring(e, 2, [*prompt(33), 2]) == 8
    e.abandon()
    assert num_pins(e) == 8
    assert e.schedule()
    assert num_copied(e) == 8
    assert new_rows(e) == {1: 9, 2: 2}
    e.drain()


def test_a_pin_loses_what_a_step_has_failed_to_copy() -> None:
    e = stored(DENSE, prompt(33))
    bring(e, 1, [*prompt(33), 1])
    assert e.schedule()
    assert e.pin(prompt(32), 1.0) is not None
    e.abandon()
    assert not e.pins
    e.drain()


# ---- room ----


def test_a_request_is_displaced_while_the_blocks_of_another_come() -> None:
    e = stored(DENSE, prompt(33))
    e.add(1, prompt(24, 1), 20, priority=BATCH)
    assert e.schedule()
    e.commit()
    e.add_held(2, [*prompt(33), *prompt(8, 2)], 4)
    assert e.begin_load(2) is None
    e.let_go(2)
    assert e.schedule()
    assert e.planned[-1].plan.preempted_request_ids.tolist() == [1]
    assert num_copied(e) == 8
    assert new_rows(e) == {2: 9}
    e.check()
    e.drain()


def test_a_request_is_preempted_while_a_step_holds_the_blocks_that_come() -> None:
    """It finds what it has computed again: the room that it lacked has been lent meanwhile."""
    e = stored(LENDS, prompt(33))
    e.add(1, prompt(8, 1), 6)
    assert e.schedule()
    e.commit()
    assert bring(e, 2, prompt(33)) == 8
    e.lend(0, 16)
    assert e.schedule()
    assert e.planned[-1].plan.preempted_request_ids.tolist() == [1]
    assert num_copied(e) == 8
    e.check()
    e.commit()
    e.take_back(0, 16)
    e.drain()
    assert set(e.outputs) >= {1, 2}


def test_a_request_that_matches_nothing_awaits_the_room_of_blocks_that_come() -> None:
    """A step without tokens copies them, and they give way in the next one."""
    e = stored(LENDS, prompt(33))
    e.add(1, prompt(8, 1), 2, skip_prefix_match=True)
    assert e.schedule()
    e.commit()
    assert bring(e, 2, prompt(33)) == 8
    e.lend(0, 16)
    assert e.schedule()
    assert num_copied(e) == 8
    assert new_rows(e) == {}
    e.check()
    e.commit()
    assert e.schedule()
    assert new_rows(e) == {1: 1}
    assert e.scheduler.stats().num_preemptions_total == 0
    e.take_back(0, 16)
    e.drain()


def test_a_request_that_matches_nothing_computes_beside_blocks_that_come() -> None:
    e = stored(DENSE, prompt(17))
    assert bring(e, 1, [*prompt(17), 1]) == 4
    e.add(2, prompt(17), 1, skip_prefix_match=True)
    assert e.schedule()
    assert e.planned[-1].plan.new_cached_tokens.tolist() == [16, 0]
    assert new_rows(e) == {1: 2, 2: 14}
    e.drain()
    e.add_held(3, prompt(17), 1)
    assert bring(e, 4, prompt(17)) == 0
    e.drain()


def test_a_refused_prompt_is_matched_again_when_the_tail_of_a_window_moves_up() -> None:
    """It then finds blocks that a running request uses, and needs fewer, though no room has come."""
    setup = LendingSetup(((1, 24, 0), (1, 12, 9)), (), sources=(1,), num_chunks=64, max_num_seqs=8, max_model_len=80)
    e = MovingEngine(setup, random.Random(0))
    document = unique_prompt(52, 0)
    e.add(1, document[:24], 1)
    e.drain()
    e.store()
    e.add(2, document, 28)
    for request_id in range(10, 14):  # their windows take the place of the tail
        e.add(request_id, unique_prompt(12, request_id), 1)
    while len(e.requests) > 1:
        assert e.schedule()
        e.commit()
    e.add(3, [*document[:25], *unique_prompt(15, 3)], 1)
    assert e.schedule()
    e.commit()
    assert e.scheduler.stats().num_running == 1
    assert bring(e, 4, [*document[:25], 5], 1) > 0
    assert {each.name[1] for each in e.coming} == {1}
    e.abort(4)
    assert e.schedule()
    assert e.planned[-1].plan.new_request_ids.tolist() == [3]
    assert e.planned[-1].plan.new_cached_tokens.tolist() == [24]
    e.drain()


# ---- the order of steps ----


def test_recalled_extents_are_emptied_before_blocks_come() -> None:
    """The step that empties them goes alone, and the one after it copies from host memory."""
    e = stored(BORROWS, prompt(9))
    e.borrow(0, 4)
    e.add(1, prompt(32, 1), 8)
    e.add(2, prompt(16, 3), 8)
    while e.scheduler.stats().groups[0].borrowed_used == 0:
        assert e.schedule()
        e.commit()
    e.abort(1)  # what lies with the lender finds room here
    assert bring(e, 3, [*prompt(9), 2]) == 2
    e.recall(0, 4)
    assert e.schedule()
    assert e.planned[-1].plan.has_copies
    assert new_rows(e) == {}
    assert num_copied(e) == 0
    assert num_pins(e) == len(e.coming) == 2
    e.commit()
    assert e.schedule()
    assert num_copied(e) == 2
    e.drain()


def test_a_step_that_is_planned_ahead_copies_blocks() -> None:
    """The end of the step before it gives back none of its pins, and no third step is planned before it has ended."""
    e = stored(DENSE, prompt(33))
    e.add(1, prompt(9, 1), 8)
    assert e.schedule()
    assert bring(e, 2, [*prompt(33), 2]) == 8
    assert e.schedule()
    assert num_copied(e) == 8
    e.commit()
    e.check()
    assert num_pins(e) == 8
    assert not e.schedule()
    e.abort(2)
    e.scheduler.reset_prefix_cache()
    e.check()
    e.commit()
    assert num_pins(e) == 0
    assert e.step_ahead()
    assert e.schedule()  # a step that copies nothing may have another ahead of it
    e.drain()


def test_no_block_is_taken_while_a_step_copies() -> None:
    e = stored(DENSE, prompt(17), prompt(17, 1))
    assert bring(e, 1, prompt(17)) == 4
    e.add_held(2, prompt(17, 1), 1)
    assert e.schedule()
    assert e.begin_load(2) is None
    assert not e.coming
    e.commit()
    assert e.begin_load(2) is None
    assert e.coming  # others have taken some of the chunks meanwhile
    e.drain()


# ---- the back of a prompt ----


def test_a_request_computes_its_front_and_meets_what_comes() -> None:
    e = stored(DENSE, prompt(33))
    e.add_held(1, prompt(33), 2)
    e.meet(1, 2)
    assert len(e.coming) == 6
    assert e.schedule()
    assert num_copied(e) == 6
    assert new_rows(e) == {1: 8}
    e.commit()
    assert e.schedule()
    plan = e.planned[-1].plan
    assert plan.met_request_ids.tolist() == [1]
    assert plan.met_blocks.tolist() == [[2, 8]]
    assert new_rows(e) == {1: 1}
    e.drain()


def test_a_back_that_a_step_has_failed_to_copy_is_computed() -> None:
    e = stored(DENSE, prompt(33))
    e.add_held(1, prompt(33), 2)
    e.meet(1, 2)
    assert e.schedule()
    e.abandon()
    assert e.schedule()
    assert new_rows(e) == {1: 16}
    run(e)
    assert e.num_moved == 6
    assert not e.scheduler.stats().prefix_hit_tokens_total
    e.drain()


# ---- what subscribers hear ----


class BackFollower(Follower):
    """Follows an engine that tells of the back of a prompt before its front."""

    def check_tokens(self, event: dict[str, Any]) -> None:
        """Check the event's tokens if all tokens before them are known."""
        if event["parent_block_hash"] is None or event["parent_block_hash"] in self.prefixes:
            super().check_tokens(event)


def heard(e: MovingEngine) -> list[dict[str, Any]]:
    """Return the events since the last call."""
    return list(format_of(e.setup).events_of(Taken(*e.scheduler.take_kv_events())))


def telling(*prompts: list[int]) -> MovingEngine:
    """Return an engine as `stored` does, which tells subscribers from now on."""
    e = stored(DENSE, *prompts)
    e.scheduler.enable_kv_events(MAX_EVENTS)
    return e


def test_blocks_that_move_up_are_told_once_with_their_tokens() -> None:
    e = telling(prompt(33))
    bring(e, 1, [*prompt(33), 1], 1)
    assert not heard(e)
    assert e.schedule()
    [event] = heard(e)
    assert (event["type"], event["medium"]) == ("BlockStored", "CPU")
    assert event["token_ids"] == prompt(33)[:32]
    e.commit()
    assert not heard(e)
    e.drain()


def test_a_block_that_is_forgotten_before_it_comes_is_not_told() -> None:
    e = telling(prompt(33))
    bring(e, 1, [*prompt(33), 1], 1)
    e.scheduler.reset_prefix_cache()
    assert [event["type"] for event in heard(e)] == ["AllBlocksCleared"]
    e.abort(1)
    assert not e.schedule()
    assert not heard(e)
    e.add(2, prompt(9, 1), 1)  # in the blocks that were to come
    run(e)
    assert [event["token_ids"] for event in heard(e)] == [prompt(9, 1)[:8]]


def test_blocks_that_a_step_has_failed_to_copy_are_told_to_be_gone() -> None:
    e = telling(prompt(33))
    bring(e, 1, [*prompt(33), 1], 1)
    assert e.schedule()
    follower = Follower()
    for event in heard(e):
        follower.apply(event)
    assert len(follower.index) == 8
    e.abandon()
    for event in heard(e):
        follower.apply(event)
    assert not follower.index
    e.drain()


class Moves(LendingWithStorage):
    """All that happens beside lending and storage, and host memory that others overwrite, from which steps copy."""

    engine: MovingEngine

    @initialize(
        setup=st.sampled_from(
            [with_sources(s) for s in SETUPS if s.enable_prefix_caching] + [BORROWS, HYBRID_BORROWS, WINDOW_BORROWS]
        ),
        seed=st.integers(0, 99),
        policy=st.sampled_from(["write_through", "write_back"]),
    )
    def start(self, setup: LendingSetup, seed: int, policy: WritePolicy) -> None:
        self.engine = MovingEngine(setup, random.Random(seed), policy)
        self.next_id = 0

    @precondition(lambda self: self.engine.storage)
    @rule(pick=st.integers(0, 999))
    def storage_forgets(self, pick: int) -> None:
        names = list(self.engine.storage)
        self.engine.storage_forgets(names[pick % len(names)])

    @precondition(lambda self: not self.engine.planned)
    @rule(length=st.integers(9, 40), seed=st.integers(0, 2), max_tokens=st.integers(1, 12), is_let_go=st.booleans())
    def bring_back(self, length: int, seed: int, max_tokens: int, is_let_go: bool) -> None:
        """Put all that is here into host memory, forget it, and bring some of it back: by itself this is rare."""
        self.engine.store()
        self.engine.scheduler.reset_prefix_cache()
        request_id = self.next_id
        self.add_held(length, seed, max_tokens)
        self.engine.begin_load(request_id)
        if is_let_go:
            self.engine.let_go(request_id)

    @rule(pick=st.integers(0, 99))
    def host_forgets(self, pick: int) -> None:
        self.engine.host_forgets(pick % len(self.engine.chunks))


Moves.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestMoves = Moves.TestCase


def act(e: MovingEngine, rng: random.Random, request_id: int) -> None:
    """Do one thing that may happen to an engine with host memory, peers and storage."""
    tokens = [*prompt(4 * rng.randint(2, 9), rng.randint(0, 2)), rng.randint(0, 9)]
    match rng.choice(["bring"] * 3 + ["step"] * 6 + ["reset"] * 2 + RARE):
        case "bring":
            e.add_held(request_id, tokens, rng.randint(1, 8))
            first = rng.choice([0, 0, 0, 1, 2])
            if first and e.scheduler.can_meet:
                e.meet(request_id, first)
            else:
                e.begin_load(request_id)
            if rng.random() < 0.8:
                e.let_go(request_id)
        case "step":
            if len(e.planned) < 2:
                e.schedule()
            if e.planned and rng.random() < 0.7:
                e.commit()
        case "store":
            e.store()
        case "reset":
            e.store()
            e.scheduler.reset_prefix_cache()
        case "abort" if e.requests:
            e.abort(rng.choice(sorted(e.requests)))
        case "host":
            e.host_forgets(rng.randrange(len(e.chunks)))
        case "storage" if e.storage:
            e.storage_forgets(rng.choice(list(e.storage)))
        case "lend" if e.setup.borrow:
            link = rng.randrange(len(e.setup.borrow))
            rng.choice([e.borrow, e.borrow, e.recall])(link, rng.randint(1, 3))
            e.take_returned()
            if rng.random() < 0.1:
                e.lose(link)
        case "load" if e.transfers:
            e.read(rng.choice(e.transfers), rng.randint(1, 6), rng.random() < 0.9)
        case "pin":
            for pin_id in list(e.pins):
                e.unpin(pin_id)
            e.pin(tokens, 0.5)
        case "add":
            priority = rng.randint(0, 2) * _core.PRIORITIES_PER_CLASS
            e.add(request_id, tokens, rng.randint(1, 8), skip_prefix_match=rng.random() < 0.5, priority=priority)
        case "abandon" if e.planned:
            e.abandon()


@pytest.mark.parametrize(
    "setup", [DENSE, HYBRID, WINDOW, SHARED, BORROWS, HYBRID_BORROWS, WINDOW_BORROWS, SHARED_BORROWS]
)
def test_random_histories_move_blocks(setup: LendingSetup) -> None:
    """The state machine shows little: hardly any block is copied there. Subscribers hear what the pool has."""
    num_moved = 0
    for seed in range(NUM_HISTORIES):
        rng = random.Random(seed)
        e, follower = MovingEngine(setup, rng), BackFollower()
        e.scheduler.enable_kv_events(MAX_EVENTS)
        for request_id in range(200):
            act(e, rng, request_id)
            e.check()
            for event in heard(e):
                follower.apply(event)
            assert follower.index == resident(e.scheduler)
        e.drain()
        e.check()
        num_moved += e.num_moved
    assert num_moved > 3 * NUM_HISTORIES, num_moved
