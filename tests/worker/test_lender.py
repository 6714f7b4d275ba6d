"""What a lender decides: by budget, by demand, and whom it believes."""

from __future__ import annotations

import msgspec
import pytest
import zmq

from swiftkv.lease.messages import Hello, ToAdmin, Welcome
from swiftkv.lease.process import Identity
from tests.lease.lending_process import TIMEOUT_S, Node, held, lent

KEPT = 14  # extents that a lender of 48 blocks lends, by the policy


def test_a_budget_that_falls_recalls_the_difference_and_one_that_rises_is_offered() -> None:
    with Node() as node:
        extent_bytes = node.link.extent_bytes
        node["m"].wait_for(lambda state: held(state) == [KEPT])
        would = node["w"].set_budget(5 * extent_bytes, dry_run=True)
        assert (would.refused, would.recalled_bytes, would.lent_bytes) == (None, 9 * extent_bytes, KEPT * extent_bytes)
        assert node["w"].show().budget_bytes == node.pool_bytes

        did = node["w"].set_budget(5 * extent_bytes + 1)
        assert (did.refused, did.budget_bytes) == (None, 5 * extent_bytes + 1)
        assert (did.recalled_bytes, did.lent_bytes) == (9 * extent_bytes, 5 * extent_bytes)
        assert did.took_s > 0
        assert node["m"].show().borrows[0].num_bytes == 5 * extent_bytes
        state = node["w"].show()
        assert (state.recalls_total, state.recall_seconds.count) == ({"budget": 1}, 1)
        assert state.recall_seconds.sum <= did.took_s

        again = node["w"].set_budget(5 * extent_bytes + 1)
        assert (again.recalled_bytes, again.lent_bytes) == (0, 5 * extent_bytes)
        assert node["w"].set_budget(8 * extent_bytes).recalled_bytes == 0
        node["m"].wait_for(lambda state: held(state) == [8])


def test_budgets_that_follow_each_other_before_the_first_is_done() -> None:
    with Node() as node:
        node["m"].wait_for(lambda state: held(state) == [KEPT])
        ids = [node["w"].ask_budget(extents * node.link.extent_bytes) for extents in (6, 2, 2, 10)]
        answers = [node["w"].budget_set(request_id) for request_id in ids]
        assert [answer.recalled_bytes // node.link.extent_bytes for answer in answers] == [8, 4, 0, 0]
        node["m"].wait_for(lambda state: held(state) == [10])


@pytest.mark.parametrize(("budget_bytes", "says"), [(-1, "less than nothing"), (1 << 40, "more than the pool")])
def test_an_impossible_budget_is_refused_with_a_reason(budget_bytes: int, says: str) -> None:
    with Node(budget=0.5) as node:
        answer = node["w"].set_budget(budget_bytes)
        assert answer.refused is not None
        assert says in answer.refused
        assert answer.budget_bytes == node["w"].show().budget_bytes == node.pool_bytes // 2
        answer = node["m"].set_budget(0)
        assert answer.refused == "m lends to nobody"


def test_requests_that_do_not_fit_take_blocks_back_from_whoever_has_most() -> None:
    # The pool has 48 blocks, of which 42 are lent to m, or at least 21 to each of m and n.
    with Node(borrowers=["m", "n"], window_s=0.5) as node:
        node["w"].wait_for(lambda state: lent(state) == [7, 7])
        node["w"].obey("add", tokens=40 * 16 - 20, max_tokens=10)
        assert node["w"].finished_request() == 1
        state = node["w"].show()
        assert state.recalls_total["demand"] >= 1
        assert state.groups[0].lent <= 48 - 39
        # Then the window passes without a request, and it is all lent again.
        node["w"].wait_for(lambda state: lent(state) == [7, 7])


def test_demand_takes_from_a_borrower_whose_requests_use_it() -> None:
    with Node() as node:
        node["m"].wait_for(lambda state: held(state) == [KEPT])
        ids = [node["m"].obey("add", tokens=500, max_tokens=60) for _ in range(3)]
        node["m"].wait_for(lambda state: state.groups[0].borrowed_used + state.groups[0].borrowed_cached > 0)
        node["w"].obey("add", tokens=46 * 16 - 20, max_tokens=10)
        assert node["w"].finished_request() == 1
        assert sorted(node["m"].finished_request() for _ in ids) == [1, 2, 3]


def test_the_paper_s_policy_can_be_chosen() -> None:
    with Node(policy="longest") as node:
        node["m"].wait_for(lambda state: held(state) == [node.link.num_extents])  # it keeps no reserve


def test_a_stranger_and_other_links_are_refused() -> None:
    me = Identity.of_this_process("somebody")
    with Node() as node, zmq.Context() as context:
        socket = context.socket(zmq.DEALER)
        socket.connect(node.address("w"))
        for name, links in [("somebody", [node.link]), ("m", []), ("m", [node.link, node.link])]:
            hello = Hello(name, me.incarnation, 1, me.pid, me.start_ticks, links)
            socket.send(msgspec.msgpack.encode(hello))
            assert socket.poll(TIMEOUT_S * 1000)
            answer = msgspec.msgpack.decode(socket.recv(), type=ToAdmin | Welcome)
            assert isinstance(answer, Welcome)
            assert answer.refused == f"w is not configured to lend to {name} over these links"
        socket.close(linger=0)
        node["m"].wait_for(lambda state: held(state) == [KEPT])


def test_a_process_that_is_gone_is_not_welcomed() -> None:
    """Nor one that has got its pid since: its start says so."""
    me = Identity.of_this_process("m")
    with Node(borrowers=["m"]) as node, zmq.Context() as context:
        node["m"].wait_for(lambda state: held(state) == [KEPT])
        node["m"].kill()
        node["w"].wait_for(lambda state: state.lends[0].peer_state == "not there")
        socket = context.socket(zmq.DEALER)
        socket.connect(node.address("w"))
        socket.send(msgspec.msgpack.encode(Hello("m", 1, 1, me.pid, me.start_ticks - 1, [node.link])))
        socket.send(msgspec.msgpack.encode(Hello("m", me.incarnation, 1, me.pid, me.start_ticks, [node.link])))
        assert socket.poll(TIMEOUT_S * 1000)
        answer = msgspec.msgpack.decode(socket.recv(), type=Welcome)
        assert (answer.receiver, answer.refused) == (me.incarnation, None)
        socket.close(linger=0)
