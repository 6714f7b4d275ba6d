"""Picks the transport that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence

from swiftkv.policies import IoBackend
from swiftkv.transport.base import DevicePool, SharedPool, Transport
from swiftkv.transport.topology import LINK_PROGRAMS, TransportKind


def open_transport(
    kind: TransportKind,
    pool: SharedPool | DevicePool,
    num_threads: int = 1,
    io_backend: IoBackend = "kernel",
    deadline_s: float = 30.0,
    max_programs: int = LINK_PROGRAMS,
    widths_bytes: Sequence[int] = (),
) -> Transport:
    """Open the borrower's half for `pool`.

    `shm` is for pools in host memory, `peer` for pools on CUDA devices, `p2p` for both. A lender calls `publish_pool`;
    for `p2p` it also runs `serve_p2p` for each attachment.

    Args:
        num_threads: The threads that copy with `shm`.
        io_backend: How `peer` copies.
        deadline_s: With `p2p`, a lender that keeps a copy waiting for longer is cut off.
        max_programs: The most programs of a kernel of `peer`.
        widths_bytes: The sizes of layer blocks for which the kernels of `peer` are compiled now.
    """
    if kind == "p2p":
        from swiftkv.transport.p2p import P2pTransport

        return P2pTransport(pool, deadline_s=deadline_s)
    if isinstance(pool, DevicePool):
        assert kind == "peer", f"{kind} does not reach a pool on a device"
        from swiftkv.transport.peer import PeerTransport

        return PeerTransport(pool, io_backend, max_programs=max_programs, widths_bytes=widths_bytes)
    assert kind == "shm", f"{kind} does not reach a pool in host memory"
    from swiftkv.transport.shm import ShmTransport

    return ShmTransport(pool, num_threads)
