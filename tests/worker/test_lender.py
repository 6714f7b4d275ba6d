"""A lender's decisions: by budget, by demand, and about which messages to believe."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import msgspec
import pytest
import zmq

from swiftkv._core import GroupSpec, Link, Scheduler
from swiftkv.lease.messages import Attached, Hello, LendingState, LinkGeometry, ToAdmin, Welcome
from swiftkv.lease.process import Identity, start_ticks
from swiftkv.lease.wire import SocketWire
from swiftkv.transport.rendezvous import publish_pool
from swiftkv.worker.lender import Lender
from tests.lease.lending_process import TIMEOUT_S, Admin, EngineWithoutModel, Node, held, lent, publish
from tests.support.lender import pool_of
from tests.support.open_files import no_file_descriptor_left

ALL = 16  # extents of a lender of 48 blocks, 3 in each
NOTHING_KNOWN = LendingState(request_id=0, name="w", pool_bytes=0, groups=[], messages_dropped_total=0)


def test_a_budget_that_falls_recalls_the_difference_and_one_that_rises_is_offered() -> None:
    with Node() as node:
        extent_bytes = node.link.extent_bytes
        node["m"].wait_for(lambda state: held(state) == [ALL])
        would = node["w"].set_budget(5 * extent_bytes, dry_run=True)
        assert (would.refused, would.recalled_bytes, would.lent_bytes) == (None, 11 * extent_bytes, ALL * extent_bytes)
        assert node["w"].show().budget_bytes == node.pool_bytes

        did = node["w"].set_budget(5 * extent_bytes + 1)
        assert (did.refused, did.budget_bytes) == (None, 5 * extent_bytes + 1)
        assert (did.recalled_bytes, did.lent_bytes) == (11 * extent_bytes, 5 * extent_bytes)
        assert did.took_s > 0
        assert node["m"].show().borrows[0].num_bytes == 5 * extent_bytes
        state = node["w"].show()
        assert (state.recalls_total, state.recall_seconds.count) == ({"budget": 1}, 1)
        assert state.recall_seconds.total <= did.took_s

        again = node["w"].set_budget(5 * extent_bytes + 1)
        assert (again.recalled_bytes, again.lent_bytes) == (0, 5 * extent_bytes)
        assert node["w"].set_budget(8 * extent_bytes).recalled_bytes == 0
        node["m"].wait_for(lambda state: held(state) == [8])


def test_budgets_that_follow_each_other_before_the_first_is_done() -> None:
    with Node() as node:
        node["m"].wait_for(lambda state: held(state) == [ALL])
        ids = [node["w"].ask_budget(extents * node.link.extent_bytes) for extents in (6, 2, 2, 10)]
        answers = [node["w"].budget_set(request_id) for request_id in ids]
        assert [answer.recalled_bytes // node.link.extent_bytes for answer in answers] == [10, 4, 0, 0]
        node["m"].wait_for(lambda state: held(state) == [10])


@pytest.mark.parametrize(("budget_bytes", "says"), [(-1, "is negative"), (1 << 40, "more than the pool")])
def test_an_impossible_budget_is_refused_with_a_reason(budget_bytes: int, says: str) -> None:
    with Node(budget=0.5) as node:
        answer = node["w"].set_budget(budget_bytes)
        assert answer.refused is not None
        assert says in answer.refused
        assert answer.budget_bytes == node["w"].show().budget_bytes == node.pool_bytes // 2
        answer = node["m"].set_budget(0)
        assert answer.refused == "m does not lend"


def test_requests_that_do_not_fit_take_blocks_back_from_whoever_has_most() -> None:
    with Node(borrowers=["m", "n"], window_s=0.5) as node:
        node["w"].wait_for(lambda state: lent(state) == [8, 8])
        node["w"].obey("add", tokens=40 * 16 - 20, max_tokens=10)  # all of its 48 blocks are lent
        assert node["w"].finished_request() == 1
        assert node["w"].show().recalls_total["demand"] >= 1
        # Then the window passes without a request, and it is all lent again.
        node["w"].wait_for(lambda state: lent(state) == [8, 8])


def test_demand_takes_from_a_borrower_whose_requests_use_it() -> None:
    with Node() as node:
        node["m"].wait_for(lambda state: held(state) == [ALL])
        ids = [node["m"].obey("add", tokens=500, max_tokens=60) for _ in range(3)]
        node["m"].wait_for(lambda state: state.groups[0].borrowed_used + state.groups[0].borrowed_cached > 0)
        node["w"].obey("add", tokens=46 * 16 - 20, max_tokens=10)
        assert node["w"].finished_request() == 1
        assert sorted(node["m"].finished_request() for _ in ids) == [1, 2, 3]


def test_after_a_recall_for_demand_nothing_is_offered_for_a_window_unless_the_budget_is_raised() -> None:
    with Node(budget=0.5, window_s=100.0) as node:
        state = node["w"].wait_for(lambda state: lent(state) == [ALL // 2])
        assert state.lends[0].no_offer_s is None
        node["w"].obey("add", tokens=40 * 16 - 20, max_tokens=10)
        assert node["w"].finished_request() == 1
        no_offer_s = node["w"].show().lends[0].no_offer_s
        assert no_offer_s is not None
        assert 0 < no_offer_s <= 100
        node["w"].set_budget(node.pool_bytes)
        assert node["w"].show().lends[0].no_offer_s is None


def test_the_paper_s_policy_keeps_less_and_can_be_chosen() -> None:
    lent_extents = {}
    for policy in ("total", "longest"):
        with Node(policy=policy, budget=0.0, window_s=20.0) as node:
            node["w"].obey("add", requests=2, tokens=150, max_tokens=10)
            assert {node["w"].finished_request() for _ in range(2)} == {1, 2}
            node["w"].set_budget(node.pool_bytes)
            state = node["w"].wait_for(lambda state: lent(state)[0] > 0)
            lent_extents[policy] = lent(state)[0]
    assert lent_extents["total"] < lent_extents["longest"] < 16


def test_leases_of_the_dead_end_when_nothing_serves_them_any_more() -> None:
    """A thread that serves a two-sided transport may still write what its borrower sent before it died."""
    over = threading.Event()
    servers = []

    def serve_link(store_path: str) -> threading.Thread:
        Path(store_path).write_text(str(os.getpid()))
        servers.append(threading.Thread(target=over.wait))
        servers[-1].start()
        return servers[-1]

    with Node(start=["m"]) as node:
        lender = EngineWithoutModel(node.setups["w"], serve_link)
        lender.coordinator.start()
        try:
            node["m"].wait_for(lambda state: held(state) == [ALL])
            node["m"].kill()
            admin = Admin(node.address("w"))
            state = admin.wait_for(lambda state: state.lends[0].peer_state == "its last transfers are ending")
            assert state.groups[0].lent == ALL * node.link.meu_w
            node["m"].start()  # it is not welcomed yet
            assert admin.show().lends[0].heard_s_ago is None
            over.set()
            node["m"].wait_for(lambda state: held(state) == [ALL])
            assert len(servers) == 2
            admin.close()
        finally:
            over.set()
            lender.close()


def test_what_the_dead_launched_on_a_gpu_may_still_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their extents come home when a driver has had time to stop it."""
    monkeypatch.setattr("swiftkv.worker.lender._QUIET_S", 3600.0)
    with Node(start=["m"]) as node:
        setup = node.setups["w"]
        spec = msgspec.structs.replace(setup.lending, transport="peer")
        lender = EngineWithoutModel(msgspec.structs.replace(setup, lending=spec), publish)
        lender.coordinator.start()
        try:
            node["m"].wait_for(lambda state: held(state) == [ALL])
            node["m"].kill()
            admin = Admin(node.address("w"))
            state = admin.wait_for(lambda state: state.lends[0].peer_state == "its last transfers are ending")
            assert state.groups[0].lent == ALL * node.link.meu_w
            admin.close()
        finally:
            lender.close()


def test_a_lender_that_cannot_publish_its_pool_says_so_and_lends_when_it_can() -> None:
    """A full disk is no reason to die. It is tried again for as long as it takes."""
    with Node(start=["m"]) as node:
        rendezvous = Path(node.directory.name, "rendezvous")
        lender = EngineWithoutModel(node.setups["w"], lambda store_path: publish_pool_in(rendezvous, store_path))
        lender.coordinator.start()
        admin = Admin(node.address("w"))
        try:
            state = admin.wait_for(lambda state: "cannot be published" in state.lends[0].peer_state)
            assert "No such file or directory" in state.lends[0].peer_state
            state = node["m"].wait_for(lambda state: "cannot be published" in state.borrows[0].peer_state)
            assert held(state) == [0]
            rendezvous.mkdir()
            node["m"].wait_for(lambda state: held(state) == [ALL])
            assert admin.show().lends[0].peer_state == "attached"
        finally:
            lender.close()
            admin.close()


def publish_pool_in(directory: Path, store_path: str) -> None:
    """Publish the pool as an engine does, in a directory that may be missing, where the tests' borrower looks."""
    publish_pool(directory / Path(store_path).name, pool_of(4096))
    publish(store_path)


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
        node["m"].wait_for(lambda state: held(state) == [ALL])


def test_a_process_that_is_gone_is_not_welcomed() -> None:
    """A new process with the same pid is not welcomed either: its start time differs."""
    me = Identity.of_this_process("m")
    with Node(borrowers=["m"]) as node, zmq.Context() as context:
        node["m"].wait_for(lambda state: held(state) == [ALL])
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


def test_a_borrower_that_cannot_be_watched_is_refused_until_it_can() -> None:
    """For want of a file descriptor: the engine goes on, and the borrower asks again."""
    me = Identity.of_this_process("m")
    with Node(start=["w"]) as node, zmq.Context() as context:
        socket = context.socket(zmq.DEALER)
        socket.connect(node.address("w"))

        def refused(attempt: int, links: list[LinkGeometry]) -> str | None:
            socket.send(msgspec.msgpack.encode(Hello("m", me.incarnation, attempt, me.pid, me.start_ticks, links)))
            assert socket.poll(TIMEOUT_S * 1000)
            return msgspec.msgpack.decode(socket.recv(), type=Welcome).refused

        assert "not configured" in (refused(1, []) or "")  # connected, which takes a descriptor, too
        with no_file_descriptor_left(node["w"].process.pid):
            assert "cannot be watched" in (refused(1, [node.link]) or "")
        assert refused(2, [node.link]) is None
        socket.close(linger=0)


def test_the_leases_of_a_borrower_end_with_the_last_of_its_processes() -> None:
    """A rank may go on copying for a moment when the one that knows the leases is gone."""
    with Node(start=["w"]) as node, zmq.Context() as context:
        ranks = [subprocess.Popen(["sleep", "infinity"]) for _ in range(3)]
        first, *others = ((rank.pid, start_ticks(rank.pid)) for rank in ranks)
        gone = (others[0][0], others[0][1] + 1)
        socket = context.socket(zmq.DEALER)
        socket.connect(node.address("w"))
        socket.send(msgspec.msgpack.encode(Hello("m", 7, 1, *first, [node.link], [*others, gone])))
        assert socket.poll(TIMEOUT_S * 1000)
        welcome = msgspec.msgpack.decode(socket.recv(), type=Welcome)
        socket.send(msgspec.msgpack.encode(Attached(7, welcome.sender, 1)))
        assert socket.poll(TIMEOUT_S * 1000)
        node["w"].wait_for(lambda state: state.lends[0].counts["home"] == 0)
        for rank in (ranks[0], ranks[2]):
            rank.kill()
            rank.wait()
            assert node["w"].show().lends[0].counts["home"] == 0
        ranks[1].kill()
        ranks[1].wait()
        node["w"].wait_for(lambda state: state.lends[0].counts["home"] == ALL)
        socket.close(linger=0)


def test_what_the_dead_said_last_does_not_make_them_attached() -> None:
    """Otherwise they would be lent extents that nobody knows of and nobody returns."""
    with Node(start=[]) as node, zmq.Context() as context:
        spec, me = node.setups["w"].lending, Identity.of_this_process("w")
        scheduler = Scheduler([GroupSpec(2, 48)], 16, 4, 512, 512, lend_links=[Link(0, ALL, 3)])
        wire = SocketWire(context, spec.leases_address, [])
        lender = Lender(
            me,
            spec,
            wire,
            scheduler=scheduler,
            pool_bytes=node.pool_bytes,
            serve_link=lambda _: None,
            wake_engine=lambda: None,
        )
        borrower = subprocess.Popen(["sleep", "infinity"])
        lender.on_message(b"m", Hello("m", 7, 1, borrower.pid, start_ticks(borrower.pid), [node.link]))
        borrower.kill()
        borrower.wait()
        wire.wait(TIMEOUT_S)
        lender.on_message(b"m", Attached(7, me.incarnation, 1))
        for now_s in (1.0, 2.0):
            lender.tick(now_s, woken=False)
        assert lender.describe(NOTHING_KNOWN, with_extents=False).lends[0].counts["home"] == ALL
        wire.close()
