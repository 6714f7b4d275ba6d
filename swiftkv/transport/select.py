"""Picks the transport that a configuration names."""

from __future__ import annotations

from typing import Literal

from swiftkv.transport.base import SharedPool, Transport

TransportKind = Literal["shm", "p2p"]


def open_transport(kind: TransportKind, pool: SharedPool, num_threads: int = 1) -> Transport:
    """The borrower's half for `pool`. `num_threads` copy where the transport has threads to choose.

    A lender needs nothing for `shm` beyond `publish_pool`; for `p2p` it also runs `serve_p2p` for each attachment.
    """
    match kind:
        case "shm":
            from swiftkv.transport.shm import ShmTransport

            return ShmTransport(pool, num_threads)
        case "p2p":
            from swiftkv.transport.p2p import P2pTransport

            return P2pTransport(pool)
