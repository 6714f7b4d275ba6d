"""Picks the transport that a configuration names."""

from __future__ import annotations

from swiftkv.transport.base import DevicePool, SharedPool, Transport
from swiftkv.transport.topology import TransportKind


def open_transport(kind: TransportKind, pool: SharedPool | DevicePool, num_threads: int = 1) -> Transport:
    """The borrower's half for `pool`. `num_threads` copy where the transport has threads to choose.

    A lender needs nothing for `shm` and `peer` beyond `publish_pool`; for `p2p` it also runs `serve_p2p` for each
    attachment. `peer` is for pools on CUDA devices, the others are for pools in host memory.
    """
    if isinstance(pool, DevicePool):
        assert kind == "peer", f"{kind} does not reach a pool on a device"
        from swiftkv.transport.peer import PeerTransport

        return PeerTransport(pool)
    assert kind != "peer", "peer does not reach a pool in host memory"
    match kind:
        case "shm":
            from swiftkv.transport.shm import ShmTransport

            return ShmTransport(pool, num_threads)
        case "p2p":
            from swiftkv.transport.p2p import P2pTransport

            return P2pTransport(pool)
