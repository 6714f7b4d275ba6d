"""Several engines in virtual time: alone they do what one engine does, lending helps, and the books are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from swiftkv._core import GroupSpec, Link, Scheduler, StepPlan
from swiftkv.bench.traces import Arrival
from swiftkv.lease.messages import LendingSpec, LinkGeometry, PeerSpec
from swiftkv.lending_party import borrow_links, lend_links
from swiftkv.simulate.cores import Cores, CoreShare, CoreUser
from swiftkv.simulate.node import NodeOutcome, NodeRun, SimulatedModel, simulate_together
from swiftkv.simulate.simulator import simulate
from tests.lease.lending_process import Node, Setup, lent

BLOCK = 16
BLOCK_BYTES = 1024
MAX_MODEL_LEN = 2048
CHAT_BLOCKS = 160
CODE_BLOCKS = 1024
EXTENT_BLOCKS = 4
MAX_WAIT_S = 30.0
LINK = LinkGeometry(
    lender_group=0,
    borrower_group=0,
    meu_w=EXTENT_BLOCKS,
    meu_m=EXTENT_BLOCKS,
    extent_bytes=EXTENT_BLOCKS * BLOCK_BYTES,
    num_extents=CODE_BLOCKS // EXTENT_BLOCKS,
    lender_base_offset_bytes=0,
    borrower_group_bytes=CHAT_BLOCKS * BLOCK_BYTES,
)
Seen = tuple[Any, ...]


def step_s(plan: StepPlan) -> float:
    """A millisecond per token, and a tenth of one for each block that is copied."""
    return 1e-3 * len(plan.token_ids) + 1e-4 * plan.work.num_copies


def lending(lenders: Sequence[str] = (), borrowers: Sequence[str] = (), budget: float = 0.0) -> LendingSpec:
    return LendingSpec(
        leases_address="",
        lenders=[PeerSpec(name, "", [LINK]) for name in lenders],
        borrowers=[PeerSpec(name, "", [LINK]) for name in borrowers],
        budget_bytes=int(budget * CODE_BLOCKS * BLOCK_BYTES),
        window_s=2.0,
        policy="total",
        transport="shm",
        stream_buffers=2,
        rendezvous="simulated",
        max_wait_s=MAX_WAIT_S,
    )


def scheduler(num_blocks: int, spec: LendingSpec | None = None) -> Scheduler:
    links = [Link(0, LINK.num_extents, EXTENT_BLOCKS, LINK.extent_bytes, 0)]
    return Scheduler(
        [GroupSpec(2, num_blocks, 0, BLOCK_BYTES // 2)],
        block_size=BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=MAX_MODEL_LEN,
        lend_links=links if spec and spec.borrowers else [],
        borrow_links=links if spec and spec.lenders else [],
        scheduling_policy="hrrn",
    )


def model(name: str, arrivals: Sequence[Arrival], num_blocks: int, spec: LendingSpec | None = None) -> SimulatedModel:
    return SimulatedModel(
        name=name,
        scheduler=scheduler(num_blocks, spec),
        max_model_len=MAX_MODEL_LEN,
        step_time=step_s,
        arrivals=arrivals,
        user=CoreUser(1),
        lending=spec,
        pool_bytes=num_blocks * BLOCK_BYTES,
    )


def chats(count: int, num_users: int, seed: int = 0, first_id: int = 0) -> list[Arrival]:
    """Users who go on with what they have said, one after the other: more than a small pool holds."""
    rng = np.random.default_rng(seed)
    said: list[list[int]] = [[] for _ in range(num_users)]
    arrivals = []
    time_s = 0.0
    for i in range(count):
        user = i % num_users
        said[user] += range(first_id + 10 * i, first_id + 10 * i + int(rng.integers(1, 3)))
        time_s += float(rng.exponential(0.5))
        length = min(64 * len(said[user]), 1024)
        arrivals.append(Arrival(time_s, length, int(rng.integers(2, 20)), tuple(said[user]), block_tokens=64))
    return arrivals


def burst(at_s: float, count: int, first_id: int = 1 << 20) -> list[Arrival]:
    """Prompts that come together and want much of a pool."""
    return [
        Arrival(at_s, 1600, 8, tuple(range(first_id + 100 * i, first_id + 100 * i + 25)), block_tokens=64)
        for i in range(count)
    ]


def node(budget: float, code: Sequence[Arrival] = ()) -> list[SimulatedModel]:
    """A model with a small pool beside one with a large pool that lends this part of it."""
    return [
        model("chat", chats(120, 8), CHAT_BLOCKS, lending(lenders=["code"])),
        model("code", code, CODE_BLOCKS, lending(borrowers=["chat"], budget=budget)),
    ]


def run(models: Sequence[SimulatedModel], num_cores: int = 8) -> dict[str, NodeOutcome]:
    return simulate_together(models, num_cores, MAX_WAIT_S)


def check_pools(models: Sequence[SimulatedModel]) -> None:
    """Each pool's blocks add up, and what one has lent is what the other holds."""
    for each in models:
        each.scheduler.check_invariants()
        [g] = each.scheduler.stats().groups
        assert g.free + g.used + g.cached + g.lent + g.in_flight + g.staging + g.loading + g.elsewhere == g.total
    [chat], [code] = (each.scheduler.stats().groups for each in models)
    borrowed = chat.borrowed_free + chat.borrowed_used + chat.borrowed_cached + chat.borrowed_in_flight
    assert borrowed <= code.lent <= CODE_BLOCKS


def seen(plan: StepPlan) -> Seen:
    ids = (plan.request_ids, plan.new_request_ids, plan.preempted_request_ids, plan.new_cached_tokens)
    arrays = (*ids, plan.token_ids, plan.query_starts, plan.context_lens, plan.row_slots)
    return *(array.tolist() for array in arrays), [table.tolist() for table in plan.stream_tables[0]]


def test_a_model_of_a_node_does_what_it_does_alone_plan_for_plan() -> None:
    plans: dict[str, list[Seen]] = {"alone": [], "first": [], "second": []}

    def noted(name: str, plan: StepPlan) -> float:
        plans[name].append(seen(plan))
        return step_s(plan)

    arrivals = chats(80, 6)
    alone = simulate(scheduler(CHAT_BLOCKS), MAX_MODEL_LEN, lambda plan: noted("alone", plan), arrivals)
    first = replace(model("first", arrivals, CHAT_BLOCKS), step_time=lambda plan: noted("first", plan))
    second = replace(model("second", arrivals, CHAT_BLOCKS), step_time=lambda plan: noted("second", plan))
    for name, outcome in run([first, second]).items():
        assert plans[name] == plans["alone"]
        assert outcome.requests.step_s.tolist() == alone.step_s.tolist()
        assert outcome.requests.end_s.tolist() == alone.end_s.tolist()
        assert outcome.core_s == pytest.approx(alone.busy_s)
        assert outcome.waited_s == 0
    assert alone.num_preemptions + int(alone.cached_tokens.sum()) > 0


def test_clients_are_served_as_alone() -> None:
    arrivals = chats(40, 4)
    alone = simulate(scheduler(CHAT_BLOCKS), MAX_MODEL_LEN, step_s, arrivals, num_clients=3)
    both = run([replace(model("chat", arrivals, CHAT_BLOCKS), num_clients=3), model("code", chats(10, 2), CODE_BLOCKS)])
    assert both["chat"].requests.end_s.tolist() == alone.end_s.tolist()


def test_lending_gives_hits_that_a_short_pool_has_not() -> None:
    alone = run([model("chat", chats(120, 8), CHAT_BLOCKS)])["chat"].requests
    without, lent_to = (run(node(budget))["chat"] for budget in (0.0, 0.75))
    assert without.requests.cached_tokens.tolist() == alone.cached_tokens.tolist()
    assert without.borrowed_hit_tokens == 0
    assert lent_to.requests.cached_tokens.sum() > 1.5 * alone.cached_tokens.sum()
    assert lent_to.borrowed_hit_tokens > 0
    assert lent_to.copied_blocks > 0
    assert lent_to.mean_borrowed_bytes == pytest.approx(0.75 * CODE_BLOCKS * BLOCK_BYTES)


def test_a_lender_that_needs_its_pool_has_it_back_and_the_books_are_right_all_along() -> None:
    models = node(1.0, code=burst(20.0, 8))
    going = NodeRun(models, 8, MAX_WAIT_S)
    most_lent = 0
    while going.step():
        check_pools(models)
        most_lent = max(most_lent, models[1].scheduler.stats().groups[0].lent)
    outcomes = going.outcomes()
    going.close()
    assert most_lent == CODE_BLOCKS
    leases = outcomes["code"].leases
    assert leases is not None
    assert leases.recalls["demand"] > 0
    alone = run([model("code", burst(20.0, 8), CODE_BLOCKS)])["code"].requests
    assert not np.isnan(outcomes["chat"].requests.end_s).any()
    # A borrower lets go of blocks between two of its steps, the longest of which takes about half a second.
    assert outcomes["code"].requests.end_s.max() < alone.end_s.max() + 1.0


def test_the_mean_that_was_lent_is_of_the_time_in_which_requests_came_and_ended() -> None:
    """Time before the first request, in which nothing is taken back, does not count."""
    models = node(1.0, code=burst(20.0, 8))
    moved = [
        replace(model, arrivals=[replace(a, time_s=a.time_s + 500.0) for a in model.arrivals])
        for model in node(1.0, code=burst(20.0, 8))
    ]
    at_once, later = run(models), run(moved)
    assert at_once["code"].mean_lent_bytes < 0.9 * CODE_BLOCKS * BLOCK_BYTES
    assert later["code"].mean_lent_bytes == pytest.approx(at_once["code"].mean_lent_bytes, rel=0.02)
    assert later["chat"].mean_borrowed_bytes == pytest.approx(at_once["chat"].mean_borrowed_bytes, rel=0.02)


def test_without_requests_the_mean_is_what_is_lent() -> None:
    chat, code = node(0.75)
    outcomes = run([code, replace(chat, arrivals=())])
    assert outcomes["code"].mean_lent_bytes == 0.75 * CODE_BLOCKS * BLOCK_BYTES
    assert outcomes["chat"].mean_borrowed_bytes == outcomes["code"].mean_lent_bytes


def test_a_budget_is_never_exceeded() -> None:
    leases = run(node(0.3, code=burst(20.0, 3)))["code"].leases
    assert leases is not None
    assert max(num_bytes for _, num_bytes in leases.lent_bytes) <= 0.3 * CODE_BLOCKS * BLOCK_BYTES


def test_a_simulation_depends_on_nothing_but_its_input() -> None:
    first, second = (run(node(1.0, code=burst(20.0, 8))) for _ in range(2))
    for name in first:
        assert first[name].leases == second[name].leases
        assert first[name].requests.end_s.tolist() == second[name].requests.end_s.tolist()


def test_what_nobody_lends_memory_for_is_given_up() -> None:
    spec = lending(lenders=["code"])
    long = Arrival(0.0, 1600, 2, tuple(range(25)), block_tokens=64)
    small = replace(model("chat", [long, *chats(4, 2)], 64, spec))
    outcome = run([small, model("code", (), CODE_BLOCKS, lending(borrowers=["chat"]))])["chat"].requests
    assert np.isnan(outcome.end_s).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("num_tokens", [100, 400, 700])
def test_a_real_lender_recalls_what_a_simulated_one_does(num_tokens: int) -> None:
    """The coordinators of processes, with sockets between them, beside those in virtual time."""
    with Node(window_s=60.0) as real:
        real["w"].wait_for(lambda state: lent(state) == [16])
        real["w"].obey("add", tokens=num_tokens, max_tokens=1)
        assert real["w"].finished_request() == 1
        state = real["w"].wait_for(lambda state: lent(state) != [-1])
        models = [_as_simulated(setup, num_tokens) for setup in real.setups.values()]
        leases = run(models)["w"].leases
    assert leases is not None
    assert leases.lent_bytes[-1][1] == state.lends[0].num_bytes
    assert leases.recalls == state.recalls_total


def _as_simulated(setup: Setup, num_tokens: int) -> SimulatedModel:
    """Return the model that a process of `lending_process` stands for; the lender has one request, after a second."""
    [group], spec = setup.groups, setup.lending
    blocks = tuple(range(num_tokens))
    return SimulatedModel(
        name=setup.name,
        scheduler=Scheduler(
            [GroupSpec(group.num_layers, group.num_blocks, 0, 64)],
            16,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            max_model_len=group.num_blocks * 16,
            lend_links=lend_links(spec),
            borrow_links=borrow_links(spec),
            stream_buffers=spec.stream_buffers,
        ),
        max_model_len=group.num_blocks * 16,
        step_time=step_s,
        arrivals=[Arrival(1.0, num_tokens, 1, blocks, block_tokens=1)] if spec.borrowers else [],
        user=CoreUser(1),
        lending=spec,
        pool_bytes=setup.pool_bytes,
    )


def finish(cores: Cores, works: dict[int, float], until_s: float) -> dict[int, int]:
    """Begin steps of each engine one after the other, and return how many have ended."""
    ended = dict.fromkeys(works, 0)
    for user, work_s in works.items():
        cores.begin(user, work_s, 0.0)
    while cores.next_s <= until_s:
        now_s = cores.next_s
        for user, _ in cores.advance(now_s):
            ended[user] += 1
            cores.begin(user, works[user], now_s)
    return ended


def test_engines_without_shares_slow_each_other_down_alike() -> None:
    cores = Cores(2, [CoreUser(2), CoreUser(2)])
    cores.begin(0, 1.0, 0.0)
    assert cores.next_s == 1.0
    cores.begin(1, 1.0, 0.5)
    assert cores.advance(cores.next_s) == [(0, pytest.approx(1.5))]
    assert cores.advance(cores.next_s) == [(1, pytest.approx(1.5))]
    assert cores.core_s == [pytest.approx(2.0), pytest.approx(2.0)]


def test_engines_whose_threads_fit_do_not_meet() -> None:
    assert finish(Cores(3, [CoreUser(1), CoreUser(2)]), {0: 0.5, 1: 0.25}, 10.0) == {0: 20, 1: 40}


@pytest.mark.parametrize(("weights", "part"), [((1, 1), 1 / 2), ((3, 1), 3 / 4), ((9, 1), 9 / 10)])
def test_engines_that_always_want_the_cores_get_them_by_weight(weights: tuple[int, int], part: float) -> None:
    cores = Cores(2, [CoreUser(2, CoreShare(weight, 1.0)) for weight in weights])
    finish(cores, {0: 0.4, 1: 0.03}, 60.0)
    assert cores.core_s[0] / sum(cores.core_s) == pytest.approx(part, abs=0.03)
    assert sum(cores.core_s) == pytest.approx(120.0, rel=0.02)  # a core is free until its next owner asks
    assert (max(cores.waited_s) > 0) == (part != 1 / 2)  # with a core for each nobody waits


def test_engines_share_a_gpu_by_weight() -> None:
    gpu = Cores(1, [CoreUser(1, CoreShare(weight, 1.0, is_whole=True)) for weight in (3, 1)])
    finish(gpu, {0: 0.4, 1: 0.03}, 60.0)
    assert gpu.core_s == [pytest.approx(45.0, abs=0.5), pytest.approx(15.0, abs=0.5)]


def test_an_engine_takes_no_more_than_its_greatest_share() -> None:
    cores = Cores(2, [CoreUser(2, CoreShare(1, 0.25))])
    finish(cores, {0: 0.1}, 60.0)
    assert cores.core_s[0] == pytest.approx(0.25 * 120.0, rel=0.05)


def test_an_engine_has_its_half_of_the_cores_at_once_beside_one_that_floods() -> None:
    cores = Cores(2, [CoreUser(2, CoreShare(1, 1.0)), CoreUser(2, CoreShare(1, 1.0))])
    cores.begin(0, 1e9, 0.0)
    took_s = []
    for at_s in np.arange(5.0, 30.0, 1.0).tolist():
        while cores.next_s < at_s:
            assert not cores.advance(cores.next_s)
        cores.begin(1, 0.05, at_s)
        while not (ended := cores.advance(cores.next_s)):
            pass
        took_s.append(ended[0][1])
    assert max(took_s) < 0.102
