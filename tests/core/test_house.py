"""KV groups that hand the extents of one pool to each other; kv_oracle checks the bytes and the books alongside.

It is one file, for its tests and the state machine at its end share one engine that knows about extents.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from kv_oracle import Engine, Request
from naive_scheduler import Setup
from test_scheduler_states import SchedulerMachine

from swiftkv import _core
from swiftkv.arithmetic import ceil_div

BLOCK = 4
FULL, WINDOW = 0, 1


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def engine(
    num_extents: int,
    *,
    sizes: tuple[int, int] = (3, 1),
    window: int = 8,
    chunk: int = 16,
    max_model_len: int = 128,
    lend_sizes: tuple[int, ...] = (1,),
) -> Engine:
    """Make an engine of a full group and a window group, `sizes` blocks of which fill an extent.

    It lends so many extents at once over each link.
    """
    groups = ((1, num_extents * sizes[0], 0), (1, num_extents * sizes[1], window))
    lend = tuple((num_extents // size, size) for size in lend_sizes)
    return Engine(Setup(groups, BLOCK, 4, chunk, max_model_len, blocks_per_extent=sizes, lend=lend))


def run(e: Engine, request_id: int, tokens: list[int], max_tokens: int = 1) -> int:
    """Return how many tokens of a request were found in the cache; it runs alone, and to its end."""
    e.add(request_id, tokens, max_tokens)
    e.drain()
    e.check()
    return e.finished[request_id].cached


def extents_of(e: Engine) -> list[int]:
    """Return how many extents each group has for itself."""
    groups = zip(e.scheduler.stats().groups, e.setup.blocks_per_extent, strict=True)
    return [(stats.total - stats.elsewhere - stats.lent) // size for stats, size in groups]


def test_a_group_takes_extents_when_it_needs_blocks_and_leaves_them_when_they_are_free() -> None:
    e = engine(20)
    assert extents_of(e) == [0, 0]
    e.add(1, prompt(40), max_tokens=1)
    e.step()
    assert extents_of(e) == [4, 4]  # ten blocks of the whole prompt, and four of the first chunk
    e.abort(1)
    assert extents_of(e) == [2, 4]  # what was computed, and is cached: four blocks of each
    e.reset_prefix_cache()
    assert extents_of(e) == [0, 0]


def test_windows_and_histories_take_each_others_memory() -> None:
    """Many short prompts are mostly tails, one long prompt is mostly history: the same pool holds either."""
    e = engine(30)
    for i in range(20):
        run(e, i, prompt(9, i))
    of_full, of_window = extents_of(e)
    assert of_window > 2 * of_full
    run(e, 100, prompt(120, 100))
    of_full, of_window = extents_of(e)
    assert of_full >= 10
    assert of_full + of_window <= 30
    for i in range(200, 220):
        run(e, i, prompt(9, i))
    assert extents_of(e)[WINDOW] > 2 * extents_of(e)[FULL]


def test_one_pool_holds_what_regions_of_its_size_do_not() -> None:
    """Three long conversations fit into either; the tails of eight short ones do not fit into a window's region."""
    shared = engine(26)
    regions = Engine(Setup(((1, 39, 0), (1, 13, 8)), BLOCK, 4, 16, 64))
    found = {}
    for name, e in (("shared", shared), ("regions", regions)):
        for i in range(3):
            run(e, i, prompt(49, i))
        assert [run(e, 10 + i, prompt(49, i)) for i in range(3)] == [48, 48, 48]
        for i in range(20, 28):
            run(e, i, prompt(9, i))
        found[name] = sum(run(e, 20 + i, prompt(9, i)) for i in range(20, 28))
    assert found["shared"] == 8 * 8
    assert found["regions"] < 8 * 8


def test_what_was_used_least_recently_is_handed_over_first() -> None:
    e = engine(21)
    run(e, 1, prompt(41, 1))
    run(e, 2, prompt(41, 2))
    run(e, 3, prompt(41, 1))  # the second one is the older now
    run(e, 4, prompt(60, 4))
    assert run(e, 5, prompt(41, 1)) == 40
    assert run(e, 6, prompt(41, 2)) < 40


def test_no_boundary_needs_it_so_it_goes_before_everything() -> None:
    """A prefill leaves window blocks behind: the next prompt's history takes their extents, and evicts nothing else."""
    e = engine(40)
    run(e, 1, prompt(21, 1))
    run(e, 2, prompt(120, 2))
    run(e, 3, prompt(30, 3))
    assert run(e, 4, prompt(21, 1)) == 20
    assert run(e, 5, prompt(120, 2)) == 116


def crowded(sizes: tuple[int, int] = (1, 4), num_steps: int = 24) -> Engine:
    """Return an engine in which the windows of four requests share extents."""
    e = engine(40, sizes=sizes, max_model_len=140 * sizes[FULL])
    for i in range(4):
        e.add(i, prompt(4, i), max_tokens=60)
    for _ in range(num_steps):
        e.step()
    return e


def begin_move(e: Engine) -> None:
    """Begin a step that moves blocks of windows, and admits a prompt that needs the extents.

    Three of the four requests end, and the blocks of the fourth move together.
    """
    sizes = e.setup.blocks_per_extent
    e.abort(1, 2, 3)
    e.reset_prefix_cache()
    assert extents_of(e)[WINDOW] > 1 + ceil_div(e.scheduler.stats().groups[WINDOW].used + 2, sizes[WINDOW])
    free = e.scheduler.stats().groups[FULL].free + (40 - sum(extents_of(e))) * sizes[FULL]
    e.add(9, prompt(free * BLOCK, 9), max_tokens=1)  # and a block is left for the fourth
    plan = e.schedule()
    assert plan is not None
    assert plan.new_request_ids.tolist() == [9]
    assert len(plan.local_moves) > 0


def in_a_move(sizes: tuple[int, int] = (1, 4), num_steps: int = 24) -> Engine:
    """Return an engine in such a step."""
    e = crowded(sizes, num_steps)
    begin_move(e)
    return e


def test_a_few_used_blocks_do_not_keep_extents_from_others() -> None:
    e = in_a_move()
    e.commit()
    e.drain()


def test_nothing_is_planned_or_loaded_beside_a_move() -> None:
    e = in_a_move(sizes=(2, 4))
    assert e.schedule() is None
    e.begin_loading(b"", prompt(BLOCK, 10))
    assert not e.loads
    assert not e.lend(0, 40)
    e.commit()
    e.begin_loading(b"", prompt(BLOCK, 10))
    assert e.loads
    e.drain()
    assert e.lend(0, 1)


@pytest.mark.parametrize("num_steps", range(22, 26))
def test_a_step_that_failed_has_moved_nothing(num_steps: int) -> None:
    """Each of these steps was to move a block of the tail from which the request goes on."""
    e = in_a_move((1, 6), num_steps)
    e.abandon()
    e.check()
    e.drain()


def test_a_pin_ends_with_the_step_that_was_to_move_its_blocks() -> None:
    """Nobody knows how much of them has moved."""
    e = in_a_move((1, 6), 23)
    pin_id = e.pin(b"", e.requests[0].tokens, max_share=1.0)
    assert pin_id is not None
    e.abandon()
    assert pin_id not in e.pins
    e.check()
    e.drain()


@pytest.mark.parametrize("sizes", [(1, 4), (1, 6), (2, 4)])
def test_pinned_blocks_move_and_stay_pinned(sizes: tuple[int, int]) -> None:
    e = crowded(sizes, 22)
    tokens = list(e.requests[0].tokens)
    assert e.pin(b"", tokens, max_share=1.0) is not None
    begin_move(e)
    e.check()
    e.commit()
    e.check()
    e.drain()
    assert run(e, 10, tokens) == (len(tokens) - 1) // BLOCK * BLOCK


# ---- lending ----


def test_extents_are_lent_whichever_group_had_them_and_come_home_to_whichever_needs_them() -> None:
    e = engine(20, lend_sizes=(2, 3))
    assert e.lend(0, 3) == [9, 8, 7]
    assert e.lend(1, 9) == [3, 2, 1, 0]  # the first fourteen are left
    e.check()
    stats = e.scheduler.stats().groups
    assert [(group.lent, group.elsewhere) for group in stats] == [(18 * 3, 2 * 3), (0, 20)]
    e.take_back(1, [0, 1, 2])
    run(e, 1, prompt(24))  # six full blocks, and as many of the window's
    assert sum(extents_of(e)) == 8
    e.take_back(0, [8])
    assert e.lend(0, 1) == [8]
    # Nothing else is free, so that what is cached goes.
    assert sorted(e.lend(0, 20)) == [0, 1, 2, 3, 6]
    assert extents_of(e) == [0, 0]
    e.check()
    e.take_all_back()
    assert run(e, 2, prompt(24)) == 0


@pytest.mark.parametrize("num_more", [0, 3])
def test_what_was_used_least_recently_is_lent_first_after_what_no_boundary_needs(num_more: int) -> None:
    e = engine(40)
    run(e, 1, prompt(41, 1))
    run(e, 2, prompt(41, 2))
    run(e, 3, prompt(41, 1))  # the second one is the older now
    of_no_boundary = 2 * (10 - 3)  # blocks of windows, which are an extent each
    num_lent = 40 - sum(extents_of(e)) + of_no_boundary + num_more
    assert len(e.lend(0, num_lent)) == num_lent
    e.take_all_back()
    assert run(e, 4, prompt(41, 1)) == 40
    assert (run(e, 5, prompt(41, 2)) == 40) == (num_more == 0)


def test_a_request_that_needs_what_is_lent_waits_and_its_demand_says_how_much() -> None:
    e = engine(20)
    assert len(e.lend(0, 12)) == 12
    e.add(1, prompt(60), max_tokens=1)
    assert e.schedule() is None
    assert e.scheduler.starved(10.0, 5.0) == [1]
    assert e.scheduler.is_short()
    demand, of_window = e.scheduler.take_demand()
    # It wants fifteen full blocks and one to grow into, and of the window a tail of two, a chunk of four and two: an
    # extent of either may be filled in part, but one that holds a single block.
    assert demand.total_now == demand.total_peak == (6 + 1 + 8) * 3
    assert demand.shortfall == demand.total_now - 8 * 3
    assert (of_window.total_now, of_window.shortfall) == (0, 0)
    e.take_back(0, sorted(e.lent[0])[:7])
    assert not e.scheduler.is_short()
    e.drain()
    assert e.scheduler.take_demand()[FULL].longest == demand.total_now
    assert e.scheduler.take_demand()[FULL].total_now == 0
    assert len(e.away) == 5


@pytest.mark.parametrize("lend_sizes", [(1,), (3,), (2, 5)])
def test_groups_take_each_others_memory_beside_leases(lend_sizes: tuple[int, ...]) -> None:
    """Leases stay where they are while short prompts take the memory of long ones, and the other way about."""
    e = engine(40, lend_sizes=lend_sizes)
    for link in range(len(lend_sizes)):
        e.lend(link, 10 // lend_sizes[link] // len(lend_sizes))
    away = set(e.away)
    owned = []
    for prompts in ([prompt(9, i) for i in range(20)], [prompt(120, i) for i in range(2)]) * 2:
        for tokens in prompts:
            run(e, len(e.finished), tokens)
        owned.append(extents_of(e))
    assert [of_window > of_full for of_full, of_window in owned] == [True, False, True, False]
    assert e.away == away


@pytest.mark.parametrize("sizes", [(6, 1), (26, 3), (1, 1), (5, 4)])
def test_one_sequence_gets_to_its_end_in_the_smallest_pool(sizes: tuple[int, int]) -> None:
    whole, held = ceil_div(200, BLOCK), 4
    num_extents = sum(ceil_div(count, size) + (size > 1) for count, size in zip((whole, held), sizes, strict=True))
    e = engine(num_extents, sizes=sizes, max_model_len=200)
    for i in range(3):
        run(e, i, prompt(150, i), max_tokens=50)
    with pytest.raises(ValueError, match=f"{num_extents - 1} extents; one sequence of max_model_len 200 needs"):
        engine(num_extents - 1, sizes=sizes, max_model_len=200)


@pytest.mark.parametrize(
    ("specs", "links", "why"),
    [
        (((1, 12, 0, 3), (1, 4, 8, 0)), {}, "blocks_per_extent must be positive in every KV group"),
        (((1, 12, 0, -3), (1, 4, 8, 1)), {}, "blocks_per_extent must be positive in every KV group"),
        (((1, 12, 0, 3), (1, 5, 8, 1)), {}, "equally many"),
        (((1, 13, 0, 3), (1, 4, 8, 1)), {}, "equally many"),
        (((1, 30, 0, 3), (1, 10, 8, 1)), {"lend_links": (0, 2, 2)}, "lend whole ones"),
        (((1, 30, 0, 3), (1, 10, 8, 1)), {"lend_links": (1, 2, 1)}, "in the name of the first group"),
        (((1, 30, 0, 3), (1, 10, 8, 1)), {"lend_links": (0, 11, 3)}, "more extents than its group has"),
    ],
)
def test_what_groups_cannot_share_is_refused(
    specs: tuple[tuple[int, int, int, int], ...], links: dict[str, tuple[int, ...]], why: str
) -> None:
    groups = [_core.GroupSpec(*spec[:3], 4, blocks_per_extent=spec[3]) for spec in specs]
    known: dict[str, Any] = {kind: [_core.Link(*link)] for kind, link in links.items()}
    with pytest.raises(ValueError, match=why):
        _core.Scheduler(groups, BLOCK, 4, 16, 16, **known)


class SharedEngine(Engine):
    """An engine whose requests do not wait for a block while another group has an extent more than it uses.

    For what is lent they wait, and the lender knows it.
    """

    flows: frozenset[int] = frozenset()  # of all requests: with several, the first to come is not the first in turn

    def add(self, request_id: int, prompt: list[int], max_tokens: int = 4, *, flow: int = 0, **params: Any) -> None:
        super().add(request_id, prompt, max_tokens, flow=flow, **params)
        self.flows |= {flow}

    def schedule(self) -> _core.StepPlan | None:
        is_alone, pins = not self.plans and not self.loads and len(self.flows) == 1, set(self.pins)
        plan = super().schedule()
        waiting = [(r.priority, i) for i, r in self.requests.items() if r.computed is None]
        # What pins have left may be in flight: it was moved before, to make room without ending them.
        if is_alone and waiting and pins == set(self.pins):
            self._check_waits_with_reason(self.requests[min(waiting)[1]], plan)
        return plan

    def _check_waits_with_reason(self, head: Request, plan: _core.StepPlan | None) -> None:
        setup, size = self.setup, self.setup.block_size
        running = [r for r in self.requests.values() if r.computed is not None]
        budget = setup.max_num_batched_tokens - (len(plan.token_ids) if plan else 0)
        is_full = budget < (1 if setup.enable_chunked_prefill else len(head.tokens))
        is_coming = any((r.namespace, r.tokens[:size]) == (head.namespace, head.tokens[:size]) for r in running)
        has_preempted = plan is not None and len(plan.preempted_request_ids) > 0
        if is_full or is_coming or has_preempted or len(running) == setup.max_num_seqs:
            return
        num_home = setup.num_extents - len(self.away)
        needed = alone = 0
        for stats, (_, _, window), per_extent in zip(
            self.scheduler.stats().groups, setup.groups, setup.blocks_per_extent, strict=True
        ):
            held = least = ceil_div(len(head.tokens), size)
            if window and setup.enable_chunked_prefill:
                tail = ceil_div(window - 1, size)
                held, least = min(held, tail + 1), min(least, tail + 2)
            needed += ceil_div(stats.used + stats.in_flight + held + len(running), per_extent)
            alone += ceil_div(least, per_extent) + (per_extent > 1)
        if alone > num_home:
            assert self.scheduler.is_short(), "a request waits for what is lent, and nobody asks for it"
        else:
            assert needed > num_home, "a request waits for what another group does not use"


@st.composite
def shared_setups(draw: st.DrawFn) -> Setup:
    block_size = draw(st.sampled_from([2, 4]))
    max_model_len = draw(st.integers(4, 40))
    chunked = draw(st.booleans())
    windows = draw(st.sampled_from([(0, 5), (0, 1), (0, 0), (4, 0, 9), (3, 9)]))
    sizes = draw(st.sampled_from([(1, 1, 2), (2, 1, 3), (3, 2, 1), (6, 1, 1), (1, 4, 2), (5, 3, 1)]))[: len(windows)]
    whole = ceil_div(max_model_len, block_size)
    needed = 0
    for window, size in zip(windows, sizes, strict=True):
        held = min(whole, ceil_div(window - 1, block_size) + 2) if window and chunked else whole
        needed += ceil_div(held, size) + (size > 1)
    num_extents = needed + draw(st.integers(0, 6))
    return Setup(
        tuple((draw(st.integers(1, 3)), num_extents * size, w) for w, size in zip(windows, sizes, strict=True)),
        block_size,
        draw(st.integers(1, 9)),
        draw(st.integers(1, 32)),
        max_model_len,
        draw(st.booleans()),
        chunked,
        draw(st.none() | st.integers(block_size, 16)),
        blocks_per_extent=sizes,
        lend=tuple((num_extents // n, n) for n in draw(st.sampled_from([(), (1,), (2,), (1, 3)]))),
    )


class HouseMachine(SchedulerMachine):
    """The histories of test_scheduler_states, with groups that share their blocks, leases, and steps that fail."""

    @initialize(setup=shared_setups(), writes_back=st.booleans())
    def start(self, setup: Setup, writes_back: bool) -> None:
        self.engine = SharedEngine(setup)
        self.writes_back = writes_back
        if writes_back:
            self.engine.write_back()
        self.next_id = 0
        self.history: list[list[int]] = [[0, 1] * 20]

    @precondition(lambda self: self.engine.setup.lend)
    @rule(pick=st.integers(0, 9), max_extents=st.integers(1, 6))
    def lend(self, pick: int, max_extents: int) -> None:
        self.engine.lend(pick % len(self.engine.setup.lend), max_extents)

    @precondition(lambda self: self.engine.away)
    @rule(pick=st.integers(0, 9), which=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=4))
    def take_back(self, pick: int, which: list[int]) -> None:
        link = pick % len(self.engine.setup.lend)
        if lent := sorted(self.engine.lent[link]):
            self.engine.take_back(link, sorted({lent[i % len(lent)] for i in which}))

    @precondition(lambda self: len(self.engine.plans) == 1)
    @rule()
    def abandon(self) -> None:
        self.engine.abandon()


TestHouse = HouseMachine.TestCase
TestHouse.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(10))
def test_a_million_steps(part: int) -> None:
    """Ten runs of 100,000: the memory of one grows by as much as 0.5 GiB."""

    @seed(part)
    class LongHouseMachine(HouseMachine):
        pass

    long = settings(max_examples=1000, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(LongHouseMachine, settings=long)
