"""What a borrower does when memory cannot be reached, and that leases follow its requests."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import zmq

from swiftkv.lease.messages import (
    Accept,
    Attached,
    FromBorrower,
    FromLender,
    Heartbeat,
    Hello,
    Offer,
    Recall,
    Return,
    Welcome,
)
from swiftkv.lease.process import Identity
from tests.lease.lending_process import TIMEOUT_S, Node, agrees, held, lent

ALL = 16  # extents of a lender of 48 blocks, 3 in each

Message = TypeVar("Message")


def test_a_pool_that_cannot_be_attached_is_tried_again() -> None:
    with Node(failing_attaches=1) as node:
        state = node["m"].wait_for(lambda state: state.borrows[0].peer_state == "as the test wishes")
        assert held(state) == [0]
        node["m"].wait_for(lambda state: held(state) == [ALL])
        node["w"].wait_for(lambda state: lent(state) == [ALL])
        assert len([path for path in Path(node.directory.name).iterdir() if path.is_file()]) == 1  # of the last attempt


def test_copies_that_fail_cost_the_leases_and_not_the_link() -> None:
    with Node(lenders=["v", "w"]) as node:
        node["m"].wait_for(lambda state: held(state) == [ALL, ALL])
        node["m"].obey("give_up", links=[1])
        state = node["m"].wait_for(lambda state: held(state) == [ALL, 0])
        assert state.borrows[1].peer_state == "a transfer failed"
        assert state.groups[0].borrowed_free == ALL * node.link.meu_m
        node["w"].wait_for(lambda state: lent(state) == [0])
        node["m"].wait_for(lambda state: held(state) == [ALL, ALL])
        lend, borrow = node["w"].show(with_extents=True).lends[0], node["m"].show(with_extents=True).borrows[1]
        assert agrees(lend, borrow)


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


class LenderByHand:
    """A lender whose every message the test says itself; it lives in the test's process."""

    def __init__(self, node: Node, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.me = Identity.of_this_process("w")
        self.socket = context.socket(zmq.ROUTER)
        self.socket.bind(node.address("w"))
        self.store_path = Path(node.directory.name, "store")
        self.store_path.write_text(str(self.me.pid))
        self.hello = self.receive(Hello)
        self.welcome(self.me)
        self.receive(Attached)

    def welcome(self, me: Identity) -> None:
        paths = [str(self.store_path)]
        self.send(Welcome(me.incarnation, self.hello.sender, self.hello.attempt, me.pid, me.start_ticks, paths))

    def say(self, kind: type[Offer | Recall], extents: list[int], epochs: list[int], **named: int) -> None:
        names = {"sender": self.me.incarnation, "receiver": self.hello.sender, "link": 0, **named}
        self.send(kind(extents=i32(extents), epochs=u32(epochs), **names))

    def send(self, message: FromLender) -> None:
        self.socket.send_multipart([self.route, msgspec.msgpack.encode(message)])

    def receive(self, kind: type[Message]) -> Message:
        """The next of that kind; Hellos that were repeated before they were answered are passed over."""
        while True:
            assert self.socket.poll(TIMEOUT_S * 1000)
            self.route, frame = self.socket.recv_multipart()
            message = msgspec.msgpack.decode(frame, type=FromBorrower)
            if isinstance(message, kind):
                return message
            assert isinstance(message, Hello)

    def hears(self, kind: type[Accept | Return]) -> tuple[list[int], list[int]]:
        message = self.receive(kind)
        return np.frombuffer(message.extents, np.int32).tolist(), np.frombuffer(message.epochs, np.uint32).tolist()


def test_messages_that_come_late_twice_or_for_others_do_no_harm() -> None:
    with Node(start=["m"]) as node, zmq.Context() as context:
        lender = LenderByHand(node, context)
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
        lender.welcome(lender.me)
        lender.say(Recall, [3, 3], [1, 1])
        assert lender.hears(Return) == ([3], [1])
        lender.say(Recall, [3], [1])
        assert lender.hears(Return) == ([3], [1])
        assert held(node["m"].show()) == [0]
        lender.socket.close(linger=0)


def test_a_heartbeat_says_what_is_borrowed() -> None:
    with Node(start=["m"]) as node, zmq.Context() as context:
        lender = LenderByHand(node, context)
        lender.say(Offer, [0, 1, 2], [1, 1, 1])
        lender.receive(Accept)
        lender.send(Heartbeat(lender.me.incarnation, lender.hello.sender, [16]))
        assert lender.receive(Heartbeat).extents == [3]
        assert node["m"].show().borrows[0].peer_extents == 16
        lender.socket.close(linger=0)


def test_a_lender_that_breaks_the_protocol_ends_the_engine() -> None:
    """A defect is not carried on with: the engine ends, and says why."""
    with Node(start=["m"]) as node, zmq.Context() as context:
        lender = LenderByHand(node, context)
        lender.say(Offer, [0], [1])
        lender.receive(Accept)
        lender.say(Offer, [0], [2])
        assert node["m"].process.wait(TIMEOUT_S) == 1
        lender.socket.close(linger=0)


def i32(values: list[int]) -> bytes:
    return np.array(values, np.int32).tobytes()


def u32(values: list[int]) -> bytes:
    return np.array(values, np.uint32).tobytes()
