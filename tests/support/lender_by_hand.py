"""A lender's half of the lease protocol, in which the test sends every message itself."""

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
    Hello,
    LendingSpec,
    LinkGeometry,
    Offer,
    PeerSpec,
    Recall,
    Return,
    Welcome,
)
from swiftkv.lease.process import Identity

TIMEOUT_S = 120.0

Message = TypeVar("Message")


def borrowing_over(link: LinkGeometry, directory: Path) -> LendingSpec:
    """Return the spec of an engine that borrows over one link from the lender `a`, which listens in `directory`."""
    return LendingSpec(
        leases_address=f"ipc://{directory}/leases",
        lenders=[PeerSpec("a", f"ipc://{directory}/a", [link])],
        borrowers=[],
        budget_bytes=0,
        window_s=1.0,
        policy="total",
        transport="shm",
        stream_buffers=2,
        rendezvous=str(directory),
        max_wait_s=100.0,
    )


class LenderByHand:
    """A lender that sends messages as the process `me`, which `welcome` sets."""

    def __init__(self, address: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.me: Identity
        self.socket = context.socket(zmq.ROUTER)
        self.socket.bind(address)
        self.hello = self.receive(Hello)

    def close(self) -> None:
        self.socket.close(linger=0)

    def welcome(self, me: Identity, store_path: Path) -> None:
        self.me = me
        paths = [str(store_path)]
        self.send(Welcome(me.incarnation, self.hello.sender, self.hello.attempt, me.pid, me.start_ticks, paths))

    def be_attached(self, me: Identity, store_path: Path) -> None:
        """Welcome every Hello until one is answered; some may belong to an earlier attempt."""
        self.welcome(me, store_path)
        while isinstance(message := self._receive(), Hello):
            self.hello = message
            self.welcome(me, store_path)
        assert isinstance(message, Attached)

    def say(self, kind: type[Offer | Recall], extents: list[int], epochs: list[int], **named: int) -> None:
        names = {"sender": self.me.incarnation, "receiver": self.hello.sender, "link": 0, **named}
        self.send(kind(extents=i32(extents), epochs=u32(epochs), **names))

    def send(self, message: FromLender) -> None:
        self.socket.send_multipart([self.route, msgspec.msgpack.encode(message)])

    def receive(self, kind: type[Message]) -> Message:
        """Return the next message of that kind; skip Hellos that were repeated before they were answered."""
        while not isinstance(message := self._receive(), kind):
            assert isinstance(message, Hello)
        return message

    def hears(self, kind: type[Accept | Return]) -> tuple[list[int], list[int]]:
        message = self.receive(kind)
        return np.frombuffer(message.extents, np.int32).tolist(), np.frombuffer(message.epochs, np.uint32).tolist()

    def _receive(self) -> FromBorrower:
        assert self.socket.poll(TIMEOUT_S * 1000)
        self.route, frame = self.socket.recv_multipart()
        message: FromBorrower = msgspec.msgpack.decode(frame, type=FromBorrower)
        return message


def i32(values: list[int]) -> bytes:
    return np.array(values, np.int32).tobytes()


def u32(values: list[int]) -> bytes:
    return np.array(values, np.uint32).tobytes()
