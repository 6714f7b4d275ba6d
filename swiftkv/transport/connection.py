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
"""Rows travel in messages of about this size, which is also what each side needs beside its pool."""

_UNTIL_IT_ENDS = timedelta(days=365)  # a connection whose other side died ends by itself
_TAG, _UNUSED_TAG = 0, 1


class Connection:
    """One end of a connection between a borrower and a lender.

    Every method raises `RuntimeError` when the other side has gone, or keeps it waiting beyond the deadline: the
    connection has ended then.

    gloo listens on a port of the loopback interface until both are connected and after, and takes whoever speaks its
    protocol; so both prove that they read the rendezvous file before anything else is said. Another user who wins the
    race to connect learns nothing, and costs an attempt.
    """

    def __init__(self, peer: PeerHandle, rank: int, connect_timeout_s: float, deadline_s: float) -> None:
        """Raises `RuntimeError` if nobody connects in time, `TransferError` for one that has not read `peer`'s file."""
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
        """Wait as long as it takes: a borrower with nothing to copy says nothing for hours."""
        self._group.recv([header], self._peer, _TAG).wait(_UNTIL_IT_ENDS)

    def _show_proof(self, secret: str) -> None:
        shown = torch.empty(PROOF_BYTES, dtype=torch.uint8)
        coming = self._group.recv([shown], self._peer, _TAG)  # gloo sends to one who is receiving
        self.send(proof(secret, self._rank, self._peer))
        coming.wait(self._deadline)
        if not is_proof(shown, secret, self._peer, self._rank):
            raise TransferError("who connected has not read the rendezvous file")

    def cut(self) -> None:
        """Fail every wait for the other side now, as if that had died. Any thread may call this."""
        with contextlib.suppress(RuntimeError):  # gloo closes a pair on which a wait took too long, and says so
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
