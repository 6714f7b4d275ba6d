"""The connections of a coordinator: their interface, and the sockets of a coordinator that runs in a thread."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec
import zmq

from swiftkv.lease.messages import (
    MAX_LEASE_MESSAGE_BYTES,
    FromAdmin,
    FromBorrower,
    FromLender,
    MalformedMessage,
    PeerSpec,
    ToAdmin,
)
from swiftkv.lease.process import PeerProcess
from swiftkv.wakeup import Wakeup

_RECONNECT_MS = 50
_DROP_LOG_INTERVAL_S = 10.0
_log = logging.getLogger(__name__)

Route = bytes
"""The identity that our ROUTER gives to the connection of a borrower or of the gateway."""


class Wire(Protocol):
    """The connections of one coordinator to others, and its clock."""

    def now_s(self) -> float:
        """Return the time, of a clock that does not go back."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until a message has come, or a process is gone; return whether `wake` was called."""

    def wake(self) -> None:
        """End the `wait` in progress, or otherwise the next one; from any thread."""

    def send(self, route: Route, message: FromLender | ToAdmin) -> None:
        """Send to a borrower or the gateway. A message to one that is gone is lost: `watch_exit` notices its end."""

    def send_to_lender(self, index: int, message: FromBorrower) -> None:
        """Send to a lender; drop the message while its coordinator does not listen."""

    def received(self) -> Iterable[tuple[Route, FromBorrower | FromAdmin]]:
        """Return the messages of borrowers and the gateway."""

    def received_from_lenders(self) -> Iterable[tuple[int, FromLender]]:
        """Return the messages of lenders, with the index of each lender."""

    def lender_name(self, index: int) -> str: ...

    def reconnect(self, index: int) -> None:
        """Forget messages from the lender, and those to it that it has not read."""

    def watch_exit(self, process: PeerProcess, on_exit: Callable[[], None]) -> None:
        """Call `on_exit` once, in `wait`, when the process is gone, and close its file descriptor."""

    def drop(self, sender: str, error: msgspec.DecodeError | MalformedMessage) -> None:
        """Count a message that cannot be read, or names something that does not exist."""

    @property
    def dropped_total(self) -> int:
        """The number of dropped messages."""


class SocketWire:
    """The `Wire` of a coordinator in a thread: a ROUTER for borrowers and the gateway, and a DEALER to each lender.

    Nothing is queued for a peer that is not connected. Queues have no bound, because the protocol limits how much one
    side sends before the other answers. Except for `wake`, only one thread at a time may call it.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, lenders: Sequence[PeerSpec]) -> None:
        """Raises `zmq.ZMQError` if `address` cannot be bound."""
        self._context = context
        self._lenders = lenders
        self._poller = zmq.Poller()
        self._exits: dict[int, Callable[[], None]] = {}  # by pidfd
        self._encoder = msgspec.msgpack.Encoder()
        self._decode_inbound = msgspec.msgpack.Decoder[FromBorrower | FromAdmin](FromBorrower | FromAdmin).decode
        self._decode_from_lender = msgspec.msgpack.Decoder[FromLender](FromLender).decode
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.bind(address)
        self._dealers = [self._connect(peer) for peer in lenders]
        self._wakeup = Wakeup()
        self._poller.register(self._wakeup.fd, zmq.POLLIN)
        self._dropped_total = 0
        self._drop_log_due_s = 0.0

    @property
    def dropped_total(self) -> int:
        return self._dropped_total

    def now_s(self) -> float:
        return time.monotonic()

    def send(self, route: Route, message: FromLender | ToAdmin) -> None:
        try:
            self._router.send_multipart([route, self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def send_to_lender(self, index: int, message: FromBorrower) -> None:
        with contextlib.suppress(zmq.Again):
            self._dealers[index].send(self._encoder.encode(message), zmq.NOBLOCK)

    def lender_name(self, index: int) -> str:
        return self._lenders[index].name

    def reconnect(self, index: int) -> None:
        self._poller.unregister(self._dealers[index])
        self._dealers[index].close(linger=0)
        self._dealers[index] = self._connect(self._lenders[index])

    def wake(self) -> None:
        self._wakeup.wake()

    def watch_exit(self, process: PeerProcess, on_exit: Callable[[], None]) -> None:
        self._poller.register(process.fd, zmq.POLLIN)

        def exited() -> None:
            self._forget(process)
            on_exit()

        self._exits[process.fd] = exited

    def _forget(self, process: PeerProcess) -> None:
        self._poller.unregister(process.fd)
        del self._exits[process.fd]
        process.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait until a message has come, or a process is gone; return whether `wake` was called.

        Ends of processes are handled first, so that messages of dead processes are ignored.
        """
        ready = self._poller.poll(max(0, int(timeout_s * 1000) + 1))
        for source, _ in ready:
            if isinstance(source, int) and (exited := self._exits.get(source)):
                exited()
        return self._wakeup.take()

    def received(self) -> Iterator[tuple[Route, FromBorrower | FromAdmin]]:
        """Yield the messages of borrowers and the gateway; drop those that cannot be read."""
        while True:
            try:
                route, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decode_inbound(b"".join(frames))
            except msgspec.DecodeError as error:
                self.drop("a borrower or the gateway", error)
                continue
            yield route, message

    def received_from_lenders(self) -> Iterator[tuple[int, FromLender]]:
        """Yield the messages of lenders, with the index of each lender; drop those that cannot be read."""
        for index in range(len(self._dealers)):
            while True:
                try:
                    frame = self._dealers[index].recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                try:
                    message = self._decode_from_lender(frame)
                except msgspec.DecodeError as error:
                    self.drop(self._lenders[index].name, error)
                    continue
                yield index, message

    def drop(self, sender: str, error: msgspec.DecodeError | MalformedMessage) -> None:
        """Count a dropped message; log it, but only every few seconds, because there may be many."""
        self._dropped_total += 1
        if time.monotonic() >= self._drop_log_due_s:
            self._drop_log_due_s = time.monotonic() + _DROP_LOG_INTERVAL_S
            _log.error("dropped a malformed lease message from %s (%d so far): %s", sender, self._dropped_total, error)

    def close(self) -> None:
        for socket in (self._router, *self._dealers):
            socket.close(linger=0)
        for fd in list(self._exits):
            del self._exits[fd]
            PeerProcess(fd).close()
        self._wakeup.close()

    def _connect(self, peer: PeerSpec) -> zmq.Socket[bytes]:
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        dealer.connect(peer.leases_address)
        return dealer

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_LEASE_MESSAGE_BYTES)
        self._poller.register(socket, zmq.POLLIN)
        return socket
