"""A connection of two processes over gloo: rank 0 borrows, rank 1 lends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch

from swiftkv.errors import TransferError
from swiftkv.transport.base import Int64Array, PeerHandle
from swiftkv.transport.rendezvous import PROOF_BYTES, gloo_group, is_proof, open_store, proof
from swiftkv.transport.rows import Rows

BORROWER, LENDER = 0, 1
MESSAGE_BYTES = 4 << 20
"""The approximate size of messages with rows, and of the memory that each side needs beside its pool."""

_UNTIL_IT_ENDS = timedelta(days=365)  # a connection ends by itself when the other side dies
_TAG, _UNUSED_TAG = 0, 1


class Connection:
    """One end of a connection between a borrower and a lender.

    Every method raises `RuntimeError` when the other side is gone, or keeps it waiting beyond the deadline. The
    connection has then ended.

    gloo listens on a port of the loopback interface, even when both sides are connected, and accepts any process that
    speaks its protocol. So both sides first prove that they have read the rendezvous file. Another user's process that
    connects first learns nothing; it only makes this attempt fail.
    """

    def __init__(self, peer: PeerHandle, rank: int, connect_timeout_s: float, deadline_s: float) -> None:
        """Raises `RuntimeError` if no process connects in time, `TransferError` if it has not read `peer`'s file."""
        store = open_store(Path(peer.store_path), connect_timeout_s)
        self._group = gloo_group(store, rank, 2, connect_timeout_s)
        self._rank = rank
        self._peer = 1 - rank
        self._deadline = timedelta(seconds=connect_timeout_s)
        self._show_proof(peer.secret)
        self._deadline = timedelta(seconds=deadline_s)

    def send(self, tensor: torch.Tensor) -> None:
        self._group.send([tensor], self._peer, _TAG).wait(self._deadline)

    def receive(self, tensor: torch.Tensor) -> None:
        self._group.recv([tensor], self._peer, _TAG).wait(self._deadline)

    def receive_next_job(self, header: torch.Tensor) -> None:
        """Wait without a deadline: a borrower with nothing to copy is silent for hours."""
        self._group.recv([header], self._peer, _TAG).wait(_UNTIL_IT_ENDS)

    def _show_proof(self, secret: str) -> None:
        shown = torch.empty(PROOF_BYTES, dtype=torch.uint8)
        coming = self._group.recv([shown], self._peer, _TAG)  # gloo sends only to a side that receives
        self.send(proof(secret, self._rank, self._peer))
        coming.wait(self._deadline)
        if not is_proof(shown, secret, self._peer, self._rank):
            raise TransferError("the process that connected does not have the secret of the rendezvous file")

    def cut(self) -> None:
        """Fail every wait for the other side now, as if it had died. Any thread may call this."""
        with contextlib.suppress(RuntimeError):  # gloo closes a pair on which a wait timed out, and raises
            self._group.recv([torch.empty(1)], self._peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))

    def send_rows(self, rows: Rows, offsets: Int64Array, width_bytes: int) -> None:
        for part in _messages(offsets, width_bytes):
            self.send(rows.take(part, width_bytes))

    def receive_rows(self, rows: Rows, offsets: Int64Array, width_bytes: int) -> None:
        for part in _messages(offsets, width_bytes):
            message = torch.empty(len(part), width_bytes, dtype=torch.uint8)
            self.receive(message)
            rows.put(part, message)


def _messages(offsets: Int64Array, width_bytes: int) -> Iterator[Int64Array]:
    rows = max(1, MESSAGE_BYTES // width_bytes)
    for begin in range(0, len(offsets), rows):
        yield offsets[begin : begin + rows]
