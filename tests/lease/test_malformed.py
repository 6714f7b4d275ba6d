"""Meaningless messages: the receiver counts each one, drops it and goes on."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
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
from tests.lease.lending_process import TIMEOUT_S, Node, held, lent
from tests.support.lender_by_hand import LenderByHand, i32, u32

ALL = 16  # extents of a lender of 48 blocks, 3 in each
UNREADABLE = [
    b"",
    b"\xc1",
    b"not a message",
    msgspec.msgpack.encode(["unheard of", 1, 2]),
    msgspec.msgpack.encode(["accept", 1]),
    msgspec.msgpack.encode(["recall", 1, 2, "0", b"", b""]),
    msgspec.msgpack.encode(["heartbeat", 1, 2, [None]]),
    msgspec.msgpack.encode(["hello", "m", 1, 1, 0, 1, []]),
    msgspec.msgpack.encode(["welcome", 1, 2, 1, 1 << 40, 1, []]),
]
LEASES = [
    (-1, i32([0]), u32([1])),
    (1, i32([0]), u32([1])),
    (0, i32([-1]), u32([1])),
    (0, i32([3, ALL]), u32([1, 1])),
    (0, i32([1 << 30]), u32([1])),
    (0, i32([0]), u32([0])),
    (0, i32([0, 0]), u32([1, 1])),
    (0, i32([0, 1]), u32([1])),
    (0, i32([]), u32([1])),
    (0, b"abc", b"abc"),
]


def attached_borrower(node: Node, context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], Identity, int]:
    """Return the socket and identity of `m`, which this process pretends to be, and the lender's incarnation."""
    me = Identity.of_this_process("m")
    socket = context.socket(zmq.DEALER)
    socket.connect(node.address("w"))
    socket.send(msgspec.msgpack.encode(Hello("m", me.incarnation, 1, me.pid, me.start_ticks, [node.link])))
    welcome = receive(socket)
    assert isinstance(welcome, Welcome)
    socket.send(msgspec.msgpack.encode(Attached(me.incarnation, welcome.sender, 1)))
    while not isinstance(offer := receive(socket), Offer):
        pass
    socket.send(msgspec.msgpack.encode(Accept(me.incarnation, welcome.sender, 0, offer.extents, offer.epochs)))
    return socket, me, welcome.sender


def receive(socket: zmq.Socket[bytes]) -> FromLender:
    assert socket.poll(TIMEOUT_S * 1000)
    message: FromLender = msgspec.msgpack.decode(socket.recv(), type=FromLender)
    return message


def test_a_lender_drops_what_means_nothing_and_goes_on_lending() -> None:
    with Node(start=["w"]) as node, zmq.Context() as context:
        socket, me, lender = attached_borrower(node, context)
        node["w"].wait_for(lambda state: lent(state) == [ALL])
        meaningless: list[FromBorrower] = [
            kind(me.incarnation, lender, *leases) for kind in (Accept, Return) for leases in LEASES
        ]
        meaningless += [Heartbeat(me.incarnation, lender, []), Heartbeat(me.incarnation, lender, [1, 2])]
        frames = [*UNREADABLE, *map(msgspec.msgpack.encode, meaningless)]
        for frame in frames:
            socket.send(frame)
        state = node["w"].wait_for(lambda state: state.messages_dropped_total == len(frames))
        assert lent(state) == [ALL]
        socket.send(msgspec.msgpack.encode(Return(me.incarnation, lender, 0, i32([5]), u32([1]))))
        while not isinstance(offer := receive(socket), Offer):  # it is home, and lent again
            pass
        assert (offer.extents, offer.epochs) == (i32([5]), u32([2]))
        socket.close(linger=0)


def test_a_borrower_drops_what_means_nothing_and_goes_on_borrowing() -> None:
    with (
        Node(start=["m"]) as node,
        zmq.Context() as context,
        closing(LenderByHand(node.address("w"), context)) as lender,
    ):
        me = Identity.of_this_process("w")
        outside = Path(node.directory.name).parent / "outside"
        lender.welcome(me, outside)  # the pool's file there would be removed in the end
        named = (me.incarnation, lender.hello.sender)
        lender.send(Welcome(*named, lender.hello.attempt, me.pid, me.start_ticks, []))
        store_path = Path(node.directory.name, "store")
        store_path.write_text(str(os.getpid()))
        lender.be_attached(me, store_path)
        before = node["m"].show().messages_dropped_total
        assert before >= 2
        for frame in UNREADABLE:
            lender.socket.send_multipart([lender.route, frame])
        for kind in (Offer, Recall):
            for leases in LEASES:
                lender.send(kind(*named, *leases))
        for reported in ([], [1, 2]):
            lender.send(Heartbeat(*named, reported))
        dropped = before + len(UNREADABLE) + 2 * len(LEASES) + 2
        state = node["m"].wait_for(lambda state: state.messages_dropped_total == dropped)
        assert held(state) == [0]
        lender.say(Offer, [3], [1])
        assert lender.hears(Accept) == ([3], [1])


@pytest.mark.parametrize("pid", [1 << 30, (1 << 31) - 1])
def test_a_borrower_that_names_a_process_that_cannot_be_is_not_welcomed(pid: int) -> None:
    with Node() as node, zmq.Context() as context:
        node["m"].wait_for(lambda state: held(state) == [ALL])
        node["m"].kill()
        node["w"].wait_for(lambda state: state.lends[0].peer_state == "not there")
        socket = context.socket(zmq.DEALER)
        socket.connect(node.address("w"))
        socket.send(msgspec.msgpack.encode(Hello("m", 1, 1, pid, 1, [node.link])))
        node["m"].start()
        node["m"].wait_for(lambda state: held(state) == [ALL])
        socket.close(linger=0)
