"""A borrower copes with memory that cannot be reached, and its leases follow its requests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import zmq

from swiftkv.lease.messages import Accept, Heartbeat, Offer, Recall, Return
from swiftkv.lease.process import Identity
from tests.lease.lending_process import TIMEOUT_S, Node, agrees, held, lent
from tests.support.lender_by_hand import LenderByHand

ALL = 16  # extents of a lender of 48 blocks, 3 in each


def test_a_pool_that_cannot_be_attached_is_tried_again() -> None:
    with Node(failing_attaches=3) as node:  # a second each, in which somebody must look
        state = node["m"].wait_for(lambda state: state.borrows[0].peer_state == "as the test wishes")
        assert held(state) == [0]
        node["m"].wait_for(lambda state: held(state) == [ALL])
        node["w"].wait_for(lambda state: lent(state) == [ALL])
        assert len([path for path in Path(node.directory.name).iterdir() if path.is_file()]) == 1  # of the last attempt


def test_no_step_waits_for_a_lender_that_is_to_be_attached() -> None:
    with Node(gated=True) as node:
        node["m"].wait_for(lambda state: state.borrows[0].peer_state == "attaching")
        node["m"].obey("add", tokens=100, max_tokens=20)
        assert node["m"].finished_request() == 1
        assert node["m"].show().borrows[0].peer_state == "attaching"
        assert node.gate is not None
        with node.gate.open("w"):
            node["m"].wait_for(lambda state: held(state) == [ALL])


def test_a_lender_that_dies_while_it_is_attached_is_attached_when_it_is_back() -> None:
    with Node(gated=True) as node:
        for _ in range(3):  # more than wait at a time
            node["m"].wait_for(lambda state: state.borrows[0].peer_state == "attaching")
            node["w"].kill()
            node["m"].wait_for(lambda state: state.borrows[0].peer_state == "not there")
            node["w"].start()
        assert node.gate is not None
        with node.gate.open("w"):
            node["m"].wait_for(lambda state: held(state) == [ALL])
            node["w"].wait_for(lambda state: lent(state) == [ALL])


def test_copies_that_fail_cost_the_leases_and_not_the_link() -> None:
    with Node(lenders=["v", "w"]) as node:
        node["m"].wait_for(lambda state: held(state) == [ALL, ALL])
        node["w"].process.send_signal(signal.SIGSTOP)  # or it lends anew before anybody looks
        node["m"].obey("give_up", links=[1])
        state = node["m"].wait_for(lambda state: held(state) == [ALL, 0])
        assert state.borrows[1].peer_state == "a transfer failed"
        assert state.groups[0].borrowed_free == ALL * node.link.meu_m
        node["w"].process.send_signal(signal.SIGCONT)
        node["m"].wait_for(lambda state: held(state) == [ALL, ALL])
        node["w"].wait_for(lambda state: lent(state) == [ALL])
        lend, borrow = node["w"].show(with_extents=True).lends[0], node["m"].show(with_extents=True).borrows[1]
        assert agrees(lend, borrow)
        assert borrow.epochs is not None
        assert set(np.frombuffer(borrow.epochs, np.uint32)) == {2}  # every lease is a new one


def test_what_its_requests_use_is_drained_before_it_is_returned() -> None:
    with Node() as node:
        node["m"].wait_for(lambda state: held(state) == [ALL])
        for _ in range(4):
            node["m"].obey("add", tokens=500, max_tokens=100)
        node["m"].wait_for(lambda state: state.groups[0].borrowed_used + state.groups[0].borrowed_cached > 0)
        assert node["w"].set_budget(0).lent_bytes == 0
        state = node["m"].show()
        assert (held(state), state.groups[0].borrowed_used, state.groups[0].borrowed_cached) == ([0], 0, 0)
        assert sorted(node["m"].finished_request() for _ in range(4)) == [1, 2, 3, 4]


def test_a_lender_that_dies_takes_nothing_from_running_requests_but_time() -> None:
    with Node(lenders=["v", "w"]) as node:
        node["m"].wait_for(lambda state: held(state) == [ALL, ALL])
        for _ in range(6):
            node["m"].obey("add", tokens=600, max_tokens=100)
        node["m"].wait_for(lambda state: state.groups[0].borrowed_used + state.groups[0].borrowed_cached > 0)
        node["v"].kill()
        assert sorted(node["m"].finished_request() for _ in range(6)) == [1, 2, 3, 4, 5, 6]


def lender_by_hand(node: Node, context: zmq.Context[zmq.Socket[bytes]]) -> LenderByHand:
    """Return lender `w`, attached; it lives in the test's process."""
    lender = LenderByHand(node.address("w"), context)
    store_path = Path(node.directory.name, "store")
    store_path.write_text(str(os.getpid()))
    lender.be_attached(Identity.of_this_process("w"), store_path)
    return lender


def test_messages_that_come_late_twice_or_for_others_do_no_harm() -> None:
    with Node(start=["m"]) as node, zmq.Context() as context:
        lender = lender_by_hand(node, context)
        lender.say(Offer, [3, 5], [1, 1], sender=lender.me.incarnation ^ 1)
        lender.say(Offer, [3, 5], [1, 1], receiver=lender.hello.sender ^ 1)
        lender.say(Recall, [7], [2])
        assert lender.hears(Return) == ([7], [2])  # a recall that overtook its offer
        lender.say(Offer, [3, 7], [1, 2])
        assert lender.hears(Accept) == ([3], [1])
        lender.say(Offer, [3], [1])
        assert lender.hears(Accept) == ([3], [1])
        state = node["m"].show()
        assert (held(state), state.groups[0].borrowed_free) == ([1], node.link.meu_m)
        lender.welcome(lender.me, Path("already attached"))
        lender.say(Recall, [3, 3], [1, 1])  # makes no sense
        lender.say(Recall, [3], [1])
        assert lender.hears(Return) == ([3], [1])
        lender.say(Recall, [3], [1])
        assert lender.hears(Return) == ([3], [1])
        assert held(node["m"].show()) == [0]
        lender.close()


def test_a_heartbeat_says_what_is_borrowed() -> None:
    with Node(start=["m"]) as node, zmq.Context() as context:
        lender = lender_by_hand(node, context)
        lender.say(Offer, [0, 1, 2], [1, 1, 1])
        lender.receive(Accept)
        lender.send(Heartbeat(lender.me.incarnation, lender.hello.sender, [16]))
        assert lender.receive(Heartbeat).extents == [3]
        assert node["m"].show().borrows[0].peer_extents == 16
        lender.close()


def test_a_lender_that_breaks_the_protocol_ends_the_engine() -> None:
    """A defect is not carried on with: the engine ends, and says why."""
    with Node(start=["m"]) as node, zmq.Context() as context:
        lender = lender_by_hand(node, context)
        lender.say(Offer, [0], [1])
        lender.receive(Accept)
        lender.say(Offer, [0], [2])
        assert node["m"].process.wait(TIMEOUT_S) == 1
        lender.close()
