"""Lenders and borrowers as processes of their own: they agree, and one survives the death of the other."""

from __future__ import annotations

import random
import signal
import time

import pytest

from swiftkv.lease.messages import BudgetSet
from tests.lease.lending_process import TIMEOUT_S, Node, agrees, held, lent

ALL = 16  # extents of a lender of 48 blocks, 3 in each


def test_what_is_offered_is_borrowed() -> None:
    with Node() as node:
        node["w"].wait_for(lambda state: lent(state) == [ALL])
        node["m"].wait_for(lambda state: held(state) == [ALL])
        lender, borrower = node["w"].show(with_extents=True), node["m"].show(with_extents=True)
        [lend], [borrow] = lender.lends, borrower.borrows
        assert agrees(lend, borrow)
        assert (lend.peer, lend.peer_state, borrow.peer, borrow.peer_state) == ("m", "attached", "w", "attached")
        assert lend.num_bytes == borrow.num_bytes == ALL * node.link.extent_bytes
        assert lender.groups[0].lent == ALL * node.link.meu_w
        assert borrower.groups[0].borrowed_free == ALL * node.link.meu_m
        assert (lender.budget_bytes, lender.pool_bytes) == (node.pool_bytes, node.pool_bytes)
        assert (lender.borrows, borrower.lends) == ([], [])
        node["w"].wait_for(lambda state: state.lends[0].peer_extents == ALL)


@pytest.mark.parametrize("dies", ["m", "w"])
def test_who_is_killed_is_dealt_with_anew(dies: str) -> None:
    lives = {"m": "w", "w": "m"}[dies]
    with Node() as node:
        node["w"].wait_for(lambda state: lent(state) == [ALL])
        node["m"].wait_for(lambda state: held(state) == [ALL])
        node[dies].kill()
        if lives == "w":
            state = node["w"].wait_for(lambda state: state.groups[0].lent == 0)
            assert state.lends[0].counts["home"] == node.link.num_extents
            assert state.lends[0].peer_state == "not there"
        else:
            state = node["m"].wait_for(lambda state: held(state) == [0])
            assert state.groups[0].borrowed_free == 0
            assert (state.borrows[0].peer_state, state.borrows[0].heard_s_ago) == ("not there", None)
        node[dies].start()
        node["w"].wait_for(lambda state: lent(state) == [ALL])
        node["m"].wait_for(lambda state: held(state) == [ALL])
        [lend], [borrow] = node["w"].show(with_extents=True).lends, node["m"].show(with_extents=True).borrows
        assert agrees(lend, borrow)


def test_a_borrower_that_is_stopped_keeps_its_leases_until_it_goes_on() -> None:
    with Node() as node:
        node["m"].wait_for(lambda state: held(state) == [ALL])
        node["m"].process.send_signal(signal.SIGSTOP)
        request_id = node["w"].ask_budget(0)
        state = node["w"].wait_for(lambda state: state.lends[0].counts["recalled"] == ALL)
        assert state.groups[0].lent == ALL * node.link.meu_w
        assert request_id not in node["w"].answers
        node["m"].process.send_signal(signal.SIGCONT)
        answer = node["w"].budget_set(request_id)
        assert (answer.lent_bytes, answer.recalled_bytes) == (0, ALL * node.link.extent_bytes)
        assert node["w"].show().groups[0].lent == 0


def test_the_death_of_a_stopped_borrower_ends_a_recall() -> None:
    with Node() as node:
        node["m"].wait_for(lambda state: held(state) == [ALL])
        node["m"].process.send_signal(signal.SIGSTOP)
        request_id = node["w"].ask_budget(0)
        node["w"].wait_for(lambda state: state.lends[0].counts["recalled"] == ALL)
        node["m"].kill()
        assert node["w"].budget_set(request_id).lent_bytes == 0


def test_a_lender_that_is_stopped_is_waited_for() -> None:
    with Node() as node:
        node["m"].wait_for(lambda state: held(state) == [ALL])
        node["w"].process.send_signal(signal.SIGSTOP)
        silent_s = node["m"].wait_for(lambda state: (state.borrows[0].heard_s_ago or 0) > 1.2).borrows[0].heard_s_ago
        assert silent_s is not None
        assert held(node["m"].show()) == [ALL]
        node["w"].process.send_signal(signal.SIGCONT)
        node["m"].wait_for(lambda state: (state.borrows[0].heard_s_ago or 9) < silent_s)


def test_two_borrowers_have_an_even_part_each_and_one_that_is_left_has_all() -> None:
    with Node(borrowers=["m", "n"]) as node:
        node["w"].wait_for(lambda state: lent(state) == [8, 8])
        node["n"].wait_for(lambda state: held(state) == [8])
        node["m"].kill()
        node["n"].wait_for(lambda state: held(state) == [ALL])
        node["m"].start()
        node["w"].wait_for(lambda state: lent(state) == [8, 8])
        node["m"].wait_for(lambda state: held(state) == [8])
        assert set(node["w"].show().recalls_total) == {"share"}


def test_one_borrows_from_three_and_loses_only_what_the_dead_one_lent() -> None:
    with Node(lenders=["u", "v", "w"]) as node:
        node["m"].wait_for(lambda state: held(state) == [ALL] * 3)
        node["v"].kill()
        state = node["m"].wait_for(lambda state: held(state) == [ALL, 0, ALL])
        assert state.groups[0].borrowed_free == 2 * ALL * node.link.meu_m
        node["v"].start()
        node["m"].wait_for(lambda state: held(state) == [ALL] * 3)


def test_budgets_that_change_all_the_time_lose_nothing() -> None:
    """While both sides work, and copies take the time of a step."""
    random_numbers = random.Random(7)
    with Node(window_s=0.05) as node:
        node["m"].wait_for(lambda state: held(state) == [ALL])
        answers: list[BudgetSet] = []
        for turn in range(60):
            if turn % 3 == 0:
                node["m"].obey("add", tokens=random_numbers.randrange(1, 600), max_tokens=40)
            if turn % 7 == 0:
                node["w"].obey("add", tokens=random_numbers.randrange(1, 400), max_tokens=10)
            answers.append(node["w"].set_budget(random_numbers.randrange(node.pool_bytes)))
        assert all(answer.refused is None and answer.lent_bytes <= answer.budget_bytes for answer in answers)
        assert sum(answer.recalled_bytes for answer in answers) > 0
        assert {node["m"].finished_request() for _ in range(20)} == set(range(1, 21))
        assert {node["w"].finished_request() for _ in range(9)} == set(range(1, 10))
        node["w"].set_budget(node.pool_bytes // 2)
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            [lend], [borrow] = node["w"].show(with_extents=True).lends, node["m"].show(with_extents=True).borrows
            if agrees(lend, borrow) and lend.counts["lent"] == node.link.num_extents // 2:
                break
            assert time.monotonic() < deadline_s, (lend.counts, borrow.counts)
        assert node["w"].set_budget(0).lent_bytes == 0
        histogram = node["w"].show().recall_seconds
        assert histogram.count == sum(node["w"].show().recalls_total.values())
